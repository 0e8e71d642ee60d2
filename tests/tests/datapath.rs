//! The design's packet walks, one case each, in both families: the real programs on the real kernel, with a
//! stand-in ztunnel. Counters must be exactly those of the connections made.
#![cfg(feature = "root")]

use std::{
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    process::{Command, Stdio},
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData};
use weir_common::{Addr, Tuple};
use weir_tests::{
    app::{App, Client},
    mesh_node::{MeshNode, difference},
    world::{Child, Families, Host, PIN_ROOT, pin_dir},
    ztunnel::Listener,
};

const APP: u16 = 8080;
const WEB: u16 = 80;
const CLOSED: u16 = 9999;

/// Two captured pods, a host outside, apps on all of them.
struct Fixture {
    node: MeshNode,
    a: Host,
    b: Host,
    apps: [App; 3],
}

impl Fixture {
    fn new() -> Self {
        let node = MeshNode::new().unwrap();
        let a = node.pod("a", Families::Dual).unwrap();
        let b = node.pod("b", Families::Dual).unwrap();
        let apps = [
            App::start(&a, APP).unwrap(),
            App::start(&b, APP).unwrap(),
            App::start(&node.world.outside, WEB).unwrap(),
        ];
        node.capture(&a).unwrap();
        node.capture(&b).unwrap();
        Self { node, a, b, apps }
    }

    fn outside(&self) -> &Host {
        &self.node.world.outside
    }
}

/// What a connection must have met.
#[derive(Debug, Default, PartialEq)]
struct Walk {
    /// What the stand-in saw: listener, pod, original destination, client.
    ztunnel: Vec<(Listener, &'static str, SocketAddr, IpAddr)>,
    /// Counters of pod a.
    a: Vec<(&'static str, u64)>,
    /// Counters of pod b.
    b: Vec<(&'static str, u64)>,
}

type Case = (&'static str, fn(&Fixture, bool) -> Walk);

const CASES: &[Case] = &[
    ("app to a remote host", |f, v6| {
        let to = f.outside().addr(v6, WEB);
        let mut client = Client::connect(&f.a, to).unwrap();
        client.exchange().unwrap();
        assert_eq!(client.server, "outside");
        assert_eq!(
            client.stream().peer_addr().unwrap(),
            to,
            "the app believes to talk to the host it asked for"
        );
        assert_eq!(client.seen_as.ip(), f.a.ip(v6));
        Walk {
            ztunnel: vec![(Listener::Outbound, "a", to, f.a.ip(v6))],
            a: vec![("captured_out", 1)],
            ..Walk::default()
        }
    }),
    ("app to a closed port of a remote host", |f, v6| {
        let to = f.outside().addr(v6, CLOSED);
        Client::connect(&f.a, to).unwrap_err();
        Walk {
            ztunnel: vec![(Listener::Outbound, "a", to, f.a.ip(v6))],
            a: vec![("captured_out", 1)],
            ..Walk::default()
        }
    }),
    ("remote host to the app", |f, v6| {
        let to = f.a.addr(v6, APP);
        let mut client = Client::connect(f.outside(), to).unwrap();
        client.exchange().unwrap();
        assert_eq!(client.seen_as.ip(), f.outside().ip(v6), "the app sees the client, not ztunnel");
        assert_eq!(client.server_addr, to);
        Walk {
            ztunnel: vec![(Listener::Inbound, "a", to, f.outside().ip(v6))],
            a: vec![("captured_in", 1), ("inside", 1)],
            ..Walk::default()
        }
    }),
    ("remote host to a closed port", |f, v6| {
        let to = f.a.addr(v6, CLOSED);
        let error = quickly(|| Client::connect(f.outside(), to)).unwrap_err();
        assert!(is_end(&error), "{error:?}");
        Walk {
            ztunnel: vec![(Listener::Inbound, "a", to, f.outside().ip(v6))],
            a: vec![("captured_in", 1), ("inside", 1)],
            ..Walk::default()
        }
    }),
    ("app to an app of the mesh", |f, v6| {
        let to = f.b.addr(v6, APP);
        let mut client = Client::connect(&f.a, to).unwrap();
        client.exchange().unwrap();
        assert_eq!(client.server, "b");
        assert_eq!(client.seen_as.ip(), f.a.ip(v6), "the app sees the client, not ztunnel");
        Walk {
            ztunnel: vec![(Listener::Outbound, "a", to, f.a.ip(v6)), (Listener::Hbone, "b", to, f.a.ip(v6))],
            a: vec![("captured_out", 1)],
            b: vec![("hbone", 1), ("inside", 1)],
        }
    }),
    ("kubelet to the app", |f, v6| {
        assert_eq!(probe(f, f.a.addr(v6, APP), true), f.node.world.node.ip(v6).to_string());
        Walk { a: vec![("probe", 1)], ..Walk::default() }
    }),
    ("kubelet to a closed port", |f, v6| {
        assert_eq!(quickly(|| probe(f, f.a.addr(v6, CLOSED), true)), "ConnectionRefused");
        Walk { a: vec![("probe", 1)], ..Walk::default() }
    }),
    ("another process of the node to the app", |f, v6| {
        let to = f.a.addr(v6, APP);
        assert_eq!(probe(f, to, false), f.node.world.node.ip(v6).to_string());
        Walk {
            ztunnel: vec![(Listener::Inbound, "a", to, f.node.world.node.ip(v6))],
            a: vec![("captured_in", 1), ("inside", 1)],
            ..Walk::default()
        }
    }),
    ("app to its own address", |f, v6| {
        let client = Client::connect(&f.a, f.a.addr(v6, APP)).unwrap();
        assert_eq!(client.seen_as.ip(), f.a.ip(v6));
        Walk { a: vec![("self_call", 1)], ..Walk::default() }
    }),
    ("app to a closed port of its own address", |f, v6| {
        let error = quickly(|| Client::connect(&f.a, f.a.addr(v6, CLOSED))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        Walk { a: vec![("self_call", 1)], ..Walk::default() }
    }),
    ("app to loopback", |f, v6| {
        let client = Client::connect(&f.a, SocketAddr::new(loopback(v6), APP)).unwrap();
        assert_eq!(client.seen_as.ip(), loopback(v6));
        Walk::default()
    }),
];

#[test]
fn walks() {
    let fixture = Fixture::new();
    walk_all(&fixture, || {});
    no_netfilter(&fixture.a);
}

/// Whatever fills the maps that packets write to, in one pod and on the node, every walk stays what it is, in this pod
/// and in the other.
#[test]
fn walks_with_full_maps() {
    let fixture = Fixture::new();
    let pins = pin_dir(&fixture.a).display().to_string();
    let maps = [(format!("{pins}/INSIDE"), 512), (format!("{PIN_ROOT}/v1/node/PROBES"), 16384)];
    walk_all(&fixture, || {
        fill::<u64>(&maps[0].0, maps[0].1, monotonic_nanos());
        fill::<u8>(&maps[1].0, maps[1].1, 1);
    });
}

/// Fills a map of connections with ones that do not exist: twice as many as it has room for.
fn fill<V: aya::Pod>(pin: &str, room: u32, value: V) {
    let map = Map::LruHashMap(MapData::from_pin(pin).unwrap());
    let mut map: HashMap<_, Tuple, V> = HashMap::try_from(map).unwrap();
    for number in 0..2 * room {
        let source = Addr::from(IpAddr::from(std::net::Ipv4Addr::from_bits(0xc612_0000 + number)));
        map.insert(Tuple { source, source_port: 1, ..Tuple::default() }, value, 0).unwrap();
    }
    let there = map.keys().count();
    // Room is made in batches (Linux: 128 entries), so that a full map is seldom full to the last entry.
    assert!(there <= room as usize && there >= room as usize / 2, "{there} of {room}: did not overflow");
}

/// CLOCK_MONOTONIC in nanoseconds: the time of an entry that is new.
fn monotonic_nanos() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap();
    u64::try_from(now.as_nanos()).unwrap()
}

fn walk_all(fixture: &Fixture, before_each: impl Fn()) {
    for (name, case) in CASES {
        for v6 in [false, true] {
            let what = format!("{name}, {}", if v6 { "IPv6" } else { "IPv4" });
            fixture.node.ztunnel.log().clear();
            before_each();
            let counters = || [&fixture.a, &fixture.b].map(|pod| fixture.node.counters(pod).unwrap());
            let before = counters();
            let wanted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(fixture, v6)))
                .unwrap_or_else(|_| {
                    let after = counters();
                    panic!(
                        "{what}: a {:?}, b {:?}, stand-in {:?}",
                        difference(&before[0], &after[0]),
                        difference(&before[1], &after[1]),
                        fixture.node.ztunnel.log().accepted()
                    )
                });
            let after = counters();
            let accepted = fixture.node.ztunnel.log().accepted();
            assert!(accepted.iter().all(|seen| seen.so_original_dst.is_none()), "{what}: somebody runs NAT");
            let pod = |uid: &str| if uid.ends_with("-a") { "a" } else { "b" };
            let seen = Walk {
                ztunnel: accepted
                    .iter()
                    .map(|seen| (seen.listener, pod(&seen.pod), seen.original_dst, seen.client.ip()))
                    .collect(),
                a: difference(&before[0], &after[0]),
                b: difference(&before[1], &after[1]),
            };
            assert_eq!(seen, wanted, "{what}");
        }
    }
    assert!(fixture.apps.iter().all(|app| app.accepted() > 0));
}

/// What the present agent leaves in every pod, and weir does not.
fn no_netfilter(pod: &Host) {
    for (program, args) in [
        ("iptables-save", &[][..]),
        ("ip6tables-save", &[][..]),
        ("nft", &["list", "ruleset"][..]),
        ("conntrack", &["-L"][..]),
    ] {
        let output = weir_tests::world::run_in(pod, program, args).unwrap();
        assert_eq!(output.trim(), "", "{program}");
    }
}

/// Runs what must be answered at once.
fn quickly<T>(f: impl FnOnce() -> T) -> T {
    let began = std::time::Instant::now();
    let result = f();
    assert!(began.elapsed() < Duration::from_millis(900), "took {:?}: a SYN was lost", began.elapsed());
    result
}

/// Whether a connection ended without an answer, in whichever way ztunnel says so.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof)
}

fn loopback(v6: bool) -> IpAddr {
    if v6 { [0, 0, 0, 0, 0, 0, 0, 1].into() } else { [127, 0, 0, 1].into() }
}

/// Connects from the node, as the kubelet or as anybody, and returns the address the app saw, or the error.
fn probe(fixture: &Fixture, to: SocketAddr, kubelet: bool) -> String {
    let node = &fixture.node.world.node;
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir-gear"));
    command.args(["probe", &to.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Child::start_in(node, &mut command).unwrap();
    if kubelet {
        fixture.node.kubelet.add(child.pid()).unwrap();
    }
    child.stdin().unwrap().write_all(b"\n").unwrap();
    let mut said = String::new();
    io::Read::read_to_string(&mut child.stdout().unwrap(), &mut said).unwrap();
    child.wait(Duration::from_secs(5)).unwrap();
    let said = said.trim();
    said.parse::<SocketAddr>().map_or_else(|_| said.to_owned(), |address| address.ip().to_string())
}
