//! DNS capture: every answer matches its question and comes from the server asked, and nothing on port 53 leaves the
//! pod but ztunnel's own. The stand-in answers whatever it is asked; the servers need not exist.

use std::{
    collections::HashMap,
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use weir_common::Counter;
use weir_tests::{
    mesh_node::{MeshNode, difference},
    observer::{Observer, UDP},
    world::{Families, Host},
    ztunnel::{MARK, dns},
};

const DNS: u16 = 53;
/// Nobody answers: all that has to be waited for is that nothing comes.
const SILENCE: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(5);

struct Fixture {
    node: MeshNode,
    pod: Host,
}

impl Fixture {
    fn new() -> Self {
        let node = MeshNode::new().unwrap();
        let pod = node.pod("a", Families::Dual).unwrap();
        node.capture(&pod).unwrap();
        Self { node, pod }
    }

    fn observe(&self) -> Observer {
        Observer::start(&self.node.world.node, &self.node.world.device_of(&self.pod)).unwrap()
    }

    fn stop_ztunnel(&self) {
        self.node.ztunnel.remove(MeshNode::owner(&self.pod).uid.as_str());
    }

    /// What `f` adds to the pod's counters.
    fn counted(&self, f: impl FnOnce()) -> Vec<(&'static str, u64)> {
        let before = self.node.counters(&self.pod).unwrap();
        f();
        difference(&before, &self.node.counters(&self.pod).unwrap())
    }

    /// A UDP socket in the pod on a port of its own.
    fn socket(&self, v6: bool) -> UdpSocket {
        udp(&self.pod, SocketAddr::new(any(v6), 0))
    }
}

fn udp(host: &Host, address: SocketAddr) -> UdpSocket {
    let socket = host.inside(|| UdpSocket::bind(address)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    SockRef::from(&socket).set_recv_buffer_size(4 << 20).unwrap();
    socket
}

fn any(v6: bool) -> IpAddr {
    if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
}

/// The servers of a family. Only the first exists: the host outside.
fn servers(f: &Fixture, v6: bool) -> [SocketAddr; 3] {
    let others = if v6 { ["fd96::10", "fd96::11"] } else { ["10.96.0.10", "10.96.0.11"] };
    let [a, b] = others.map(|ip| SocketAddr::new(ip.parse().unwrap(), DNS));
    [f.node.world.outside.addr(v6, DNS), a, b]
}

/// Checks that a packet answers this very question: its id, its question section, the address of its name.
fn check(answer: &[u8], question: &[u8], name: &str) {
    let (id, address) = dns::parse_answer(answer).expect("an answer");
    assert_eq!(id.to_be_bytes(), question[..2], "{name}: id");
    assert_eq!(answer[12..question.len()], question[12..], "{name}: question");
    assert_eq!(address, dns::address_of(name));
}

fn ask_connected(f: &Fixture, server: SocketAddr, name: &str) -> Vec<u8> {
    let socket = f.socket(server.is_ipv6());
    socket.connect(server).unwrap();
    let question = dns::query(7, name);
    socket.send(&question).unwrap();
    let mut buffer = vec![0; 8192];
    let length = socket.recv(&mut buffer).unwrap();
    check(&buffer[..length], &question, name);
    buffer.truncate(length);
    buffer
}

fn connect_tcp(host: &Host, server: SocketAddr) -> io::Result<TcpStream> {
    let stream = host.inside(|| TcpStream::connect_timeout(&server, PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn ask_tcp(stream: &mut TcpStream, id: u16, name: &str) -> Vec<u8> {
    let question = dns::query(id, name);
    stream.write_all(&[&(question.len() as u16).to_be_bytes()[..], &question].concat()).unwrap();
    let mut length = [0; 2];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer).unwrap();
    check(&answer, &question, name);
    answer
}

#[test]
fn answers_come_from_the_server_asked() {
    let f = Fixture::new();
    let observer = f.observe();
    for v6 in [false, true] {
        for server in servers(&f, v6) {
            let counted = f.counted(|| drop(ask_connected(&f, server, "connected.example")));
            assert_eq!(counted, [("dns", 1), ("dns_answer", 1)], "{server}");
            let counted = f.counted(|| {
                let (socket, question) = (f.socket(v6), dns::query(8, "sendto.example"));
                socket.send_to(&question, server).unwrap();
                let mut buffer = [0; 512];
                let (length, from) = socket.recv_from(&mut buffer).unwrap();
                assert_eq!(from, server);
                check(&buffer[..length], &question, "sendto.example");
            });
            assert_eq!(counted, [("dns", 1), ("dns_answer", 1)], "{server}");
        }
        // A socket of both families asks an IPv4 server.
        let both = f.socket(true);
        let [server, ..] = servers(&f, false);
        let IpAddr::V4(v4) = server.ip() else { unreachable!() };
        let mapped = SocketAddr::new(v4.to_ipv6_mapped().into(), DNS);
        let question = dns::query(11, "mapped.example");
        both.send_to(&question, mapped).unwrap();
        let mut buffer = [0; 512];
        let (length, from) = both.recv_from(&mut buffer).unwrap();
        assert_eq!(from, mapped);
        check(&buffer[..length], &question, "mapped.example");
    }
    let seen = f.node.ztunnel.log().counts();
    assert_eq!((seen.dns_udp, seen.dns_tcp, seen.outbound), (14, 0, 0));
    assert_eq!(observer.stop().dns().count(), 0, "nothing on port 53 leaves the pod");
}

#[test]
fn answers_over_tcp_come_from_the_server_asked() {
    let f = Fixture::new();
    let observer = f.observe();
    for v6 in [false, true] {
        for server in servers(&f, v6) {
            let mut stream = connect_tcp(&f.pod, server).unwrap();
            assert_eq!(stream.peer_addr().unwrap(), server);
            ask_tcp(&mut stream, 9, "tcp.example");
            ask_tcp(&mut stream, 10, "tcp-again.example");
        }
    }
    let seen = f.node.ztunnel.log().counts();
    assert_eq!((seen.dns_udp, seen.dns_tcp, seen.outbound), (0, 12, 0));
    assert_eq!(observer.stop().dns().count(), 0, "nothing on port 53 leaves the pod");
}

/// What musl does: one socket, one id, all servers at once.
#[test]
fn parallel_queries_from_one_port_with_one_id_stay_apart() {
    let f = Fixture::new();
    for v6 in [false, true] {
        let servers = servers(&f, v6);
        for same_name in [true, false] {
            let socket = f.socket(v6);
            let name = |at: usize| if same_name { "one.example".into() } else { format!("n{at}.example") };
            for (at, server) in servers.iter().enumerate() {
                socket.send_to(&dns::query(0x4711, &name(at)), server).unwrap();
            }
            let mut answered: Vec<usize> = (0..3)
                .map(|_| {
                    let mut buffer = [0; 512];
                    let (length, from) = socket.recv_from(&mut buffer).unwrap();
                    let at = servers.iter().position(|server| *server == from).expect("a server asked");
                    check(&buffer[..length], &dns::query(0x4711, &name(at)), &name(at));
                    at
                })
                .collect();
            answered.sort_unstable();
            assert_eq!(answered, [0, 1, 2]);
        }
    }
}

#[test]
fn answers_may_be_large() {
    let f = Fixture::new();
    for v6 in [false, true] {
        let [_, server, _] = servers(&f, v6);
        for size in [512, 1232, 1472, 1473, 4096] {
            let answer = ask_connected(&f, server, &dns::name_of_size(size, "big.example"));
            assert_eq!(answer.len(), size);
        }
        let mut stream = connect_tcp(&f.pod, server).unwrap();
        for size in [4096, 60_000] {
            assert_eq!(ask_tcp(&mut stream, 1, &dns::name_of_size(size, "big.example")).len(), size);
        }
    }
}

/// A resolver of the pod's own, on loopback or on the pod's address, is nobody else's business.
#[test]
fn the_pods_own_resolvers_are_left_alone() {
    let f = Fixture::new();
    let own = ["127.0.0.53".parse().unwrap(), "::1".parse().unwrap(), f.pod.ip(false), f.pod.ip(true)];
    let counted = f.counted(|| {
        for ip in own {
            let at = SocketAddr::new(ip, DNS);
            let resolver = udp(&f.pod, at);
            let client = f.socket(at.is_ipv6());
            client.send_to(b"question", at).unwrap();
            let mut buffer = [0; 64];
            let (length, from) = resolver.recv_from(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"question");
            assert_eq!(from.port(), client.local_addr().unwrap().port());
            resolver.send_to(b"answer", from).unwrap();
            let (length, from) = client.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..length], from), (&b"answer"[..], at));
            let listener = f.pod.inside(|| std::net::TcpListener::bind(at)).unwrap();
            drop(connect_tcp(&f.pod, at).unwrap());
            drop(listener);
        }
    });
    assert_eq!(counted, [("self_call", 2)], "the TCP connections by the pod's address");
}

/// What ztunnel asks itself carries its mark, and really leaves.
#[test]
fn ztunnels_own_queries_leave() {
    let f = Fixture::new();
    let observer = f.observe();
    for v6 in [false, true] {
        let at = f.node.world.outside.addr(v6, DNS);
        let server = udp(&f.node.world.outside, at);
        let client = f.socket(v6);
        SockRef::from(&client).set_mark(MARK).unwrap();
        let counted = f.counted(|| {
            client.send_to(b"upstream", at).unwrap();
            let mut buffer = [0; 64];
            let (_, from) = server.recv_from(&mut buffer).unwrap();
            assert_eq!(from, f.pod.addr(v6, client.local_addr().unwrap().port()));
            server.send_to(b"answer", from).unwrap();
            assert_eq!(client.recv_from(&mut buffer).unwrap(), (6, at));
        });
        assert_eq!(counted, []);
    }
    assert_eq!(observer.stop().dns().filter(|packet| packet.protocol == UDP).count(), 2);
}

/// Fail closed: no query leaves in plaintext, by whatever socket, and TCP is refused at once.
#[test]
fn without_ztunnel_no_query_leaves() {
    let f = Fixture::new();
    let observer = f.observe();
    f.stop_ztunnel();
    for v6 in [false, true] {
        for server in servers(&f, v6) {
            let began = Instant::now();
            let error = connect_tcp(&f.pod, server).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{server}");
            assert!(began.elapsed() < Duration::from_millis(900), "refused, but late");
            let plain = f.socket(v6);
            let bound = f.socket(v6);
            SockRef::from(&bound).bind_device(Some(b"eth0")).unwrap();
            for socket in [&plain, &bound] {
                socket.set_read_timeout(Some(SILENCE)).unwrap();
                // The kernel may refuse what the guard drops.
                let _ = socket.send_to(&dns::query(1, "plain.example"), server);
                assert!(socket.recv_from(&mut [0; 512]).is_err());
            }
        }
    }
    assert_eq!(observer.stop().dns().count(), 0);
    f.node.serve(&f.pod, &f.node.ztunnel).unwrap();
    for v6 in [false, true] {
        let [server, ..] = servers(&f, v6);
        ask_connected(&f, server, "back.example");
        ask_tcp(&mut connect_tcp(&f.pod, server).unwrap(), 1, "back.example");
    }
}

/// A socket bound to the interface is captured like any other.
#[test]
fn a_socket_bound_to_the_device_gets_ztunnels_answer() {
    let f = Fixture::new();
    let observer = f.observe();
    for v6 in [false, true] {
        for server in servers(&f, v6) {
            let socket = f.socket(v6);
            SockRef::from(&socket).bind_device(Some(b"eth0")).unwrap();
            let question = dns::query(3, "bound.example");
            socket.send_to(&question, server).unwrap();
            let mut buffer = [0; 512];
            let (length, from) = socket.recv_from(&mut buffer).unwrap();
            assert_eq!(from, server);
            check(&buffer[..length], &question, "bound.example");
        }
    }
    assert_eq!(observer.stop().dns().count(), 0);
}

/// Few ports, many queries, several in flight, ids that mean nothing: every answer matches.
#[test]
fn a_flood_from_few_ports_is_answered_right() {
    const QUERIES: usize = 40_000;
    const IN_FLIGHT: usize = 8;
    let f = Fixture::new();
    let began = Instant::now();
    let counted = f.counted(|| {
        std::thread::scope(|scope| {
            for v6 in [false, true] {
                for thread in 0..2 {
                    let (socket, servers) = (f.socket(v6), servers(&f, v6));
                    scope.spawn(move || {
                        let name = |number: usize| format!("q{number}.t{thread}.example");
                        let server = |number: usize| servers[number % 3];
                        // One id for three servers; windows are short, so a name tells which it was.
                        let question = |number: usize| dns::query((number / 3) as u16, &name(number));
                        let mut waiting = HashMap::new();
                        let mut next = 0;
                        let mut buffer = [0; 512];
                        while next < QUERIES / 4 || !waiting.is_empty() {
                            while waiting.len() < IN_FLIGHT && next < QUERIES / 4 {
                                socket.send_to(&question(next), server(next)).unwrap();
                                waiting.insert(question(next)[12..].to_vec(), next);
                                next += 1;
                            }
                            let (length, from) = socket.recv_from(&mut buffer).expect("an answer is missing");
                            let asked = buffer[12..length - 16].to_vec();
                            let number = waiting.remove(&asked).expect("an answer nobody waits for");
                            assert_eq!(from, server(number));
                            check(&buffer[..length], &question(number), &name(number));
                        }
                    });
                }
            }
        });
    });
    let rate = QUERIES as f64 / began.elapsed().as_secs_f64();
    println!("{QUERIES} queries from 4 ports to 3 servers each: {rate:.0} a second");
    assert_eq!(counted, [("dns", QUERIES as u64), ("dns_answer", QUERIES as u64)]);
}

/// Far more ports than slots, as of a resolver that takes a new port each time: answered slots are used again.
#[test]
fn more_ports_than_slots_are_served_one_after_the_other() {
    const PORTS: u16 = 10_000;
    let f = Fixture::new();
    let [server, ..] = servers(&f, false);
    let counted = f.counted(|| {
        for port in 0..PORTS {
            let socket = udp(&f.pod, SocketAddr::new(any(false), 20_000 + port));
            let question = dns::query(port, "port.example");
            socket.send_to(&question, server).unwrap();
            let mut buffer = [0; 512];
            let (length, _) = socket.recv_from(&mut buffer).unwrap();
            check(&buffer[..length], &question, "port.example");
        }
    });
    assert_eq!(counted, [("dns", PORTS.into()), ("dns_answer", PORTS.into())]);
    // TCP has slots of its own.
    ask_tcp(&mut connect_tcp(&f.pod, server).unwrap(), 1, "tcp.example");
}

/// All slots wait for an answer: what comes then is dropped and counted, and the answers that come late go to those
/// who asked, and to nobody else.
#[test]
fn when_all_slots_are_waited_for_queries_are_dropped() {
    const PORTS: u16 = 4000;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let f = Fixture::new();
    let observer = f.observe();
    let [server, ..] = servers(&f, false);
    // In ztunnel's place, and slow: a socket with its mark that answers only when all have asked.
    f.stop_ztunnel();
    let slow = f.pod.inside(|| {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).unwrap();
        socket.set_mark(MARK).unwrap();
        socket.set_recv_buffer_size(32 << 20).unwrap();
        socket.bind(&SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 15053).into()).unwrap();
        UdpSocket::from(socket)
    });
    slow.set_read_timeout(Some(SILENCE)).unwrap();
    let mut clients = Vec::new();
    let counted = f.counted(|| {
        for port in 0..PORTS {
            let client = udp(&f.pod, SocketAddr::new(any(false), 20_000 + port));
            client.send_to(&dns::query(7, &format!("p{port}.example")), server).unwrap();
            clients.push(client);
        }
    });
    let count = |name: &str| counted.iter().find(|(counter, _)| *counter == name).map_or(0, |(_, n)| *n);
    let (taken, full) = (count("dns"), count("dns_full"));
    assert!(taken + full == u64::from(PORTS) && taken > 2000 && full > 200, "{counted:?}");
    let mut buffer = [0; 512];
    let mut received = Vec::new();
    while let Ok((length, from)) = slow.recv_from(&mut buffer) {
        received.push((dns::answer(&buffer[..length]).unwrap().0, from));
    }
    assert_eq!(received.len() as u64, taken);
    received.iter().for_each(|(answer, from)| assert_eq!(slow.send_to(answer, from).unwrap(), answer.len()));
    let mut answered = 0;
    for (port, client) in clients.iter().enumerate() {
        client.set_nonblocking(true).unwrap();
        while let Ok((length, from)) = client.recv_from(&mut buffer) {
            let name = format!("p{port}.example");
            assert_eq!(from, server);
            check(&buffer[..length], &dns::query(7, &name), &name);
            answered += 1;
        }
    }
    assert_eq!(answered, taken);
    assert_eq!(f.node.counters(&f.pod).unwrap().total(Counter::DnsFull), full);
    assert_eq!(observer.stop().dns().count(), 0);
}
