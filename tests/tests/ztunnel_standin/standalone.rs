//! Its sockets, its proxying, its end, without an agent and without any redirection.
//!
//! One trick makes captured connections without capture: a route that delivers a foreign address locally,
//! and a destination port that happens to be ztunnel's own.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    thread,
    time::Instant,
};

use nix::sys::{
    socket::{setsockopt, sockopt},
    time::{TimeVal, TimeValLike},
};
use weir_tests::ztunnel::{Counts, Listener, MARK, Mesh, Options, PASSTHROUGH_TOS, Preface, Ztunnel, dns};

use crate::net::{CLIENT, Net, POD, SOON, ask, eventually, preface, sockets};

const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 5);

fn start() -> Ztunnel {
    Ztunnel::start(Options::default()).unwrap()
}

#[test]
fn listeners_have_ztunnels_addresses_and_mark() {
    let (net, ztunnel) = (Net::pod(), start());
    ztunnel.serve_in_netns(net.fd(), "uid").unwrap();
    let lines = sockets(&net);
    let wanted = [
        ("tcp", "*:15001"),
        ("tcp", "*:15006"),
        ("tcp", "*:15008"),
        ("tcp", "127.0.0.1:15053"),
        ("tcp", "[::1]:15053"),
        ("udp", "127.0.0.1:15053"),
        ("udp", "[::1]:15053"),
    ];
    for (protocol, address) in wanted {
        let line = lines.iter().find(|l| l.starts_with(protocol) && l.contains(&format!(" {address} ")));
        let line = line.unwrap_or_else(|| panic!("no {protocol} {address} in {lines:#?}"));
        assert!(line.contains(&format!("fwmark:{MARK:#x}")), "{line}");
        if address.starts_with('*') {
            assert!(line.contains(" 128 "), "backlog in {line}");
        }
    }
    assert_eq!(lines.len(), wanted.len(), "{lines:#?}");
    // A second one joins the first: SO_REUSEPORT on every socket of both.
    let second = start();
    second.serve_in_netns(net.fd(), "uid").unwrap();
    assert_eq!(sockets(&net).len(), 2 * wanted.len());
    second.kill();
    eventually("the second one's are closed", || sockets(&net).len() == wanted.len());
    ztunnel.kill();
    eventually("all are closed", || sockets(&net).is_empty());
}

#[test]
fn without_ipv6_everything_is_v4() {
    let net = Net::pod();
    net.run(|| std::fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "1").unwrap());
    let ztunnel = Ztunnel::start(Options { ipv6: false, ..Options::default() }).unwrap();
    ztunnel.serve_in_netns(net.fd(), "uid").unwrap();
    let lines = sockets(&net);
    assert_eq!(lines.len(), 5, "{lines:#?}");
    assert!(lines.iter().any(|l| l.contains(" 0.0.0.0:15001 ")), "{lines:#?}");
}

#[test]
fn taken_port_fails_with_its_name_and_leaves_nothing_open() {
    let (net, ztunnel) = (Net::pod(), start());
    let app = net.run(|| TcpListener::bind("127.0.0.1:15053").unwrap());
    let error = ztunnel.serve_in_netns(net.fd(), "uid").unwrap_err().to_string();
    assert!(error.contains("127.0.0.1:15053") && error.contains("in use"), "{error}");
    eventually("only the app's is left", || sockets(&net).len() == 1);
    assert!(ztunnel.workloads().is_empty());
    drop(app);
    // Another test's child may hold the port for the moment between its fork and its exec.
    eventually("the port is free", || ztunnel.serve_in_netns(net.fd(), "uid").is_ok());
    assert_eq!(ztunnel.workloads(), ["uid"]);
}

#[test]
fn hbone_reaches_the_app_from_the_clients_address() {
    let net = Net::pod();
    // Clients that live elsewhere; the app's answers to them are routed back to ztunnel, which in a
    // captured pod is the data path's work.
    for line in [
        "link set lo up",
        "addr add 2001:db8::2/128 dev lo nodad",
        "route add local 203.0.113.0/24 dev lo table 77",
        "rule add to 203.0.113.0/24 lookup 77",
        "-6 route add local 2001:db8:9::/64 dev lo table 77",
        "-6 rule add to 2001:db8:9::/64 lookup 77",
    ] {
        net.ip(line);
    }
    let ztunnel = start();
    ztunnel.serve_in_netns(net.fd(), "uid").unwrap();
    let cases = [("10.77.0.2:8080", "203.0.113.9:4711"), ("[2001:db8::2]:8080", "[2001:db8:9::9]:4711")];
    for (pod, client) in cases {
        let (pod, client): (SocketAddr, SocketAddr) = (pod.parse().unwrap(), client.parse().unwrap());
        let clients = net.app(pod);
        // Bytes right behind the preface belong to the app; half-close travels through and back.
        let mut stream = net.connect(pod.ip(), 15008);
        write!(stream, "{}hello ", Preface { original_dst: pod, client }).unwrap();
        assert_eq!(ask(stream, "app"), "HELLO APP");
        assert_eq!(clients.recv_timeout(SOON).unwrap().ip(), client.ip());
        let seen = ztunnel.log().wait_for(SOON, |a| a.original_dst == pod).unwrap();
        assert_eq!((seen.listener, seen.client), (Listener::Hbone, client));
        assert_eq!((seen.local, &*seen.pod), (SocketAddr::new(pod.ip(), 15008), "uid"));
        assert_eq!(seen.so_original_dst, None);
    }
}

#[test]
fn what_ztunnel_refuses_is_refused_and_counted() {
    let (net, ztunnel) = (Net::pod(), start());
    ztunnel.serve_in_netns(net.fd(), "uid").unwrap();
    assert_eq!(ask(net.connect(POD, 15001), ""), "");
    assert_eq!(ask(net.connect(Ipv4Addr::LOCALHOST, 15001), ""), "");
    assert_eq!(ask(net.connect(POD, 15006), ""), "");
    assert_eq!(ask(net.connect(POD, 15008), &preface((POD, 15006), (CLIENT, 1))), "");
    // Not a preface; and one for another pod.
    assert_eq!(ask(net.connect(POD, 15008), "GET / HTTP/1.1\r\n"), "");
    assert_eq!(ask(net.connect(POD, 15008), &preface((OUTSIDE, 80), (CLIENT, 1))), "");
    // Nobody listens there.
    assert_eq!(ask(net.connect(POD, 15008), &preface((POD, 9), (CLIENT, 1))), "");
    let expected = Counts {
        outbound: 2,
        inbound: 1,
        hbone: 4,
        illegal: 4,
        bad_preface: 2,
        upstream_failed: 1,
        ..Counts::default()
    };
    assert_eq!(ztunnel.log().counts(), expected);
}

/// A pod where what [`CLIENT`] sends to [`OUTSIDE`] stays inside, and the world where [`OUTSIDE`] really is.
fn pod_and_outside() -> (Net, Net) {
    let outside = Net::new(&["link set lo up", "addr add 192.0.2.5/32 dev lo"]);
    let pod = Net::pod();
    // The other end goes by descriptor: these namespaces have no names.
    let target = format!("/proc/{}/fd/{}", std::process::id(), outside.raw_fd());
    pod.ip("link add eth0 type veth peer name veth0");
    pod.ip(&format!("link set veth0 netns {target}"));
    for line in [
        "link set eth0 up",
        "route add 192.0.2.0/24 dev eth0 src 10.77.0.2",
        // By source: a rule without one would match the reverse path of the answers, too.
        "rule add pref 20 from 10.77.0.3 lookup 77",
        "route add local 192.0.2.0/24 dev lo src 10.77.0.2 table 77",
    ] {
        pod.ip(line);
    }
    for line in ["link set veth0 up", "route add 10.77.0.0/24 dev veth0"] {
        outside.ip(line);
    }
    (pod, outside)
}

#[test]
fn passthrough_goes_to_the_original_destination_with_its_own_tos() {
    let (pod, outside) = pod_and_outside();
    let listener = outside.run(|| TcpListener::bind((OUTSIDE, 15001)).unwrap());
    save_syn(&listener);
    let ztunnel = start();
    ztunnel.serve_in_netns(pod.fd(), "uid").unwrap();
    let mut app = pod.connect_as_client(SocketAddrV4::new(OUTSIDE, 15001));
    let (mut server, client) = accept(&listener);
    assert_eq!(client.ip(), POD);
    assert_eq!(u32::from(saved_syn(&server)[1]), PASSTHROUGH_TOS);
    app.write_all(b"ping").unwrap();
    let mut word = [0; 4];
    server.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"ping");
    let seen = ztunnel.log().wait_for(SOON, |_| true).unwrap();
    assert_eq!(seen.listener, Listener::Outbound);
    assert_eq!(seen.original_dst, (OUTSIDE, 15001).into());
    assert_eq!(seen.peer, app.local_addr().unwrap());
    assert_eq!(seen.so_original_dst, None);
    assert_eq!(ztunnel.connections(), 1);
    // A kill cuts both halves.
    ztunnel.kill();
    assert_eq!(server.read(&mut word).unwrap_or(0), 0);
    assert_eq!(app.read(&mut word).unwrap_or(0), 0);
}

#[test]
fn peers_are_spoken_to_on_15008() {
    let (pod, outside) = pod_and_outside();
    let mesh = Mesh::default();
    let options = || Options { mesh: mesh.clone(), ..Options::default() };
    let (here, there) = (Ztunnel::start(options()).unwrap(), Ztunnel::start(options()).unwrap());
    here.serve_in_netns(pod.fd(), "here").unwrap();
    there.serve_in_netns(outside.fd(), "there").unwrap();
    assert!(mesh.is_peer(OUTSIDE.into()) && mesh.is_peer(POD.into()));
    let client = pod.connect_as_client(SocketAddrV4::new(OUTSIDE, 15001));
    let from = client.local_addr().unwrap();
    let seen = there.log().wait_for(SOON, |_| true).unwrap();
    assert_eq!((seen.listener, seen.client), (Listener::Hbone, from));
    assert_eq!(seen.original_dst, (OUTSIDE, 15001).into());
    there.remove("there");
    assert!(!mesh.is_peer(OUTSIDE.into()));
    eventually("all are closed", || sockets(&outside).is_empty());
}

#[test]
fn graceful_stop_refuses_new_connections_and_finishes_old_ones() {
    let (net, ztunnel) = (Net::pod(), start());
    net.app((POD, 8080).into());
    ztunnel.serve_in_netns(net.fd(), "uid").unwrap();
    let mut old = net.connect(POD, 15008);
    old.write_all(preface((POD, 8080), (CLIENT, 1)).as_bytes()).unwrap();
    let log = ztunnel.log().clone();
    log.wait_for(SOON, |_| true).unwrap();
    let stopping = thread::spawn(|| ztunnel.stop_gracefully());
    eventually("its listeners are closed", || !sockets(&net).iter().any(|l| l.contains(":15008")));
    assert!(net.run(|| TcpStream::connect((POD, 15008))).is_err());
    assert_eq!(ask(old, "late words"), "LATE WORDS");
    stopping.join().unwrap();
    assert_eq!(log.counts().open, 0);
    eventually("only the app's is left", || sockets(&net).iter().all(|l| l.contains(":8080")));
}

/// `cargo test -p weir-tests --test ztunnel_standin -- --ignored --nocapture connections_a_second`
#[test]
#[ignore = "a measurement"]
fn connections_a_second() {
    const CLIENTS: usize = 4;
    const EACH: usize = 3_000;
    let (net, ztunnel) = (Net::pod(), start());
    let app = net.run(|| TcpListener::bind((POD, 8080)).unwrap());
    thread::spawn(move || app.incoming().for_each(drop));
    ztunnel.serve_in_netns(net.fd(), "uid").unwrap();
    let line = preface((POD, 8080), (CLIENT, 1));
    let started = Instant::now();
    net.run(|| {
        thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        let mut stream = TcpStream::connect((POD, 15008)).unwrap();
                        stream.write_all(line.as_bytes()).unwrap();
                        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
                    }
                });
            }
        })
    });
    let total = CLIENTS * EACH;
    assert_eq!(ztunnel.log().counts().hbone, total as u64);
    println!(
        "{:.0} connections a second, clients and app included",
        total as f64 / started.elapsed().as_secs_f64()
    );
}

#[test]
fn dns_answers_over_udp_and_tcp() {
    let (net, ztunnel) = (Net::pod(), start());
    ztunnel.serve_in_netns(net.fd(), "uid").unwrap();
    let asked = dns::query(0xbeef, "db.prod.svc");
    let expected = Some((0xbeef, dns::address_of("db.prod.svc")));
    for (from, to) in [("127.0.0.1:0", "127.0.0.1:15053"), ("[::1]:0", "[::1]:15053")] {
        let udp = net.run(|| UdpSocket::bind(from).unwrap());
        udp.set_read_timeout(Some(SOON)).unwrap();
        udp.send_to(&asked, to).unwrap();
        let mut buffer = [0; 512];
        let (len, source) = udp.recv_from(&mut buffer).unwrap();
        assert_eq!(source, to.parse().unwrap());
        assert_eq!(dns::parse_answer(&buffer[..len]), expected);

        let to: SocketAddr = to.parse().unwrap();
        let mut tcp = net.connect(to.ip(), to.port());
        tcp.write_all(&(asked.len() as u16).to_be_bytes()).unwrap();
        tcp.write_all(&asked).unwrap();
        let mut len = [0; 2];
        tcp.read_exact(&mut len).unwrap();
        let mut answer = vec![0; u16::from_be_bytes(len).into()];
        tcp.read_exact(&mut answer).unwrap();
        assert_eq!(dns::parse_answer(&answer), expected);
    }
    let counts = ztunnel.log().counts();
    assert_eq!((counts.dns_udp, counts.dns_tcp), (2, 2));
    assert!(ztunnel.log().dns().iter().all(|q| q.name == "db.prod.svc"));
}

/// An accept that does not wait for ever.
fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    setsockopt(listener, sockopt::ReceiveTimeout, &TimeVal::seconds(SOON.as_secs() as i64)).unwrap();
    let (stream, peer) = listener.accept().expect("somebody connects soon");
    stream.set_read_timeout(Some(SOON)).unwrap();
    (stream, peer)
}

fn save_syn(listener: &TcpListener) {
    let on: libc::c_int = 1;
    // SAFETY: the option takes one int, and `on` lives across the call.
    let done = unsafe {
        let len = size_of_val(&on) as libc::socklen_t;
        libc::setsockopt(
            listener.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_SAVE_SYN,
            (&raw const on).cast(),
            len,
        )
    };
    assert_eq!(done, 0);
}

/// IP and TCP header of the SYN that began `stream`.
fn saved_syn(stream: &TcpStream) -> Vec<u8> {
    let mut headers = vec![0_u8; 256];
    let mut len = headers.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into a buffer of that size, and says how many.
    let done = unsafe {
        let buffer = headers.as_mut_ptr().cast();
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_SAVED_SYN, buffer, &mut len)
    };
    assert_eq!(done, 0);
    headers.truncate(len as usize);
    headers
}
