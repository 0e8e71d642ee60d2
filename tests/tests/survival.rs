//! What must hold while things change: a pod is enrolled and un-enrolled under load, ztunnel goes and comes back.
#![cfg(feature = "root")]

use std::{io, time::Duration};

use weir_common::Counter;
use weir_tests::{
    app::{App, Client},
    load::Load,
    mesh_node::MeshNode,
    observer::Observer,
    world::{Families, Host},
};

const APP: u16 = 8080;
const WEB: u16 = 80;

struct Fixture {
    node: MeshNode,
    pod: Host,
    _apps: [App; 2],
}

impl Fixture {
    fn new() -> Self {
        let node = MeshNode::new().unwrap();
        let pod = node.pod("a", Families::Dual).unwrap();
        let apps = [App::start(&pod, APP).unwrap(), App::start(&node.world.outside, WEB).unwrap()];
        Self { node, pod, _apps: apps }
    }

    /// A hundred connections a second in both directions, of both families in turn.
    fn load(&self) -> [(&'static str, Load); 2] {
        let outside = &self.node.world.outside;
        let both = |host: &Host, port| vec![host.addr(false, port), host.addr(true, port)];
        [
            ("outbound", Load::start(&self.pod, both(outside, WEB), 100)),
            ("inbound", Load::start(outside, both(&self.pod, APP), 100)),
        ]
    }
}

/// Ten enrolments and un-enrolments under load: no connection fails. What is old at the switch goes on; what waits
/// for its retry at un-enrolment goes direct a second later.
#[test]
fn enrolment_and_unenrolment_lose_no_connection() {
    let f = Fixture::new();
    let load = f.load();
    for _ in 0..10 {
        f.node.capture(&f.pod).unwrap();
        wait_until("both directions are captured", || {
            let counters = f.node.counters(&f.pod).unwrap();
            counters.total(Counter::CapturedIn) > 3 && counters.total(Counter::CapturedOut) > 3
        });
        f.node.release(&f.pod).unwrap();
        std::thread::sleep(Duration::from_millis(50));
    }
    for (direction, load) in load {
        let outcome = load.stop();
        assert!(outcome.failed.is_empty() && outcome.ok > 60, "{direction}: {outcome:?}");
    }
}

/// A stream that goes on all the time is neither reset at enrolment, nor let out at un-enrolment.
#[test]
fn old_connections_go_on_and_captured_ones_end() {
    let f = Fixture::new();
    let outside = &f.node.world.outside;
    for v6 in [false, true] {
        let mut old = [
            Client::connect(&f.pod, outside.addr(v6, WEB)).unwrap(),
            Client::connect(outside, f.pod.addr(v6, APP)).unwrap(),
        ];
        let counted = f.node.capture(&f.pod).unwrap();
        assert!(counted.left >= 2, "{counted:?}");
        let mut captured = [
            Client::connect(&f.pod, outside.addr(v6, WEB)).unwrap(),
            Client::connect(outside, f.pod.addr(v6, APP)).unwrap(),
        ];
        old.iter_mut().chain(&mut captured).for_each(|client| client.exchange().unwrap());
        let observer = Observer::start(&f.node.world.node, &f.node.world.device_of(&f.pod)).unwrap();
        f.node.release(&f.pod).unwrap();
        old.iter_mut().for_each(|client| client.exchange().unwrap());
        let tuple = captured[0].local_addr().port();
        let error = captured[0].exchange().unwrap_err();
        assert!(is_end(&error), "{error:?}");
        assert_eq!(observer.stop().from_port(tuple), 0, "a captured stream left in plaintext");
        assert!(captured[1].exchange().is_err());
    }
}

/// Without ztunnel nothing new goes anywhere, and is told so at once; with it back the next connection works.
#[test]
fn without_ztunnel_connections_are_refused_at_once() {
    let f = Fixture::new();
    let outside = &f.node.world.outside;
    f.node.capture(&f.pod).unwrap();
    for round in 0..3 {
        f.node.lose_ztunnel(&f.pod).unwrap();
        for v6 in [false, true] {
            for (what, result) in [
                ("outbound", refused(|| Client::connect(&f.pod, outside.addr(v6, WEB)))),
                ("inbound", refused(|| Client::connect(outside, f.pod.addr(v6, APP)))),
                ("hbone", refused(|| Client::connect(outside, f.pod.addr(v6, 15008)))),
            ] {
                assert!(result, "{what}, v6 {v6}, round {round}");
            }
            Client::connect(&f.pod, f.pod.addr(v6, APP)).expect("the pod still reaches itself");
        }
        f.node.serve(&f.pod, &f.node.ztunnel).unwrap();
        for v6 in [false, true] {
            Client::connect(&f.pod, outside.addr(v6, WEB)).unwrap();
            Client::connect(outside, f.pod.addr(v6, APP)).unwrap();
        }
    }
    let counters = f.node.counters(&f.pod).unwrap();
    assert_eq!(counters.total(Counter::RefusedOut), 6);
    assert_eq!(counters.total(Counter::RefusedIn), 12);
}

/// Two ztunnels, one leaving: no connection is refused or reset.
#[test]
fn ztunnel_is_replaced_without_loss() {
    let f = Fixture::new();
    f.node.capture(&f.pod).unwrap();
    let mut serving = MeshNode::start_ztunnel(&f.node.mesh).unwrap();
    f.node.serve(&f.pod, &serving).unwrap();
    f.node.ztunnel.remove(MeshNode::owner(&f.pod).uid.as_str());
    let load = f.load();
    for _ in 0..10 {
        let new = MeshNode::start_ztunnel(&f.node.mesh).unwrap();
        f.node.serve(&f.pod, &new).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        std::mem::replace(&mut serving, new).stop_gracefully();
        std::thread::sleep(Duration::from_millis(50));
    }
    for (direction, load) in load {
        let outcome = load.stop();
        assert!(outcome.failed.is_empty() && outcome.ok > 50, "{direction}: {outcome:?}");
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(std::time::Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn refused(connect: impl FnOnce() -> io::Result<Client>) -> bool {
    let began = std::time::Instant::now();
    let error = connect().expect_err("nobody listens");
    error.kind() == io::ErrorKind::ConnectionRefused && began.elapsed() < Duration::from_millis(500)
}

fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
    )
}
