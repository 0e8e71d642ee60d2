//! Pods are captured before their first process runs: the real plugin, called as a runtime calls it, the real agent.
#![cfg(feature = "root")]

use std::{
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use weir_tests::{
    app::{App, Client},
    cluster::{Cluster, MODE, gear},
    cni::{Sandbox, config},
    meshed::start_ztunnel,
    world::{Child, Families, addresses, forget_name, pins},
    ztunnel::{Mesh, Ztunnel},
};

const APP: u16 = 8080;

struct Fixture {
    cluster: Cluster,
    ztunnel: Option<Ztunnel>,
    _outside: App,
}

impl Fixture {
    fn new() -> Self {
        let mut cluster = Cluster::new().unwrap();
        let outside = App::start(&cluster.world.outside, APP).unwrap();
        cluster.namespace("shop", true);
        cluster.namespace("legacy", false);
        cluster.start_agent().unwrap();
        let mut fixture = Self { cluster, ztunnel: None, _outside: outside };
        fixture.wait_for_socket();
        fixture.start_ztunnel();
        fixture
    }

    fn wait_for_socket(&self) {
        let socket = std::path::Path::new("/run/weir/cni.sock");
        self.cluster.wait("the agent listens", || socket.exists()).unwrap();
    }

    fn start_ztunnel(&mut self) {
        let ztunnel = start_ztunnel(&Mesh::default()).unwrap();
        assert!(ztunnel.wait_ready(Duration::from_secs(10)), "{}", self.cluster.agent_log());
        self.ztunnel = Some(ztunnel);
    }

    fn sandbox(&self, namespace: &str, name: &str) -> Sandbox {
        self.cluster.sandbox(namespace, name, Families::Dual).unwrap()
    }

    /// ADD that must succeed, with the result of those before it.
    fn added(&self, sandbox: &Sandbox) {
        let outcome = sandbox.add().unwrap();
        assert!(outcome.success, "{}\n{}", outcome.error(), self.cluster.agent_log());
        assert_eq!(outcome.stdout, sandbox.prev_result());
    }

    fn outbound(&self) -> u64 {
        self.ztunnel.as_ref().map_or(0, |ztunnel| ztunnel.log().counts().outbound)
    }

    /// Whether the first connection of a process of its own is captured.
    fn first_connection_is_captured(&self, sandbox: &Sandbox, v6: bool) -> bool {
        let before = self.outbound();
        let to = self.cluster.world.outside.addr(v6, APP).to_string();
        let mut command = std::process::Command::new(gear().unwrap());
        command.args(["probe", &to]).stdin(Stdio::null()).stdout(Stdio::null());
        let mut process = Child::start_in(&sandbox.host, &mut command).unwrap();
        let connected = process.wait(Duration::from_secs(5)).unwrap().success();
        assert!(connected, "no connection to {to}\n{}", self.cluster.agent_log());
        self.outbound() == before + 1
    }
}

/// Neither a process nor an address in the API is needed, and no first connection escapes.
#[test]
fn captured_before_anything_runs() {
    const PODS: usize = 50;
    let f = Fixture::new();
    let (mut misses, mut took) = (0, Vec::new());
    for number in 0..PODS {
        let sandbox = f.sandbox("shop", &format!("p{number}"));
        let began = Instant::now();
        f.added(&sandbox);
        took.push(began.elapsed());
        thread::sleep(Duration::from_millis(10));
        misses += usize::from(!f.first_connection_is_captured(&sandbox, number % 2 == 1));
    }
    took.sort_unstable();
    println!("{PODS} pods, {misses} misses; ADD median {:?}, longest {:?}", took[PODS / 2], took[PODS - 1]);
    assert_eq!((misses, pins()), (0, PODS));
}

#[test]
fn thirty_at_once() {
    let f = Fixture::new();
    let sandboxes: Vec<_> = (0..30).map(|number| f.sandbox("shop", &format!("p{number}"))).collect();
    let f = &f;
    let mut took: Vec<Duration> = thread::scope(|scope| {
        let adds: Vec<_> = sandboxes
            .iter()
            .map(|sandbox| {
                scope.spawn(move || {
                    let began = Instant::now();
                    let outcome = sandbox.add().unwrap();
                    assert!(outcome.success, "{}", outcome.error());
                    began.elapsed()
                })
            })
            .collect();
        adds.into_iter().map(|add| add.join().unwrap()).collect()
    });
    took.sort_unstable();
    println!("30 at once: median {:?}, longest {:?}", took[15], took[29]);
    assert_eq!(pins(), 30);
    assert!(sandboxes.iter().all(|sandbox| f.first_connection_is_captured(sandbox, false)));
}

/// Pods outside the mesh pass unchanged, whatever the version; DEL and GC release, without any event of the API.
#[test]
fn every_verb() {
    let f = Fixture::new();
    let outside = f.sandbox("legacy", "plain");
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let mut config = config();
        config["cniVersion"] = json!(version);
        let outcome = outside.call("ADD", &config).make().unwrap();
        assert_eq!((outcome.success, outcome.stdout), (true, outside.prev_result()), "{version}");
    }
    assert!(!f.first_connection_is_captured(&outside, false));
    assert_eq!(pins(), 0);

    // Twice, as with several networks: the last interface that goes takes the capture with it.
    let (a, b) = (f.sandbox("shop", "a"), f.sandbox("shop", "b"));
    f.added(&a);
    f.added(&b);
    let second = a.call("ADD", &config()).with("CNI_IFNAME", Some("net1"));
    assert!(second.make().unwrap().success);
    for sandbox in [&a, &b, &outside] {
        f.cluster
            .wait("CHECK succeeds", || sandbox.call("CHECK", &config()).make().unwrap().success)
            .unwrap();
    }
    assert!(a.call("DEL", &config()).with("CNI_IFNAME", Some("net1")).make().unwrap().success);
    assert!(f.first_connection_is_captured(&a, false));
    assert_eq!(pins(), 2);
    assert!(a.del().unwrap().success);
    f.cluster.wait("DEL has released it", || pins() == 1).unwrap();
    // Again, and for one that never was.
    assert!(a.del().unwrap().success && outside.del().unwrap().success);

    let gc = |valid: Value| {
        let mut config = config();
        config["cni.dev/valid-attachments"] = valid;
        assert!(b.call("GC", &config).with("CNI_ARGS", None).make().unwrap().success);
    };
    gc(json!([{ "containerID": b.container, "ifname": "eth0" }]));
    thread::sleep(Duration::from_millis(100));
    assert_eq!(pins(), 1);
    gc(json!([]));
    f.cluster.wait("GC has released it", || pins() == 0).unwrap();

    let version = b.call("VERSION", &json!({ "cniVersion": "1.0.0" })).make().unwrap();
    assert_eq!(version.stdout["cniVersion"], "1.0.0");
    assert!(version.stdout["supportedVersions"].as_array().unwrap().contains(&json!("1.1.0")));
    let status = b.call("STATUS", &config()).make().unwrap();
    assert_eq!((status.success, status.stdout), (true, Value::Null));
}

/// A new sandbox of the same pod takes the place of the old, whether or not the old one was deleted before.
#[test]
fn a_new_sandbox_replaces_the_old() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox("shop", "a");
    f.added(&sandbox);
    for round in 0..4 {
        if round % 2 == 0 {
            assert!(sandbox.del().unwrap().success);
        }
        forget_name("a").unwrap();
        let next = f.cluster.another_sandbox("shop", "a", &sandbox.uid, Families::Dual).unwrap();
        f.added(&next);
        assert!(f.first_connection_is_captured(&next, round == 1), "{round}");
        assert_eq!(pins(), 1, "{round}");
        if round % 2 == 1 {
            // The old one's DEL comes late, and is not about the new one.
            assert!(sandbox.del().unwrap().success);
            thread::sleep(Duration::from_millis(100));
            assert!(f.first_connection_is_captured(&next, false), "{round}");
        }
        sandbox = next;
    }
    // The address posted, at last, is that of the sandbox: nothing changes.
    let ips: Vec<_> = addresses(&sandbox.host).iter().map(|ip| json!({ "ip": ip })).collect();
    let status = json!({ "status": { "phase": "Running", "podIP": ips[0]["ip"], "podIPs": ips } });
    f.cluster.api.merge_pod("shop", "a", &status);
    let redirection = || {
        let annotations = f.cluster.api.pod("shop", "a")?.metadata.annotations?;
        annotations.get("ambient.istio.io/redirection").cloned()
    };
    f.cluster.wait("it is annotated", || redirection().as_deref() == Some("enabled")).unwrap();
    assert!(f.first_connection_is_captured(&sandbox, false));
}

/// The watch may be late: the API server is asked. What it does not have is not captured, and does not start.
#[test]
fn a_pod_that_the_watch_has_not_brought() {
    let f = Fixture::new();
    let ghost = f.cluster.another_sandbox("shop", "ghost", "00000000-1111", Families::V4).unwrap();
    let error = ghost.add().unwrap().error();
    assert!(error.contains("100:") && error.contains("no such pod"), "{error}");
    let known = f.sandbox("shop", "known");
    f.added(&known);
    let other = Sandbox { uid: "00000000-2222".into(), ..known };
    let error = other.add().unwrap().error();
    assert!(error.contains("another UID"), "{error}");
    // By its own label, in a namespace outside.
    let own = f.sandbox("legacy", "own");
    f.cluster.api.set_pod_labels("legacy", "own", &[(MODE, "ambient")]);
    f.cluster
        .wait("its label is known", || {
            std::fs::read_to_string("/run/weir/decisions.json").is_ok_and(|table| {
                let table: Value = serde_json::from_str(&table).unwrap();
                table["inside"].as_array().unwrap().iter().any(|pod| pod["name"] == "own")
            })
        })
        .unwrap();
    f.added(&own);
    assert!(f.first_connection_is_captured(&own, false));
    let _ = Client::connect(&own.host, f.cluster.world.outside.addr(false, APP)).unwrap();
}
