//! The same traffic through the rules that Istio's agent puts into a pod, with the same stand-in for ztunnel: what
//! weir is compared with, and that the comparison is a fair one.
#![cfg(feature = "root")]

use std::time::Duration;

use weir_tests::{
    istio::{self, Backend},
    mesh_node::MeshNode,
    rapid::{Close, Plan, Server},
    world::{Families, Host, run_in},
};

const PORTS: [u16; 10] = [8001, 8002, 8003, 8004, 8005, 8006, 8007, 8008, 8009, 8010];
const COUNT: u32 = 500;
/// Not an ephemeral port: nothing of before is in its way.
const SOURCE_PORT: u16 = 20_000;

fn apply(pod: &Host) {
    Backend::IptablesNft.apply(pod).unwrap();
    istio::route(pod).unwrap();
}

#[test]
fn one_source_port_to_ten_ports_collides_behind_redirect() {
    let node = MeshNode::new().unwrap();
    let outside = &node.world.outside;
    let _outside = Server::start(outside, &PORTS, Close::Reset).unwrap();
    let pod = |name: &str| {
        let pod = node.pod(name, Families::Dual).unwrap();
        let server = Server::start(&pod, &PORTS, Close::Reset).unwrap();
        (pod, server)
    };
    let ((istio, _istio), (weir, _weir)) = (pod("istio"), pod("weir"));
    node.serve(&istio, &node.ztunnel).unwrap();
    apply(&istio);
    node.capture(&weir).unwrap();
    for pod in [&istio, &weir] {
        for (v6, inbound) in [(false, true), (false, false), (true, true), (true, false)] {
            let what = format!("{}, inbound {inbound}, IPv6 {v6}", pod.name());
            let (client, server) = if inbound { (outside, pod) } else { (pod, outside) };
            let to: Vec<_> = PORTS.iter().map(|&port| server.addr(v6, port)).collect();
            let any = Plan { patience: Duration::from_millis(300), close: Close::Reset, ..Plan::to(to) };
            // From any port everything works: rules and stand-in fit together.
            let outcome = any.run(client, COUNT);
            assert_eq!(outcome.ok, u64::from(COUNT), "{what}: {outcome:?}");
            let one = Plan { source_port: Some(SOURCE_PORT), ..any };
            let in_turn = one.run(client, COUNT);
            let at_once = one.hold(client);
            println!(
                "{what}: {} of {COUNT} in turn fail, {} of 10 at once",
                COUNT as u64 - in_turn.ok,
                at_once.len()
            );
            if pod.name() == weir.name() {
                assert!(in_turn.failed.is_empty() && at_once.is_empty(), "{what}: {in_turn:?}, {at_once:?}");
            } else if inbound {
                // After REDIRECT all have the same tuple but for the client's port.
                assert_eq!(at_once.len(), PORTS.len() - 1, "{what}: the README says that they collide");
            }
        }
    }
    let entries = |pod: &Host| run_in(pod, "conntrack", &["-L"]).unwrap().lines().count();
    println!("conntrack entries: {} behind Istio's rules, {} with weir", entries(&istio), entries(&weir));
    assert!(entries(&istio) > 0);
    assert_eq!(entries(&weir), 0);
}

/// ztunnel's port towards the app is the one the client has: by REDIRECT's tracked entry its SYN comes back to itself.
#[test]
fn ztunnels_port_may_be_the_clients() {
    const PORT: u16 = 40_011;
    let node = MeshNode::new().unwrap();
    let outside = &node.world.outside;
    let [istio, weir] = ["istio", "weir"].map(|name| node.pod(name, Families::Dual).unwrap());
    node.serve(&istio, &node.ztunnel).unwrap();
    apply(&istio);
    node.capture(&weir).unwrap();
    for pod in [&istio, &weir] {
        let _server = Server::start(pod, &PORTS[..1], Close::Reset).unwrap();
        for (only, v6) in [(PORT, false), (PORT + 2, true)] {
            let plan = |source_port| Plan {
                source_port: Some(source_port),
                patience: Duration::from_millis(500),
                close: Close::Reset,
                ..Plan::to(vec![pod.addr(v6, PORTS[0])])
            };
            assert_eq!(plan(SOURCE_PORT).run(outside, 1).ok, 1, "{}, IPv6 {v6}: any port", pod.name());
            // Now ztunnel has no other choice.
            pod.sysctl("net.ipv4.ip_local_port_range", &format!("{only} {only}")).unwrap();
            let well = plan(only).run(outside, 1).ok;
            pod.sysctl("net.ipv4.ip_local_port_range", "32768 60999").unwrap();
            assert_eq!(well, u64::from(pod.name() == weir.name()), "{}, IPv6 {v6}", pod.name());
        }
    }
}
