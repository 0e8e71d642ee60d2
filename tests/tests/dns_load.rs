//! DNS capture under load: few ports with many queries, more ports than there are slots, and nobody who answers.
#![cfg(feature = "root")]

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::{Domain, Protocol, Socket, Type};
use weir_common::Counter;
use weir_tests::{
    dns_client::{DNS, any, ask_tcp, check, connect_tcp, udp, udp_at},
    mesh_node::{MeshNode, difference},
    observer::Observer,
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

fn servers(v6: bool) -> [SocketAddr; 3] {
    let ips =
        if v6 { ["fd96::10", "fd96::11", "fd96::12"] } else { ["10.96.0.10", "10.96.0.11", "10.96.0.12"] };
    ips.map(|ip| SocketAddr::new(ip.parse().unwrap(), DNS))
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
                    let (socket, servers) = (f.socket(v6), servers(v6));
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
    let [server, ..] = servers(false);
    let counted = f.counted(|| {
        for port in 0..PORTS {
            let socket = udp_at(&f.pod, SocketAddr::new(any(false), 20_000 + port));
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
    let [server, ..] = servers(false);
    // In ztunnel's place, and slow: a socket with its mark that answers only when all have asked.
    f.node.lose_ztunnel(&f.pod).unwrap();
    let slow = f.pod.inside(|| {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).unwrap();
        socket.set_mark(MARK).unwrap();
        socket.set_recv_buffer_size(32 << 20).unwrap();
        let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 15053).into();
        // A program that is just being started may hold ztunnel's for a moment.
        let deadline = Instant::now() + Duration::from_secs(5);
        while let Err(error) = socket.bind(&at) {
            assert!(Instant::now() < deadline, "{error}");
            std::thread::sleep(Duration::from_millis(1));
        }
        UdpSocket::from(socket)
    });
    slow.set_read_timeout(Some(SILENCE)).unwrap();
    let mut clients = Vec::new();
    let counted = f.counted(|| {
        for port in 0..PORTS {
            let client = udp_at(&f.pod, SocketAddr::new(any(false), 20_000 + port));
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
