//! Sockets other than the plain ones, one case each, in the families where it makes sense. What each case shows is
//! stated in `docs/traffic.md` under the case's name. Nothing that is captured leaves in plaintext meanwhile: an
//! observer outside the pod watches all of it.
#![cfg(feature = "root")]

use std::{
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use weir_tests::{
    app::{App, Client, Listen, MPTCP},
    dns_client::{DNS, any, check, udp},
    mesh_node::{MeshNode, difference},
    observer::{Observer, TCP, UDP},
    sockets::{echo, fast_open, header_options, ping, raw_syn},
    world::{Families, Host},
    ztunnel::{
        Listener::{self, Inbound, Outbound},
        dns,
    },
};

const APP: u16 = 8080;
const MULTIPATH_APP: u16 = 8081;
const WEB: u16 = 80;
const PATIENCE: Duration = Duration::from_secs(5);

struct Fixture {
    node: MeshNode,
    pod: Host,
    _apps: [App; 3],
}

impl Fixture {
    fn new() -> Self {
        let node = MeshNode::new().unwrap();
        let pod = node.pod("a", Families::Dual).unwrap();
        let multipath = Listen { multipath: true, ..Listen::default() };
        let apps = [
            App::start(&pod, APP).unwrap(),
            App::start_with(&pod, MULTIPATH_APP, multipath).unwrap(),
            App::start(&node.world.outside, WEB).unwrap(),
        ];
        for host in [&pod, &node.world.outside] {
            host.sysctl("net.ipv4.ping_group_range", "0 2147483647").unwrap();
        }
        node.capture(&pod).unwrap();
        Self { node, pod, _apps: apps }
    }

    fn outside(&self) -> &Host {
        &self.node.world.outside
    }

    fn web(&self, v6: bool) -> SocketAddr {
        self.outside().addr(v6, WEB)
    }

    fn observe(&self) -> Observer {
        Observer::start(&self.node.world.node, &self.node.world.device_of(&self.pod)).unwrap()
    }
}

/// What a case must have met.
#[derive(Debug, Default, PartialEq)]
struct Walk {
    /// What the stand-in accepted: listener and original destination.
    ztunnel: Vec<(Listener, SocketAddr)>,
    /// The pod's counters.
    counters: Vec<(&'static str, u64)>,
}

impl Walk {
    fn out(to: SocketAddr) -> Self {
        Self { ztunnel: vec![(Outbound, to)], counters: vec![("captured_out", 1)] }
    }

    fn inbound(to: SocketAddr) -> Self {
        Self { ztunnel: vec![(Inbound, to)], counters: vec![("captured_in", 1), ("inside", 1)] }
    }

    fn dropped(counter: &'static str) -> Self {
        Self { counters: vec![(counter, 1)], ..Self::default() }
    }

    fn untouched() -> Self {
        Self::default()
    }
}

const V4: &[bool] = &[false];
const V6: &[bool] = &[true];
const BOTH: &[bool] = &[false, true];

type Case = (&'static str, &'static [bool], fn(&Fixture, bool) -> Walk);

const CASES: &[Case] = &[
    ("multipath TCP, outbound", BOTH, |f, v6| {
        talk(connect(&f.pod, f.web(v6), MPTCP, |_| Ok(())));
        Walk::out(f.web(v6))
    }),
    ("multipath TCP, inbound", BOTH, |f, v6| {
        let to = f.pod.addr(v6, MULTIPATH_APP);
        talk(connect(f.outside(), to, MPTCP, |_| Ok(())));
        Walk::inbound(to)
    }),
    ("TCP fast open, outbound", BOTH, |f, v6| {
        talk(fast_open(&f.pod, f.web(v6)));
        Walk::out(f.web(v6))
    }),
    ("TCP fast open, inbound", BOTH, |f, v6| {
        let to = f.pod.addr(v6, APP);
        talk(fast_open(f.outside(), to));
        Walk::inbound(to)
    }),
    ("IP options and extension headers, outbound", BOTH, |f, v6| {
        for options in header_options(v6) {
            f.node.ztunnel.log().clear();
            talk(connect(&f.pod, f.web(v6), TCP.into(), |socket| options.set(socket)));
        }
        let counters = vec![("captured_out", header_options(v6).len() as u64)];
        Walk { counters, ..Walk::out(f.web(v6)) }
    }),
    ("IP options and extension headers, inbound", BOTH, |f, v6| {
        let to = f.pod.addr(v6, APP);
        for options in header_options(v6) {
            f.node.ztunnel.log().clear();
            talk(connect(f.outside(), to, TCP.into(), |socket| options.set(socket)));
        }
        let count = header_options(v6).len() as u64;
        Walk { counters: vec![("captured_in", count), ("inside", count)], ..Walk::inbound(to) }
    }),
    ("connect to the unspecified address", BOTH, |f, v6| {
        let to = SocketAddr::new(any(v6), APP);
        let client = Client::connect(&f.pod, to).unwrap();
        assert!(client.server == "a" && client.seen_as.ip().is_loopback(), "{client:?}");
        Walk::untouched()
    }),
    ("another loopback address", V4, |f, _| {
        Client::connect(&f.pod, SocketAddr::from(([127, 9, 9, 9], APP))).unwrap();
        Walk::untouched()
    }),
    ("IPv4-mapped IPv6 socket", V4, |f, v6| {
        let IpAddr::V4(v4) = f.outside().ip(v6) else { unreachable!() };
        let mapped = SocketAddr::new(v4.to_ipv6_mapped().into(), WEB);
        talk(connect(&f.pod, mapped, TCP.into(), |socket| socket.set_only_v6(false)));
        Walk::out(f.web(v6))
    }),
    ("another mark", BOTH, |f, v6| {
        for mark in [0x1, 0x538, 0x1539_0000] {
            f.node.ztunnel.log().clear();
            talk(connect(&f.pod, f.web(v6), TCP.into(), |socket| socket.set_mark(mark)));
        }
        Walk { counters: vec![("captured_out", 3)], ..Walk::out(f.web(v6)) }
    }),
    ("IPv4 link-local destination", V4, |f, _| {
        let to = SocketAddr::from(([169, 254, 169, 254], WEB));
        connect(&f.pod, to, TCP.into(), |_| Ok(())).and_then(Client::over).unwrap_err();
        Walk::out(to)
    }),
    ("IPv6 link-local destination", V6, |f, _| {
        // ztunnel takes it, and cannot go on: the scope is not part of an original destination.
        let to = gateway(f, WEB);
        connect(&f.pod, to, TCP.into(), |_| Ok(())).and_then(Client::over).unwrap_err();
        Walk::out(SocketAddr::new(to.ip(), WEB))
    }),
    ("DNS to an IPv6 link-local server", V6, |f, _| {
        let (socket, server) = (udp(&f.pod, any(true)), gateway(f, DNS));
        let question = dns::query(5, "scoped.example");
        socket.send_to(&question, server).unwrap();
        let mut buffer = [0; 512];
        let (length, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!(from, server);
        check(&buffer[..length], &question, "scoped.example");
        Walk { counters: vec![("dns", 1), ("dns_answer", 1)], ..Walk::default() }
    }),
    ("raw socket with its own IP header", BOTH, |f, v6| {
        raw_syn(&f.pod, f.web(v6), Protocol::from(libc::IPPROTO_RAW));
        Walk::dropped("guarded")
    }),
    ("raw socket of TCP", V4, |f, v6| {
        raw_syn(&f.pod, f.web(v6), Protocol::TCP);
        // ztunnel's answer finds no socket, meets steer for want of one, and is reset: half a connection is all.
        Walk { counters: vec![("captured_out", 1), ("captured_in", 1)], ..Walk::default() }
    }),
    ("UDP, both ways", BOTH, |f, v6| {
        echo(&f.pod, f.outside(), v6, 100);
        echo(f.outside(), &f.pod, v6, 100);
        Walk::untouched()
    }),
    ("UDP in fragments, both ways", BOTH, |f, v6| {
        let observer = f.observe();
        echo(&f.pod, f.outside(), v6, 4000);
        echo(f.outside(), &f.pod, v6, 4000);
        let seen = observer.stop();
        assert!(seen.0.iter().filter(|packet| packet.protocol == UDP && packet.fragment).count() >= 6);
        Walk::untouched()
    }),
    ("ICMP echo, both ways", BOTH, |f, v6| {
        ping(&f.pod, f.outside().ip(v6));
        ping(f.outside(), f.pod.ip(v6));
        Walk::untouched()
    }),
    ("multicast UDP, both ways", BOTH, |f, v6| {
        multicast(f, v6);
        Walk::untouched()
    }),
];

#[test]
fn odd_sockets() {
    let f = Fixture::new();
    let observer = f.observe();
    for (name, families, case) in CASES {
        for &v6 in *families {
            let what = format!("{name}, {}", if v6 { "IPv6" } else { "IPv4" });
            println!("{what}");
            f.node.ztunnel.log().clear();
            let before = f.node.counters(&f.pod).unwrap();
            let wanted = case(&f, v6);
            let seen = || Walk {
                ztunnel: f
                    .node
                    .ztunnel
                    .log()
                    .accepted()
                    .iter()
                    .map(|seen| (seen.listener, seen.original_dst))
                    .collect(),
                counters: difference(&before, &f.node.counters(&f.pod).unwrap()),
            };
            // The last packet of a case may be under way.
            let deadline = Instant::now() + Duration::from_secs(1);
            while seen() != wanted && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(seen(), wanted, "{what}");
        }
    }
    let seen = observer.stop();
    let escaped: Vec<_> = seen.0.iter().filter(|packet| packet.is_escaped()).chain(seen.dns()).collect();
    assert!(escaped.is_empty(), "{escaped:?}");
}

/// It does not connect, here or elsewhere: answers come in by the interface that owns the pod's address.
#[test]
fn a_socket_bound_to_lo_gets_nowhere() {
    let f = Fixture::new();
    let observer = f.observe();
    for v6 in [false, true] {
        let to = f.web(v6);
        let error = f.pod.inside(|| {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
            socket.bind_device(Some(b"lo")).unwrap();
            socket.connect_timeout(&to.into(), Duration::from_millis(200)).unwrap_err()
        });
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
    assert_eq!(observer.stop().syns().count(), 0);
}

/// The same table in the docs: a case without a stated behaviour is not done.
#[test]
fn every_case_is_documented() {
    let docs = include_str!("../../docs/traffic.md");
    for (name, ..) in CASES {
        assert!(docs.contains(&format!("| {name} |")), "docs/traffic.md does not say: {name}");
    }
}

/// Data in the SYN does not change that it is refused at once when ztunnel is gone.
#[test]
fn fast_open_is_refused_at_once_without_ztunnel() {
    let f = Fixture::new();
    f.node.lose_ztunnel(&f.pod).unwrap();
    for v6 in [false, true] {
        let began = Instant::now();
        let error = fast_open(&f.pod, f.web(v6)).and_then(Client::over).unwrap_err();
        assert!(began.elapsed() < Duration::from_millis(900), "late: {error:?}");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}

fn talk(stream: io::Result<TcpStream>) {
    stream.and_then(Client::over).and_then(|mut client| client.exchange()).unwrap();
}

fn connect(
    host: &Host,
    to: SocketAddr,
    protocol: i32,
    prepare: impl Fn(&Socket) -> io::Result<()> + Send + Sync,
) -> io::Result<TcpStream> {
    let socket = host.inside(|| -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(protocol.into()))?;
        prepare(&socket)?;
        Ok(socket)
    })?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    Ok(socket.into())
}

/// The node's link-local address on the pod's link.
fn gateway(f: &Fixture, port: u16) -> SocketAddr {
    let scope = f.pod.inside(|| nix::net::if_::if_nametoindex("eth0")).unwrap();
    SocketAddrV6::new("fe80::1".parse().unwrap(), port, 0, scope).into()
}

/// One datagram out, seen on the node's side, and one in.
fn multicast(f: &Fixture, v6: bool) {
    const PORT: u16 = 5000;
    let group: IpAddr = if v6 { "ff15::88".parse().unwrap() } else { [239, 88, 0, 1].into() };
    let observer = f.observe();
    let index = |host: &Host, device: &str| host.inside(|| nix::net::if_::if_nametoindex(device)).unwrap();
    let out = udp(&f.pod, any(v6));
    if v6 {
        SockRef::from(&out).set_multicast_if_v6(index(&f.pod, "eth0")).unwrap();
    }
    out.send_to(b"hello", (group, PORT)).unwrap();
    let receiver = f.pod.inside(|| UdpSocket::bind((any(v6), PORT))).unwrap();
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    match group {
        IpAddr::V4(group) => receiver.join_multicast_v4(&group, &f.pod.v4.unwrap()).unwrap(),
        IpAddr::V6(group) => receiver.join_multicast_v6(&group, index(&f.pod, "eth0")).unwrap(),
    }
    let node = &f.node.world.node;
    let device = f.node.world.device_of(&f.pod);
    let sender = udp(node, any(v6));
    SockRef::from(&sender).bind_device(Some(device.as_bytes())).unwrap();
    sender.send_to(b"hello", (group, PORT)).unwrap();
    assert_eq!(receiver.recv_from(&mut [0; 16]).unwrap().0, 5);
    let sent = observer.stop().0.iter().filter(|seen| seen.v6 == v6 && seen.destination_port == PORT).count();
    assert_eq!(sent, 1);
}
