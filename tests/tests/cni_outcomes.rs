//! The table of outcomes of `docs/cni.md`: what becomes of a pod when something is missing, wrong, or dies.
#![cfg(feature = "root")]

use std::{
    io::IoSlice,
    os::fd::{AsRawFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, sendmsg, socket,
};
use serde_json::json;
use weir_tests::{
    cluster::Cluster,
    cni::{Outcome, Sandbox, config},
    meshed::start_ztunnel,
    world::{Families, forget_name, pins},
    ztunnel::{Mesh, Ztunnel},
};

const SOCKET: &str = "/run/weir/cni.sock";
const TABLE: &str = "/run/weir/decisions.json";

fn cluster() -> Cluster {
    let mut cluster = Cluster::new().unwrap();
    cluster.namespace("shop", true);
    cluster.namespace("legacy", false);
    cluster.namespace("kube-system", true);
    start_agent(&mut cluster);
    cluster
}

fn start_agent(cluster: &mut Cluster) {
    cluster.start_agent().unwrap();
    let listens = || {
        std::os::unix::net::UnixStream::connect(SOCKET).is_err_and(|e| {
            e.raw_os_error() != Some(nix::libc::ECONNREFUSED) && e.raw_os_error() != Some(nix::libc::ENOENT)
        })
    };
    cluster.wait("the agent listens", listens).unwrap();
}

fn ztunnel() -> Ztunnel {
    let ztunnel = start_ztunnel(&Mesh::default()).unwrap();
    assert!(ztunnel.wait_ready(Duration::from_secs(10)));
    ztunnel
}

fn assert_error(outcome: &Outcome, words: &[&str]) {
    let error = outcome.error();
    assert!(!outcome.success);
    assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
    assert_eq!(outcome.stdout["cniVersion"], "1.1.0");
}

#[test]
fn without_the_agent_its_last_table_decides() {
    let mut c = cluster();
    let sandbox = |namespace, name| c.sandbox(namespace, name, Families::V4).unwrap();
    let inside = sandbox("shop", "inside");
    let outside = sandbox("legacy", "plain");
    let saved = || {
        std::fs::read_to_string(TABLE)
            .is_ok_and(|table| table.contains(&outside.uid) && table.contains(&inside.uid))
    };
    c.wait("the table is saved", saved).unwrap();
    let sandbox = |namespace, name| c.another_sandbox(namespace, name, "1-1", Families::V4).unwrap();
    let (new_inside, new_outside) = (sandbox("shop", "new-in"), sandbox("legacy", "new-out"));
    let (excluded, own, unknown) =
        (sandbox("kube-system", "dns"), sandbox("weir", "weir-x"), sandbox("new-ns", "x"));
    c.kill_agent().unwrap();

    let cases: [(&str, &Sandbox, Option<&str>); 7] = [
        ("mesh pod", &inside, Some("belongs to the mesh")),
        ("unknown pod of a mesh namespace", &new_inside, Some("its namespace belongs to the mesh")),
        ("unknown namespace", &unknown, Some("not known")),
        ("pod outside", &outside, None),
        ("unknown pod of a namespace outside", &new_outside, None),
        ("excluded namespace", &excluded, None),
        ("the agent itself", &own, None),
    ];
    for (what, sandbox, refused) in &cases {
        let outcome = sandbox.add().unwrap();
        match refused {
            Some(words) => assert_error(&outcome, &["11:", "node agent", "does not run", words]),
            None => assert_eq!((outcome.success, &outcome.stdout), (true, &sandbox.prev_result()), "{what}"),
        }
        for verb in ["DEL", "GC", "CHECK"] {
            assert!(sandbox.call(verb, &config()).make().unwrap().success, "{what}: {verb}");
        }
        for (policy, passes) in [("pass", true), ("fail", refused.is_none() && !what.contains("outside"))] {
            let mut config = config();
            config["agentDown"] = json!(policy);
            let outcome = sandbox.call("ADD", &config).make().unwrap();
            assert_eq!(outcome.success, passes, "{what}: {policy}: {}", outcome.error());
        }
        let mut config = config();
        config["decisions"] = json!("/run/missing");
        let passes = matches!(*what, "excluded namespace" | "the agent itself");
        assert_eq!(sandbox.call("ADD", &config).make().unwrap().success, passes, "{what}: no table");
    }
    assert_error(&inside.call("STATUS", &config()).make().unwrap(), &["50:", "does not run"]);
    let mut lenient = config();
    lenient["statusFollowsAgent"] = json!(false);
    assert!(inside.call("STATUS", &lenient).make().unwrap().success);
    // What the runtime's operator finds.
    let log = std::fs::read_to_string("/run/weir-cni.log").unwrap();
    assert!(
        log.contains("Add shop/inside") && log.contains("failed: weir: pod shop/inside is held back"),
        "{log}"
    );
}

#[test]
fn without_a_ztunnel_the_step_is_named_and_nothing_is_left() {
    let c = cluster();
    let a = c.sandbox("shop", "a", Families::Dual).unwrap();
    let began = Instant::now();
    assert_error(&a.add().unwrap(), &["100:", "shop/a", "step publish", "no_ztunnel"]);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    c.wait("nothing is pinned", || pins() == 0).unwrap();
    assert_error(&a.call("STATUS", &config()).make().unwrap(), &["50:", "no ztunnel"]);
    // Others are not held up by it.
    let outside = c.sandbox("legacy", "plain", Families::V4).unwrap();
    assert!(outside.add().unwrap().success);

    // One that comes while the call waits is in time; one that refuses is quoted.
    let waiting = thread::scope(|scope| {
        let add = scope.spawn(|| a.add().unwrap());
        thread::sleep(Duration::from_millis(500));
        let ztunnel = ztunnel();
        let outcome = add.join().unwrap();
        assert!(outcome.success, "{}\n{}", outcome.error(), c.agent_log());
        ztunnel
    });
    let b = c.sandbox("shop", "b", Families::Dual).unwrap();
    waiting.stall(true);
    assert_error(&b.add().unwrap(), &["100:", "step publish"]);
    assert!(a.call("STATUS", &config()).make().is_ok());
}

/// A call that is cut off, at either end, leaves nothing that a later sandbox could stumble over.
#[test]
fn cut_off_in_the_middle() {
    let mut c = cluster();
    let zt = ztunnel();
    let a = c.sandbox("shop", "a", Families::Dual).unwrap();
    zt.stall(true);
    let outcome = thread::scope(|scope| {
        let add = scope.spawn(|| a.add().unwrap());
        thread::sleep(Duration::from_millis(700));
        c.kill_agent().unwrap();
        add.join().unwrap()
    });
    assert_error(&outcome, &["11:", "shop/a", "ended meanwhile"]);
    assert_eq!(pins(), 1, "prepared");
    zt.kill();
    start_agent(&mut c);
    let zt = ztunnel();
    // The runtime gives the sandbox up, and makes another.
    assert!(a.del().unwrap().success);
    c.wait("the first one's pins are gone", || pins() == 0).unwrap();
    forget_name("a").unwrap();
    let next = c.another_sandbox("shop", "a", &a.uid, Families::Dual).unwrap();
    let outcome = next.add().unwrap();
    assert!(outcome.success, "{}\n{}", outcome.error(), c.agent_log());
    assert_eq!((pins(), zt.workloads().len()), (1, 1));

    // The plugin's end.
    zt.stall(true);
    let b = c.sandbox("shop", "b", Families::Dual).unwrap();
    let request = json!({
        "verb": "add", "network": "n", "attachment": { "containerID": "c", "ifname": "eth0" },
        "pod": { "namespace": "shop", "name": "b", "uid": b.uid },
    });
    let netns: OwnedFd = std::fs::File::open(b.path()).unwrap().into();
    let peer = rude(request.to_string().as_bytes(), &[netns.as_raw_fd()]);
    c.wait("it is under way", || pins() == 2).unwrap();
    drop(peer);
    zt.stall(false);
    c.wait("it is undone", || pins() == 1).unwrap();
}

fn rude(message: &[u8], descriptors: &[i32]) -> OwnedFd {
    let peer = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    connect(peer.as_raw_fd(), &UnixAddr::new(SOCKET).unwrap()).unwrap();
    let control = [ControlMessage::ScmRights(descriptors)];
    let control = if descriptors.is_empty() { &[] } else { &control[..] };
    let _ = sendmsg::<UnixAddr>(
        peer.as_raw_fd(),
        &[IoSlice::new(message)],
        control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    );
    peer
}

#[test]
fn what_makes_no_sense_is_refused_and_hurts_nobody() {
    let c = cluster();
    let _ztunnel = ztunnel();
    let a = c.sandbox("shop", "a", Families::Dual).unwrap();
    let add = a.call("ADD", &config());
    for (what, call, words) in [
        ("no JSON", weir_tests::cni::Call { stdin: "{".into(), ..add.clone() }, ["6:", "cannot be read"]),
        ("nothing", weir_tests::cni::Call { stdin: String::new(), ..add.clone() }, ["6:", "cannot be read"]),
        ("no command", add.clone().with("CNI_COMMAND", None), ["4:", "CNI_COMMAND"]),
        ("another command", add.clone().with("CNI_COMMAND", Some("FLY")), ["4:", "FLY"]),
        ("no container", add.clone().with("CNI_CONTAINERID", None), ["4:", "CNI_CONTAINERID"]),
        ("no namespace", add.clone().with("CNI_NETNS", None), ["4:", "CNI_NETNS"]),
        (
            "a namespace that is not",
            add.clone().with("CNI_NETNS", Some("/run/missing")),
            ["5:", "/run/missing"],
        ),
        (
            "a plain file",
            add.clone().with("CNI_NETNS", Some("/run/kubeconfig")),
            ["100:", "network namespace"],
        ),
        ("the node's", add.clone().with("CNI_NETNS", c.world.node.path().to_str()), ["100:", "the node's"]),
    ] {
        let outcome = call.make().unwrap();
        assert!(!outcome.success, "{what}");
        assert_error(&outcome, &words);
    }
    let file: OwnedFd = std::fs::File::open(a.path()).unwrap().into();
    let fd = file.as_raw_fd();
    let long = vec![b' '; 150 * 1024];
    let mut peers = Vec::new();
    for _ in 0..20 {
        for (message, descriptors) in [
            (&b"nonsense"[..], &[][..]),
            (b"{}", &[]),
            (b"{\"verb\":\"add\"}", &[]),
            (b"{\"verb\":\"add\"}", &[fd, fd]),
            (b"{\"verb\":\"add\"}", &[fd; 40]),
            (b"{\"verb\":\"status\"}", &[fd]),
            (&long, &[]),
            // Says nothing, and stays.
            (b"", &[]),
        ] {
            peers.push(rude(message, descriptors));
        }
    }
    let before = c.agent_descriptors().unwrap();
    let outcome = a.add().unwrap();
    assert!(outcome.success, "{}\n{}", outcome.error(), c.agent_log());
    drop(peers);
    c.wait("no descriptor is left", || c.agent_descriptors().unwrap() < before).unwrap();
}
