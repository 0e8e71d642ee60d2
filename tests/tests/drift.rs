//! What is taken from an enrolled pod by others is found and put back, within two looks, and told; other pods do not
//! notice.
#![cfg(feature = "root")]

use std::time::Duration;

use weir_tests::{
    app::{App, Client},
    cluster::{Cluster, Pod},
    load::Load,
    meshed::start_ztunnel,
    world::{run, run_in},
    ztunnel::{Mesh, Ztunnel},
};

const APP: u16 = 8080;

/// What somebody does to a pod, and the word of the agent's log that names it.
type Harm = (&'static str, fn(&Pod, &Ztunnel), &'static str);

const HARMS: &[Harm] = &[
    ("steer's link", |pod, _| std::fs::remove_file(pod.pin("steer_link")).unwrap(), "steer's link"),
    ("arrive's filter", |pod, _| ip(pod, "tc", "filter del dev eth0 ingress"), "filter arrive on eth0"),
    ("guard's filter", |pod, _| ip(pod, "tc", "filter del dev eth0 egress"), "filter guard on eth0"),
    ("local's filter", |pod, _| ip(pod, "tc", "filter del dev lo ingress"), "filter local on lo"),
    ("clsact", |pod, _| ip(pod, "tc", "qdisc del dev eth0 clsact"), "filter arrive on eth0"),
    ("an IPv4 rule", |pod, _| ip(pod, "ip", "rule del pref 1504"), "IPv4 rule 1504"),
    ("an IPv6 rule", |pod, _| ip(pod, "ip", "-6 rule del pref 1501"), "IPv6 rule 1501"),
    ("the routes", |pod, _| ip(pod, "ip", "route flush table 15001"), "IPv4 route"),
    ("a sysctl", |pod, _| pod.host.sysctl("net.ipv4.tcp_fwmark_accept", "0").unwrap(), "tcp_fwmark_accept"),
    ("ztunnel's listeners", |pod, ztunnel| ztunnel.remove(&pod.uid), "listener"),
];

#[test]
fn what_is_lost_is_put_back() {
    let mut cluster = Cluster::new().unwrap();
    let outside = App::start(&cluster.world.outside, APP).unwrap();
    cluster.namespace("shop", true);
    let mesh = Mesh::default();
    let ztunnel = start_ztunnel(&mesh).unwrap();
    let pods: Vec<(Pod, App)> = (0..HARMS.len() + 2)
        .map(|number| cluster.meshed_app(&mesh, "shop", &format!("pod{number}"), APP).unwrap())
        .collect();
    cluster.start_agent_with(&["--verify-interval", "1s"]).unwrap();
    for (pod, _) in &pods {
        cluster.wait_redirection(pod, Some("enabled")).unwrap();
    }
    let [.., (from, _), (to, _)] = pods.as_slice() else { unreachable!("there are more pods than harms") };
    let world = cluster.world.outside.addr(false, APP);
    let load = Load::start(&from.host, vec![to.host.addr(false, APP), to.host.addr(true, APP), world], 100);
    for ((what, harm, _), (pod, _)) in HARMS.iter().zip(&pods) {
        harm(pod, &ztunnel);
        println!("taken: {what} from {}", pod.host.name());
    }
    for ((what, _, word), (pod, _)) in HARMS.iter().zip(&pods) {
        let said = || {
            let name = format!("shop/{}\"", pod.host.name());
            cluster.agent_log().lines().any(|line| line.contains(&name) && line.contains(word))
        };
        let took = cluster.wait(&format!("{what} is named by {word:?}"), said).unwrap();
        assert!(took < Duration::from_secs(3), "{what}: only after {took:?}");
        let before = ztunnel.log().counts();
        let works = || {
            Client::connect(&pod.host, world).is_ok()
                && Client::connect(&cluster.world.outside, pod.host.addr(true, APP)).is_ok()
        };
        cluster.wait(&format!("{what} is put back"), works).unwrap();
        cluster.wait_redirection(pod, Some("enabled")).unwrap();
        let after = ztunnel.log().counts();
        assert!(after.outbound > before.outbound && after.inbound > before.inbound, "{what}: not captured");
    }
    let events = cluster.api.events();
    let repaired = events.iter().filter(|event| event.reason.as_deref() == Some("Repaired")).count();
    assert!(repaired >= HARMS.len(), "only {repaired} Events");
    let outcome = load.stop();
    assert!(outcome.failed.is_empty() && outcome.ok > 50, "a pod nobody touched: {outcome:?}");
    assert!(ztunnel.violations().is_empty(), "{:?}", ztunnel.violations());
    drop(outside);
}

fn ip(pod: &Pod, program: &str, args: &str) {
    let args: Vec<&str> = args.split(' ').collect();
    run_in(&pod.host, program, &args).unwrap();
    // Proves that the tool itself is there.
    run(program, &["-V"]).unwrap();
}
