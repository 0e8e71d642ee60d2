//! `weir agent` as a process: against a Kubernetes API server over HTTP, a stand-in ztunnel over ZDS, real pods.
#![cfg(feature = "root")]

use std::{
    io::{self, IoSlice},
    os::fd::{AsRawFd, OwnedFd},
    process::{Command, Stdio},
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, sendmsg, socket,
};
use serde_json::json;
use weir_common::Counter;
use weir_common::PodFlags;
use weir_tests::{
    app::{App, Client},
    cluster::{Cluster, MODE, Pod, ZDS_SOCKET, weir},
    load::Load,
    meshed::start_ztunnel,
    world::{PIN_ROOT, pins},
    ztunnel::{Mesh, Ztunnel},
};

const APP: u16 = 8080;

/// A cluster node with an agent and a stand-in.
struct Fixture {
    cluster: Cluster,
    mesh: Mesh,
    ztunnel: Option<Ztunnel>,
    _outside: App,
}

impl Fixture {
    fn new() -> Self {
        let mut cluster = Cluster::new().unwrap();
        let outside = App::start(&cluster.world.outside, APP).unwrap();
        cluster.start_agent().unwrap();
        let mut fixture = Self { cluster, mesh: Mesh::default(), ztunnel: None, _outside: outside };
        fixture.start_ztunnel();
        fixture
    }

    fn start_ztunnel(&mut self) {
        self.ztunnel = Some(start_ztunnel(&self.mesh).unwrap());
    }

    /// A running pod with an app on its port.
    fn pod(&self, namespace: &str, name: &str) -> (Pod, App) {
        self.cluster.meshed_app(&self.mesh, namespace, name, APP).unwrap()
    }

    fn captured(&self, pod: &Pod) -> bool {
        let before = self.ztunnel.as_ref().map_or(0, |ztunnel| ztunnel.log().counts().outbound);
        let to = self.cluster.world.outside.addr(false, APP);
        Client::connect(&pod.host, to).unwrap().exchange().unwrap();
        self.ztunnel.as_ref().map_or(0, |ztunnel| ztunnel.log().counts().outbound) > before
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let violations = self.ztunnel.as_ref().map(Ztunnel::violations).unwrap_or_default();
        if !std::thread::panicking() {
            assert!(violations.is_empty(), "a real ztunnel would have died of this: {violations:?}");
        }
    }
}

/// Labels decide, in whichever way they come about, for pods that run already.
#[test]
fn labels_are_followed() {
    let f = Fixture::new();
    let c = &f.cluster;
    c.namespace("shop", true);
    c.namespace("legacy", false);
    c.namespace("kube-system", true);
    let (shop, _a1) = f.pod("shop", "a");
    let (legacy, _a2) = f.pod("legacy", "b");
    let (system, _a3) = f.pod("kube-system", "c");
    c.wait_redirection(&shop, Some("enabled")).unwrap();
    assert!(f.captured(&shop));
    assert!(!f.captured(&legacy) && c.redirection(&legacy).is_none());
    assert!(!f.captured(&system) && c.redirection(&system).is_none());

    // The pod's own label wins over its namespace's.
    c.api.set_pod_labels("shop", "a", &[(MODE, "none")]);
    c.wait_redirection(&shop, None).unwrap();
    c.api.set_pod_labels("legacy", "b", &[(MODE, "ambient")]);
    c.wait_redirection(&legacy, Some("enabled")).unwrap();
    c.wait("one pod is pinned", || pins() == 1).unwrap();
    assert!(!f.captured(&shop) && f.captured(&legacy));

    c.api.set_pod_labels("shop", "a", &[]);
    c.wait_redirection(&shop, Some("enabled")).unwrap();
    c.namespace("shop", false);
    c.wait_redirection(&shop, None).unwrap();

    // A pod that goes takes its pins with it.
    assert!(c.api.delete_pod("legacy", "b"));
    c.wait("no pod is pinned", || pins() == 0).unwrap();
    c.wait("ztunnel has let go", || f.ztunnel.as_ref().is_some_and(|z| z.workloads().is_empty())).unwrap();
}

/// The agent is killed again and again under load: pods stay captured, no connection fails.
#[test]
fn killed_under_load_nothing_fails() {
    let mut f = Fixture::new();
    f.cluster.namespace("shop", true);
    let (a, _app_a) = f.pod("shop", "a");
    let (b, _app_b) = f.pod("shop", "b");
    f.cluster.wait_redirection(&a, Some("enabled")).unwrap();
    f.cluster.wait_redirection(&b, Some("enabled")).unwrap();
    let outside = &f.cluster.world.outside;
    let loads = [
        ("to the mesh", Load::start(&a.host, vec![b.host.addr(false, APP), b.host.addr(true, APP)], 100)),
        ("to the world", Load::start(&a.host, vec![outside.addr(false, APP), outside.addr(true, APP)], 100)),
        ("from the world", Load::start(outside, vec![a.host.addr(false, APP), a.host.addr(true, APP)], 100)),
    ];
    let mut stream = Client::connect(&a.host, b.host.addr(false, APP)).unwrap();
    for round in 0..6 {
        std::thread::sleep(Duration::from_millis(150));
        f.cluster.kill_agent().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        assert!(f.captured(&a), "round {round}: not captured with the agent dead");
        f.cluster.start_agent().unwrap();
        f.cluster.wait("taken over", || f.cluster.agent_log().contains("snapshot sent")).unwrap();
        stream.exchange().expect("a connection through ztunnel outlives the agent");
    }
    for (what, load) in loads {
        let outcome = load.stop();
        assert!(outcome.failed.is_empty() && outcome.ok > 100, "{what}: {outcome:?}");
    }
    assert_eq!(f.cluster.redirection(&a).as_deref(), Some("enabled"));
}

/// ztunnel comes late, goes, comes back: pods wait as `pending`, and are enrolled as soon as it is there.
#[test]
fn ztunnel_comes_late_and_goes() {
    let mut f = Fixture::new();
    f.ztunnel = None;
    f.cluster.namespace("shop", true);
    let (a, _app) = f.pod("shop", "a");
    f.cluster.wait_redirection(&a, Some("pending")).unwrap();
    assert!(!f.captured(&a), "captured before ztunnel could take it");
    f.start_ztunnel();
    let took = f.cluster.wait_redirection(&a, Some("enabled")).unwrap();
    assert!(took < Duration::from_secs(2), "only after {took:?}");
    assert!(f.captured(&a));
    f.ztunnel = None;
    let refused = || {
        let connected = Client::connect(&a.host, f.cluster.world.outside.addr(false, APP));
        connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    f.cluster.wait("refused, once the listeners are closed", refused).unwrap();
    f.start_ztunnel();
    f.cluster
        .wait("it works again", || Client::connect(&a.host, f.cluster.world.outside.addr(false, APP)).is_ok())
        .unwrap();
}

/// What changes while the agent is away is found when it is back: pods that have gone, pods made anew under the same
/// name, a sandbox that was replaced, and a node that was rebooted under annotations that say `enabled`.
#[test]
fn what_changed_while_the_agent_was_away_is_found() {
    let mut f = Fixture::new();
    f.cluster.namespace("shop", true);
    let (gone, _a1) = f.pod("shop", "gone");
    let (again, a2) = f.pod("shop", "again");
    let (moved, a3) = f.pod("shop", "moved");
    let (stays, _a4) = f.pod("shop", "stays");
    for pod in [&gone, &again, &moved, &stays] {
        f.cluster.wait_redirection(pod, Some("enabled")).unwrap();
    }
    f.cluster.kill_agent().unwrap();
    assert!(f.cluster.api.delete_pod("shop", "gone") && f.cluster.api.delete_pod("shop", "again"));
    drop((again, a2, a3));
    weir_tests::world::forget_name("again").unwrap();
    let (again, _a2) = f.pod("shop", "again");
    let moved = f.cluster.replace_sandbox(moved).unwrap();
    let _a3 = App::start(&moved.host, APP).unwrap();
    assert!(!f.captured(&moved) && f.captured(&stays), "the stage is set");
    f.cluster.start_agent().unwrap();
    let pinned = || {
        let pods = weir_agent::redirect::pinned(PIN_ROOT.as_ref());
        let mut found: Vec<_> = pods.into_iter().map(|pod| (pod.record.uid, pod.record.cookie)).collect();
        found.sort();
        found
    };
    let mut wanted: Vec<_> =
        [&again, &moved, &stays].map(|pod| (pod.uid.clone(), pod.host.netns().cookie())).to_vec();
    wanted.sort();
    f.cluster.wait("exactly what is there now is pinned", || pinned() == wanted).unwrap();
    for pod in [&again, &moved, &stays] {
        // What is pinned is prepared; captured it is a moment later.
        f.cluster.wait(&format!("{} is captured", pod.host.name()), || f.captured(pod)).unwrap();
        f.cluster.wait_redirection(pod, Some("enabled")).unwrap();
    }
    // As after a reboot: nothing is pinned, the namespaces are new, the annotations are left.
    f.cluster.kill_agent().unwrap();
    let mut cookies = Vec::new();
    for (_, cookie) in pinned() {
        std::fs::remove_dir_all(format!("{PIN_ROOT}/v1/pods/{cookie}")).unwrap();
        cookies.push(cookie);
    }
    let rebooted = f.cluster.replace_sandbox(stays).unwrap();
    let _a4 = App::start(&rebooted.host, APP).unwrap();
    assert_eq!(f.cluster.redirection(&rebooted).as_deref(), Some("enabled"), "the annotation is left");
    let before = f.cluster.api.patches().len();
    f.cluster.start_agent().unwrap();
    f.cluster.wait("captured", || f.captured(&rebooted)).unwrap();
    let said = || -> Vec<serde_json::Value> {
        let patches = f.cluster.api.patches();
        let of_pod = patches[before..].iter().filter(|patch| patch.name == "stays");
        of_pod
            .map(|patch| patch.body["metadata"]["annotations"]["ambient.istio.io/redirection"].clone())
            .collect()
    };
    f.cluster
        .wait("not believed, then made true", || said() == [json!("pending"), json!("enabled")])
        .unwrap();
}

/// A SIGKILL may leave a pod's pins half built or half removed. They are cleared, and hold nobody in the mesh.
#[test]
fn what_was_half_done_is_cleared() {
    let mut f = Fixture::new();
    f.cluster.namespace("shop", true);
    let (stays, _a1) = f.pod("shop", "stays");
    let (leaves, _a2) = f.pod("shop", "leaves");
    for pod in [&stays, &leaves] {
        f.cluster.wait_redirection(pod, Some("enabled")).unwrap();
    }
    f.cluster.kill_agent().unwrap();
    let path = |kind: &str| std::path::PathBuf::from(format!("{PIN_ROOT}/v1/{kind}"));
    let names = |kind: &str| -> Vec<String> {
        let entries = std::fs::read_dir(path(kind)).unwrap().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    // Half removed: out of its place, some pins gone already. Half built: some pins there already.
    let cookie = stays.host.netns().cookie().to_string();
    std::fs::rename(path("pods").join(&cookie), path("gone").join(&cookie)).unwrap();
    std::fs::remove_file(path("gone").join(&cookie).join("RECORD")).unwrap();
    std::fs::create_dir(path("new").join("7")).unwrap();
    std::fs::rename(path("gone").join(&cookie).join("arrive"), path("new").join("7/arrive")).unwrap();

    f.cluster.start_agent().unwrap();
    let whole = || {
        let pinned = weir_agent::redirect::pinned(PIN_ROOT.as_ref());
        pinned.iter().filter(|pod| pod.config.flags.has(PodFlags::INBOUND)).count() == 2
    };
    f.cluster.wait("both are captured", whole).unwrap();
    assert!(f.captured(&stays) && f.captured(&leaves));
    assert!(names("new").is_empty() && names("gone").is_empty(), "{:?} {:?}", names("new"), names("gone"));
    f.cluster.namespace("shop", false);
    for pod in [&stays, &leaves] {
        f.cluster.wait_redirection(pod, None).unwrap();
    }
    f.cluster
        .wait("nothing is pinned", || ["pods", "new", "gone"].iter().all(|kind| names(kind).is_empty()))
        .unwrap();
}

/// A pod whose namespace is not found waits as `pending`, with the reason in the log, and hurts no other.
#[test]
fn a_pod_without_a_namespace_is_pending() {
    let f = Fixture::new();
    f.cluster.namespace("shop", true);
    f.cluster.api.put_pod(json!({
        "metadata": { "namespace": "shop", "name": "ghost", "uid": "99999999-0000-4000-8000-000000000000" },
        "spec": { "nodeName": "node", "containers": [{ "name": "app", "image": "app" }] },
        "status": { "phase": "Running", "podIP": "10.88.9.9", "podIPs": [{ "ip": "10.88.9.9" }] },
    }));
    let (a, _app) = f.pod("shop", "a");
    f.cluster.wait_redirection(&a, Some("enabled")).unwrap();
    let ghost = || f.cluster.api.pod("shop", "ghost").unwrap().metadata.annotations.unwrap_or_default();
    f.cluster
        .wait("the ghost is pending", || {
            ghost().get("ambient.istio.io/redirection").is_some_and(|value| value == "pending")
        })
        .unwrap();
    assert!(f.cluster.agent_log().contains("netns_not_found"), "{}", f.cluster.agent_log());
}

/// Whatever a peer on the ZDS socket sends, the agent lives and serves the next one.
#[test]
fn nonsense_on_the_zds_socket_hurts_nobody() {
    let f = Fixture::new();
    f.cluster.namespace("shop", true);
    let (a, _app) = f.pod("shop", "a");
    f.cluster.wait_redirection(&a, Some("enabled")).unwrap();
    let long = vec![0x61; 8000];
    let descriptor: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let cases: [(&str, Vec<&[u8]>, usize); 6] = [
        ("not protobuf", vec![b"\xff\xff\xff\xff"], 0),
        ("nothing", vec![b""], 0),
        ("too long", vec![&long], 0),
        ("another version", vec![b"\x08\x09"], 0),
        ("a descriptor with hello", vec![b"\x08\x01"], 1),
        ("hello, then an answer to nothing", vec![b"\x08\x01", b"\x0a\x00", b"\x0a\x00", b"\x0a\x00"], 0),
    ];
    for (what, packets, descriptors) in cases {
        for _ in 0..20 {
            let peer =
                socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
            connect(peer.as_raw_fd(), &UnixAddr::new(ZDS_SOCKET).unwrap()).unwrap();
            let fds = vec![descriptor.as_raw_fd(); descriptors];
            for packet in &packets {
                let control = if fds.is_empty() { vec![] } else { vec![ControlMessage::ScmRights(&fds)] };
                let parts = [IoSlice::new(packet)];
                let _ = sendmsg::<UnixAddr>(peer.as_raw_fd(), &parts, &control, MsgFlags::MSG_NOSIGNAL, None);
            }
        }
        assert!(f.captured(&a), "{what}");
    }
    let (b, _app_b) = f.pod("shop", "b");
    f.cluster.wait_redirection(&b, Some("enabled")).unwrap();
    assert!(f.captured(&b));
}

/// What keeps the agent from running is one line that names the thing and the remedy, and a status.
#[test]
fn unfit_machines_and_bad_input_are_named() {
    let cluster = Cluster::new().unwrap();
    std::fs::write("/run/broken", "not: [yaml").unwrap();
    std::fs::write("/run/unknown-key", "nodeName: n\nnoSuchKey: 1\n").unwrap();
    std::fs::create_dir_all("/run/plain").unwrap();
    std::fs::create_dir_all("/run/ztunnel").unwrap();
    let _taken = {
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        nix::sys::socket::bind(socket.as_raw_fd(), &UnixAddr::new("/run/ztunnel/taken.sock").unwrap())
            .unwrap();
        nix::sys::socket::listen(&socket, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        socket
    };
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = (port.local_addr().unwrap().to_string(), port);
    let cases: [(&str, Vec<&str>, &str, i32); 12] = [
        ("a port in use", vec!["--metrics-addr", &port.0], "--metrics-addr", 1),
        ("another port in use", vec!["--health-addr", &port.0], "--health-addr", 1),
        ("no policy", vec!["--existing-connections", "soon"], "--existing-connections", 2),
        ("nobody's probes", vec!["--probe-exemption", "some"], "--probe-exemption", 2),
        ("no node name", vec!["--node-name", ""], "NODE_NAME", 2),
        ("unreadable kubeconfig", vec!["--kubeconfig", "/run/missing"], "/run/missing", 1),
        ("broken kubeconfig", vec!["--kubeconfig", "/run/broken"], "/run/broken", 1),
        ("unknown key in the configuration", vec!["--config", "/run/unknown-key"], "noSuchKey", 2),
        ("not on bpffs", vec!["--bpffs", "/run/plain/weir"], "mount -t bpf", 1),
        ("no host namespace", vec!["--host-netns", "/run/missing"], "/run/missing", 1),
        ("socket in use", vec!["--ztunnel-socket", "/run/ztunnel/taken.sock"], "in use", 1),
        ("a selector that does not parse", vec!["--enablement-selectors", "- podSelector: 7"], "selector", 2),
    ];
    for (what, flags, wanted, status) in cases {
        let mut command = Command::new(weir().unwrap());
        let fixture = cluster.agent_command().unwrap();
        let mut args: Vec<_> = fixture.get_args().map(ToOwned::to_owned).collect();
        for pair in flags.chunks(2) {
            if let Some(at) = args.iter().position(|arg| arg == pair[0]) {
                args[at + 1] = pair[1].into();
            } else {
                args.extend(pair.iter().map(Into::into));
            }
        }
        let output = command.args(&args).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or_default();
        assert!(last.contains(wanted), "{what}: {said}");
        assert_eq!(output.status.code(), Some(status), "{what}: {said}");
    }
}

/// Without root, or without one capability, the agent says which and why.
#[test]
fn missing_privileges_are_named() {
    let cluster = Cluster::new().unwrap();
    let fixture = cluster.agent_command().unwrap();
    for (how, wanted) in [
        (&["--reuid=65534", "--clear-groups"][..], "run as root"),
        (&["--bounding-set=-bpf"], "CAP_BPF"),
        (&["--bounding-set=-net_admin"], "CAP_NET_ADMIN"),
        (&["--bounding-set=-sys_admin"], "CAP_SYS_ADMIN"),
        (&["--bounding-set=-sys_ptrace"], "CAP_SYS_PTRACE"),
    ] {
        let mut command = Command::new("setpriv");
        command.args(how).arg(fixture.get_program()).args(fixture.get_args()).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.lines().count() == 1 && said.contains(wanted), "{how:?}: {said}");
        assert_eq!(output.status.code(), Some(1), "{how:?}: {said}");
    }
}

/// Metrics and checks are served, and say what is so.
#[test]
fn metrics_and_checks_say_what_is_so() {
    let f = Fixture::new();
    f.cluster.namespace("shop", true);
    let (a, _app) = f.pod("shop", "a");
    f.cluster.wait_redirection(&a, Some("enabled")).unwrap();
    for _ in 0..3 {
        Client::connect(&a.host, f.cluster.world.outside.addr(true, APP)).unwrap();
    }
    let log = f.cluster.agent_log();
    let address = |what: &str| {
        let rest = log.split(what).nth(1).unwrap();
        rest.split_whitespace().next().unwrap().parse::<std::net::SocketAddr>().unwrap()
    };
    let scrape = || get(address("metrics="), "/metrics");
    // The annotation is the last step; the state follows it.
    f.cluster.wait("the state is told", || scrape().contains(r#"state="enrolled""#)).unwrap();
    let metrics = scrape();
    for line in [
        "ztunnel_connected 1",
        "weir_zds_members 1",
        "weir_zds_refused_pods 0",
        "weir_zds_snapshots_total 1",
        r#"weir_zds_messages_total{type="add",result="acked"} 1"#,
        r#"weir_zds_connections_total{event="accepted"} 1"#,
        r#"weir_pods{state="enrolled",reason="selected"} 1"#,
        r#"weir_pod_connections_total{namespace="shop",pod="a",reason="captured_out",family="ipv6"} 3"#,
        "weir_zds_ack_seconds_count 2",
        "# EOF",
    ] {
        assert!(metrics.lines().any(|said| said == line), "{line} is missing:\n{metrics}");
    }
    let health = address("health=");
    assert!(get(health, "/healthz").starts_with("HTTP/1.1 200"));
    let ready = get(health, "/readyz");
    assert!(ready.starts_with("HTTP/1.1 200") && ready.ends_with("ready\n"), "{ready}");
}

/// One request over plain HTTP, head and body.
fn get(to: std::net::SocketAddr, path: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(to).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: weir\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// `weir status` shows what is pinned, agent or not, and counts exactly.
#[test]
fn status_works_without_the_agent() {
    let mut f = Fixture::new();
    f.cluster.namespace("shop", true);
    let (a, _app) = f.pod("shop", "a");
    f.cluster.wait_redirection(&a, Some("enabled")).unwrap();
    for v6 in [false, true] {
        for _ in 0..7 {
            Client::connect(&a.host, f.cluster.world.outside.addr(v6, APP)).unwrap();
        }
    }
    f.cluster.kill_agent().unwrap();
    let output = Command::new(weir().unwrap()).args(["status", "--json"]).output().unwrap();
    assert!(output.status.success());
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(rows["agent"], json!(null));
    let row = &rows["pods"][0];
    assert_eq!(rows["pods"].as_array().unwrap().len(), 1, "{rows}");
    assert_eq!((&row["namespace"], &row["name"], &row["uid"]), (&json!("shop"), &json!("a"), &json!(a.uid)));
    assert_eq!(row["state"], "captured");
    let counted = row["counters"].as_array().unwrap();
    let out = counted.iter().find(|count| count["reason"] == Counter::CapturedOut.name()).unwrap();
    assert_eq!((&out["ipv4"], &out["ipv6"]), (&json!(7), &json!(7)), "{row}");
}
