//! DNS capture: every answer matches its question and comes from the server asked, and nothing on port 53 leaves the
//! pod but ztunnel's own. The stand-in answers whatever it is asked; the servers need not exist.
#![cfg(feature = "root")]

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use socket2::SockRef;
use weir_tests::{
    dns_client::{DNS, any, ask_tcp, check, connect_tcp, udp, udp_at},
    mesh_node::{MeshNode, difference},
    observer::{Observer, UDP},
    world::{Families, Host},
    ztunnel::{MARK, dns},
};

/// Nobody answers: all that has to be waited for is that nothing comes.
const SILENCE: Duration = Duration::from_millis(100);

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

    /// What `f` adds to the pod's counters.
    fn counted(&self, f: impl FnOnce()) -> Vec<(&'static str, u64)> {
        let before = self.node.counters(&self.pod).unwrap();
        f();
        difference(&before, &self.node.counters(&self.pod).unwrap())
    }

    /// A UDP socket in the pod on a port of its own.
    fn socket(&self, v6: bool) -> UdpSocket {
        udp(&self.pod, any(v6))
    }
}

/// The servers of a family. Only the first exists: the host outside.
fn servers(f: &Fixture, v6: bool) -> [SocketAddr; 3] {
    let others = if v6 { ["fd96::10", "fd96::11"] } else { ["10.96.0.10", "10.96.0.11"] };
    let [a, b] = others.map(|ip| SocketAddr::new(ip.parse().unwrap(), DNS));
    [f.node.world.outside.addr(v6, DNS), a, b]
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
            let resolver = udp_at(&f.pod, at);
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
        let server = udp_at(&f.node.world.outside, at);
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
    f.node.lose_ztunnel(&f.pod).unwrap();
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
