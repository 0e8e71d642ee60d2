//! Ways around capture that must not work, and ways to steal what is ztunnel's.
#![cfg(feature = "root")]

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use weir_common::Counter;
use weir_tests::{
    app::{App, Client, Connect, Listen},
    mesh_node::MeshNode,
    observer::Observer,
    world::{Families, Host},
    ztunnel::{Listener, PASSTHROUGH_TOS},
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
        node.capture(&pod).unwrap();
        Self { node, pod, _apps: apps }
    }

    fn outside(&self) -> &Host {
        &self.node.world.outside
    }

    fn count(&self, counter: Counter) -> u64 {
        self.node.counters(&self.pod).unwrap().total(counter)
    }
}

/// A client that learns which source port ztunnel has used for it towards the app, and uses the same port itself a
/// moment later, must not be taken for ztunnel.
#[test]
fn a_tuple_of_ztunnel_used_again_from_outside_is_captured() {
    let f = Fixture::new();
    for v6 in [false, true] {
        let to = f.pod.addr(v6, APP);
        let client = Client::connect(f.outside(), to).unwrap();
        let used = client.seen_as;
        assert_eq!(used.ip(), f.outside().ip(v6));
        client.reset();
        f.node.ztunnel.log().clear();
        let before = f.count(Counter::CapturedIn);
        let began = Instant::now();
        let again = loop {
            // The connection inside the pod may take a moment to end.
            let from = Connect {
                from: Some(used),
                patience: Some(Duration::from_millis(200)),
                ..Connect::default()
            };
            match Client::connect_with(f.outside(), to, from) {
                Ok(client) => break client,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(2), "{error:?}"),
            }
        };
        assert_eq!(again.local_addr(), used);
        let seen = f.node.ztunnel.log().accepted();
        assert!(
            seen.iter().any(|seen| seen.listener == Listener::Inbound && seen.peer == used),
            "not captured: {seen:?}"
        );
        assert!(f.count(Counter::CapturedIn) > before);
    }
    assert!(f.count(Counter::InsideReused) >= 2);
}

/// A socket bound to the interface walks past the rule for `lo`, and needs no privilege for it.
#[test]
fn a_socket_bound_to_the_device_does_not_get_out() {
    let f = Fixture::new();
    let observer = Observer::start(&f.node.world.node, &f.node.world.device_of(&f.pod)).unwrap();
    let bound = Connect { device: Some("eth0"), ..Connect::default() };
    for v6 in [false, true] {
        let to = f.outside().addr(v6, WEB);
        f.node.ztunnel.log().clear();
        let mut client = Client::connect_with(&f.pod, to, bound).unwrap();
        client.exchange().unwrap();
        let seen = f.node.ztunnel.log().accepted();
        assert!(
            seen.iter().any(|seen| seen.listener == Listener::Outbound && seen.original_dst == to),
            "not captured: {seen:?}"
        );
        f.node.lose_ztunnel(&f.pod).unwrap();
        let began = Instant::now();
        let error = Client::connect_with(&f.pod, to, bound).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert!(began.elapsed() < Duration::from_millis(500), "refused, but late");
        f.node.serve(&f.pod, &f.node.ztunnel).unwrap();
    }
    let escaped: Vec<_> =
        observer.stop().syns().filter(|syn| u32::from(syn.tos) != PASSTHROUGH_TOS).copied().collect();
    assert!(escaped.is_empty(), "{escaped:?}");
}

/// An app with ztunnel's uid can bind ztunnel's ports beside it. It gets nothing: with ztunnel there, ztunnel does;
/// with ztunnel gone, nobody.
#[test]
fn an_impostor_on_ztunnels_ports_receives_nothing() {
    let everywhere = Listen { reuse_port: true, ..Listen::default() };
    let loopback = Listen { ip: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)), ..everywhere };
    for (port, listen) in
        [(15001, everywhere), (15001, loopback), (15006, everywhere), (15006, loopback), (15008, everywhere)]
    {
        let f = Fixture::new();
        // Slots are filled at the first connection.
        talk_both_ways(&f).for_each(|result| drop(result.unwrap()));
        let impostor = App::start_with(&f.pod, port, listen).unwrap();
        for _ in 0..20 {
            talk_both_ways(&f).for_each(|result| drop(result.unwrap()));
        }
        assert_eq!(impostor.accepted(), 0, "port {port} {listen:?}, beside ztunnel");
        f.node.lose_ztunnel(&f.pod).unwrap();
        for _ in 0..20 {
            let _ = talk_both_ways(&f).count();
        }
        assert_eq!(impostor.accepted(), 0, "port {port} {listen:?}, without ztunnel");
        f.node.serve(&f.pod, &f.node.ztunnel).unwrap();
        for _ in 0..20 {
            let _ = talk_both_ways(&f).count();
        }
        assert_eq!(impostor.accepted(), 0, "port {port} {listen:?}, ztunnel is back");
    }
}

fn talk_both_ways(f: &Fixture) -> impl Iterator<Item = io::Result<Client>> {
    let to: Vec<(&Host, SocketAddr)> = [false, true]
        .into_iter()
        .flat_map(|v6| [(&f.pod, f.outside().addr(v6, WEB)), (f.outside(), f.pod.addr(v6, APP))])
        .collect();
    to.into_iter().map(|(from, to)| Client::connect(from, to))
}
