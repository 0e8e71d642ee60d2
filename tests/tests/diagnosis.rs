//! What is wrong with a pod is named, with the agent up and with it dead.
#![cfg(feature = "root")]

use std::process::{Command, Output};

use serde_json::{Value, json};
use weir_tests::{
    app::{App, Client},
    cluster::{Cluster, Pod, weir},
    meshed::start_ztunnel,
    world::run_in,
    ztunnel::{Mesh, Ztunnel},
};

const APP: u16 = 8080;

struct Fixture {
    cluster: Cluster,
    mesh: Mesh,
    ztunnel: Ztunnel,
    outside: App,
}

impl Fixture {
    fn new() -> Self {
        let cluster = Cluster::new().unwrap();
        let outside = App::start(&cluster.world.outside, APP).unwrap();
        let mesh = Mesh::default();
        let ztunnel = start_ztunnel(&mesh).unwrap();
        cluster.namespace("shop", true);
        Self { cluster, mesh, ztunnel, outside }
    }

    fn pod(&self, namespace: &str, name: &str) -> Pod {
        self.cluster.meshed_pod(&self.mesh, namespace, name).unwrap()
    }

    fn enrolled(&self, name: &str) -> Pod {
        let pod = self.pod("shop", name);
        self.cluster.wait_redirection(&pod, Some("enabled")).unwrap();
        pod
    }

    fn weir(&self, args: &[&str]) -> Output {
        let host = self.cluster.world.node.path();
        Command::new(weir().unwrap()).args(args).env("WEIR_HOST_NETNS", host).output().unwrap()
    }

    fn status(&self, args: &[&str]) -> Value {
        let output = self.weir(&[&["status", "--json"], args].concat());
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 3)), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// What `weir status --why` calls the pod's trouble.
    fn reasons(&self, pod: &str) -> Vec<String> {
        let status = self.status(&["--why", "--pod", pod]);
        let why = status["pods"][0]["why"].as_array().unwrap();
        why.iter().map(|why| why["reason"].as_str().unwrap().to_owned()).collect()
    }
}

/// With the agent: its state and its ztunnel. Without: the same pod from its pins, with the same counters.
#[test]
fn status_and_top_answer_with_the_agent_and_without() {
    let mut f = Fixture::new();
    f.cluster.start_agent().unwrap();
    let a = f.enrolled("a");
    for _ in 0..5 {
        Client::connect(&a.host, f.cluster.world.outside.addr(false, APP)).unwrap();
    }
    f.cluster.namespace("legacy", false);
    let b = f.pod("legacy", "b");
    f.cluster.wait("both are shown", || f.status(&[])["pods"].as_array().unwrap().len() == 2).unwrap();
    let up = f.status(&["--pod", "shop/a"]);
    assert_eq!(up["agent"]["node"], "node");
    assert_eq!(up["agent"]["ztunnels"].as_array().unwrap().len(), 1, "{up}");
    let row = &up["pods"][0];
    assert_eq!((&row["state"], &row["reason"]), (&json!("enrolled"), &json!("selected")));
    assert!(row["acked_by"].as_str().unwrap().starts_with("ztunnel pid "), "{row}");
    assert_eq!(row["programs"].as_array().unwrap().len(), 3, "{row}");
    assert_eq!(row["netns_cookie"], json!(a.host.netns().cookie()));
    assert_eq!(row["old_connections"]["left"], 0);
    assert_eq!(f.status(&["--pod", "legacy/b"])["pods"][0]["reason"], "not_selected");
    let all = f.weir(&["status", "--why"]);
    assert_eq!(all.status.code(), Some(0), "nothing is wrong: {all:?}");

    f.cluster.kill_agent().unwrap();
    let down = f.status(&["--pod", "shop/a", "--why"]);
    assert_eq!(down["agent"], json!(null));
    let (row, before) = (&down["pods"][0], row);
    assert_eq!((&row["state"], &row["why"]), (&json!("captured"), &json!([])));
    for same in ["uid", "netns_cookie", "counters", "programs"] {
        assert_eq!(row[same], before[same], "{same}");
    }
    let counters = row["counters"].as_array().unwrap();
    let captured = counters.iter().find(|count| count["reason"] == "captured_out").unwrap();
    assert_eq!(captured["ipv4"], 5, "{row}");
    let top = f.weir(&["top", "--json", "--count", "2", "--interval", "10ms"]);
    assert!(top.status.success(), "{top:?}");
    let last: Value =
        serde_json::from_slice(top.stdout.split(|byte| *byte == b'\n').nth(1).unwrap()).unwrap();
    let counted = last[0]["counters"].as_array().unwrap();
    assert!(counted.iter().any(|count| count["reason"] == "captured_out" && count["total"] == 5), "{last}");
    let missing = f.weir(&["status", "--pod", "shop/nobody"]);
    assert_eq!(missing.status.code(), Some(1));
    drop(b);
}

/// What is done to an enrolled pod while no agent runs, and what it is called.
type Harm = (&'static str, fn(&Fixture, &Pod), &'static str);

const HARMS: &[Harm] = &[
    ("link gone", |_, pod| std::fs::remove_file(pod.pin("steer_link")).unwrap(), "link_gone"),
    ("rule gone", |_, pod| ip(pod, "ip", "rule del pref 1504"), "rule_wrong"),
    ("route gone", |_, pod| ip(pod, "ip", "-6 route flush table 15001"), "rule_wrong"),
    ("filter gone", |_, pod| ip(pod, "tc", "filter del dev eth0 ingress"), "filter_gone"),
    ("no listener", |f, pod| f.ztunnel.remove(&pod.uid), "no_listener"),
    ("foreign filter behind ours", |_, pod| drop_all(pod, "9"), "foreign_filter"),
    ("foreign filter in front of ours", |_, pod| drop_all(pod, "1"), "foreign_filter"),
    ("v6 off on lo", |_, pod| pod.host.sysctl("net.ipv6.conf.lo.disable_ipv6", "1").unwrap(), "ipv6_off"),
    ("v6 off", |_, pod| pod.host.sysctl("net.ipv6.conf.all.disable_ipv6", "1").unwrap(), "ipv6_off"),
    ("a sysctl", |_, pod| pod.host.sysctl("net.ipv4.fwmark_reflect", "0").unwrap(), "sysctl_wrong"),
    ("another address", |_, pod| ip(pod, "ip", "addr add 10.99.1.1/32 dev eth0"), "addresses_wrong"),
];

#[test]
fn what_was_done_to_a_pod_is_named_with_the_agent_dead() {
    let mut f = Fixture::new();
    f.cluster.start_agent().unwrap();
    let mut pods: Vec<Pod> = (0..=HARMS.len()).map(|number| f.enrolled(&format!("pod{number}"))).collect();
    f.cluster.kill_agent().unwrap();
    for ((_, harm, _), pod) in HARMS.iter().zip(&pods) {
        harm(&f, pod);
    }
    for ((what, _, reason), pod) in HARMS.iter().zip(&pods) {
        let named = f.reasons(&format!("shop/{}", pod.host.name()));
        assert_eq!(named.first().map(String::as_str), Some(*reason), "{what}: {named:?}");
    }
    assert_eq!(f.reasons(&format!("shop/pod{}", HARMS.len())), [""; 0], "nobody touched it");

    // The runtime makes a sandbox anew while no agent runs: another namespace, of the same pod.
    let last = pods.pop().unwrap();
    let moved = f.cluster.replace_sandbox(last).unwrap();
    assert_eq!(f.reasons(&format!("shop/{}", moved.host.name())), ["netns_other"]);
    let text = f.weir(&["status", "--why"]);
    assert_eq!(text.status.code(), Some(3));
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("no agent answers") && text.contains("IPv4 rule 1504"), "{text}");
    drop(f.outside);
}

/// Somebody else's filter, which drops all that arrives.
fn drop_all(pod: &Pod, preference: &str) {
    let hook = ["filter", "add", "dev", "eth0", "ingress", "pref", preference, "protocol", "all"];
    let program = ["bpf", "da", "bytecode", "1,6 0 0 2,"];
    run_in(&pod.host, "tc", &[&hook[..], &program].concat()).unwrap();
}

fn ip(pod: &Pod, program: &str, args: &str) {
    run_in(&pod.host, program, &args.split(' ').collect::<Vec<_>>()).unwrap();
}
