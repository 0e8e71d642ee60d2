//! Very many connections: from one source port, over few destinations, under SYN cookies, while ztunnel is replaced.
//! None may fail. With `WEIR_LONG=1` in the environment the numbers are those the project promises; without, a fifth.
#![cfg(feature = "root")]

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use weir_common::Counter;
use weir_tests::{
    app::{App, Client, Connect},
    load::Outcome,
    mesh_node::MeshNode,
    rapid::{Close, Plan, Server},
    world::{Families, Host, run_in},
};

const PORTS: [u16; 12] = [8001, 8002, 8003, 8004, 8005, 8006, 8007, 8008, 8009, 8010, 8011, 8012];
const SOURCE_PORT: u16 = 33_333;

/// Worlds with very many connections take turns: two at once would measure each other's load.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

struct Fixture {
    node: MeshNode,
    pod: Host,
    _servers: [Server; 2],
    _alone: std::sync::MutexGuard<'static, ()>,
}

impl Fixture {
    /// `close`: how servers close, after the client did.
    fn new(close: Close) -> Self {
        let alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let node = MeshNode::new().unwrap();
        let pod = node.pod("a", Families::Dual).unwrap();
        let servers = [
            Server::start(&pod, &PORTS, close).unwrap(),
            Server::start(&node.world.outside, &PORTS, close).unwrap(),
        ];
        Self { node, pod, _servers: servers, _alone: alone }
    }

    fn captured(close: Close) -> Self {
        let f = Self::new(close);
        f.node.capture(&f.pod).unwrap();
        f
    }

    fn outside(&self) -> &Host {
        &self.node.world.outside
    }

    /// Client and servers of a direction.
    fn direction(&self, inbound: bool, v6: bool, ports: usize) -> (&Host, Vec<SocketAddr>) {
        let (client, server) =
            if inbound { (self.outside(), &self.pod) } else { (&self.pod, self.outside()) };
        (client, PORTS[..ports].iter().map(|&port| server.addr(v6, port)).collect())
    }

    fn no_trace(&self) {
        assert_eq!(run_in(&self.pod, "conntrack", &["-L"]).unwrap().trim(), "");
    }
}

/// A number of connections, or a fifth of it.
fn count(promised: u32) -> u32 {
    let long = std::env::var_os("WEIR_LONG").is_some_and(|long| long == "1");
    if long { promised } else { promised / 5 }
}

fn all_well(outcome: &Outcome, count: u32, what: &str) {
    println!("{what}: {} well, slowest {:?}", outcome.ok, outcome.slowest);
    assert!(outcome.failed.is_empty() && outcome.ok == u64::from(count), "{what}: {outcome:?}");
}

/// One source port, ten servers in turn, in each direction; the same tuple again as soon as the reset is out.
#[test]
fn one_source_port_serves_ten_destinations() {
    let f = Fixture::captured(Close::Reset);
    let each = count(50_000);
    for (inbound, counter) in [(true, Counter::CapturedIn), (false, Counter::CapturedOut)] {
        for v6 in [false, true] {
            let (client, to) = f.direction(inbound, v6, 10);
            let plan = Plan { source_port: Some(SOURCE_PORT), close: Close::Reset, ..Plan::to(to) };
            let before = f.node.counters(&f.pod).unwrap().total(counter);
            let outcome = plan.run(client, each);
            all_well(&outcome, each, &format!("inbound {inbound}, IPv6 {v6}"));
            let captured = f.node.counters(&f.pod).unwrap().total(counter) - before;
            assert!(captured >= each.into(), "{captured} captured");
        }
    }
    f.no_trace();
}

/// Far more connections than there are ports, closed by the client, over twelve destinations.
#[test]
fn many_connections_leave_no_trace() {
    const THREADS: u32 = 4;
    let f = Fixture::captured(Close::Orderly);
    let each = count(75_000) / THREADS;
    let began = Instant::now();
    for v6 in [false, true] {
        let (client, to) = f.direction(false, v6, 12);
        std::thread::scope(|scope| {
            for number in 0..THREADS {
                // Each begins elsewhere: a server takes one client after the other.
                let mut to = to.clone();
                to.rotate_left(3 * number as usize);
                scope.spawn(move || all_well(&Plan::to(to).run(client, each), each, "outbound"));
            }
        });
    }
    let total = 2 * THREADS * each;
    println!("{total} connections, {:.0} a second", f64::from(total) / began.elapsed().as_secs_f64());
    f.no_trace();
}

/// SYN cookies for every connection, ztunnel's and the app's.
#[test]
fn syn_cookies_work_in_both_directions() {
    const COUNT: u32 = 2000;
    let f = Fixture::new(Close::Reset);
    f.pod.sysctl("net.ipv4.tcp_syncookies", "2").unwrap();
    f.node.capture(&f.pod).unwrap();
    for inbound in [false, true] {
        for v6 in [false, true] {
            let (client, to) = f.direction(inbound, v6, 12);
            let before = cookies(&f.pod);
            let outcome = Plan { close: Close::Reset, ..Plan::to(to) }.run(client, COUNT);
            all_well(&outcome, COUNT, &format!("inbound {inbound}, IPv6 {v6}"));
            assert!(cookies(&f.pod) - before >= COUNT.into(), "no cookies were used");
        }
    }
}

/// Cookies that came back to the host.
fn cookies(host: &Host) -> u64 {
    let text = host.inside(|| std::fs::read_to_string("/proc/thread-self/net/netstat")).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let both = names.split(' ').zip(values.split(' '));
    both.into_iter().find(|(name, _)| *name == "SyncookiesRecv").unwrap().1.parse().unwrap()
}

/// A thousand connections a second, and six times one ztunnel comes and the other goes.
#[test]
fn ztunnel_is_replaced_without_loss_under_load() {
    const RATE: u32 = 250;
    let f = Fixture::captured(Close::Orderly);
    let stop = AtomicBool::new(false);
    let mut serving = MeshNode::start_ztunnel(&f.node.mesh).unwrap();
    f.node.serve(&f.pod, &serving).unwrap();
    f.node.ztunnel.remove(MeshNode::owner(&f.pod).uid.as_str());
    let began = Instant::now();
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let clients: Vec<_> = [(false, false), (false, true), (true, false), (true, true)]
            .map(|(inbound, v6)| {
                let (client, to) = f.direction(inbound, v6, 12);
                let plan = Plan { rate: Some(RATE), ..Plan::to(to) };
                let stop = &stop;
                scope.spawn(move || client.inside(|| plan.run_here(|_| !stop.load(Ordering::Relaxed))))
            })
            .into();
        for _ in 0..6 {
            let new = MeshNode::start_ztunnel(&f.node.mesh).unwrap();
            f.node.serve(&f.pod, &new).unwrap();
            std::mem::replace(&mut serving, new).stop_gracefully();
            let seen = || (serving.log().counts().outbound, serving.log().counts().inbound);
            let deadline = Instant::now() + Duration::from_secs(10);
            while seen().0 < 150 || seen().1 < 150 {
                assert!(Instant::now() < deadline, "the new ztunnel gets nothing: {:?}", seen());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let total: u64 = outcomes.iter().map(|outcome| outcome.ok).sum();
    println!("{total} connections, {:.0} a second", total as f64 / began.elapsed().as_secs_f64());
    for outcome in &outcomes {
        assert!(outcome.failed.is_empty() && outcome.ok > 200, "{outcome:?}");
    }
}

/// ztunnel reaches the app with the client's address and a port of its own choice. When that happens to be the port
/// of the client's connection to it, the two would be one tuple: here it has no other choice.
#[test]
fn a_tuple_that_is_taken_gets_another_port() {
    const PORT: u16 = 8080;
    let f = Fixture::new(Close::Reset);
    let _app = App::start(&f.pod, PORT).unwrap();
    f.node.capture(&f.pod).unwrap();
    let counted = |counter| f.node.counters(&f.pod).unwrap().total(counter);
    for v6 in [false, true] {
        for (only, port) in [(40_001, 40_001), (40_003, 40_003), (40_005, 40_006), (40_007, 40_007)] {
            f.pod.sysctl("net.ipv4.ip_local_port_range", &format!("{only} {only}")).unwrap();
            let taken = counted(Counter::TupleTaken);
            let from = Some(SocketAddr::new(f.outside().ip(v6), port));
            let connect = Connect { from, ..Connect::default() };
            let mut client = Client::connect_with(f.outside(), f.pod.addr(v6, PORT), connect).unwrap();
            for _ in 0..100 {
                client.exchange().unwrap();
            }
            assert_eq!(client.seen_as.ip(), f.outside().ip(v6));
            let shifted = client.seen_as.port() != only;
            assert_eq!(shifted, port == only, "{client:?}");
            assert_eq!(counted(Counter::TupleTaken) - taken, u64::from(shifted));
        }
    }
    assert_eq!(counted(Counter::RefusedIn), 0);
}
