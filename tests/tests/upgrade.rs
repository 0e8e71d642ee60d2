//! The agent is replaced by one with other programs, and back, under load: no connection fails, and afterwards the
//! programs are the other ones everywhere.
#![cfg(feature = "root")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use weir_agent::kernel::{Hook, Objects};
use weir_tests::{
    app::App,
    cluster::{Cluster, Pod, ZDS_SOCKET},
    meshed::{none_failed, start_ztunnel, talk_in_a_ring},
    world::{Host, PIN_ROOT, run, run_in},
    ztunnel::Mesh,
};

const APP: u16 = 8080;
const PODS: usize = 8;

#[test]
fn programs_are_replaced_under_load_and_back() {
    let mut cluster = Cluster::new().unwrap();
    cluster.namespace("shop", true);
    let mesh = Mesh::default();
    let ztunnel = start_ztunnel(&mesh).unwrap();
    cluster.start_agent().unwrap();
    let pods: Vec<(Pod, App)> = (0..PODS)
        .map(|number| cluster.meshed_app(&mesh, "shop", &format!("p{number}"), APP).unwrap())
        .collect();
    let all_enabled = |cluster: &Cluster| {
        for (pod, _) in &pods {
            cluster.wait_redirection(pod, Some("enabled")).unwrap();
        }
    };
    all_enabled(&cluster);
    let other = other_programs();
    // Every pod talks to the next, a hundred times a second, over both families in turn.
    let hosts: Vec<&Host> = pods.iter().map(|(pod, _)| &pod.host).collect();
    let loads = talk_in_a_ring(&hosts, APP, 100);
    let mut seen = programs(&pods);
    for (round, build) in [Some(&other), None, Some(&other), None].into_iter().enumerate() {
        // In turn as the kubelet does it, and as a fault does.
        if round % 2 == 0 {
            cluster.stop_agent().unwrap();
        } else {
            cluster.kill_agent().unwrap();
        }
        match build {
            Some(programs) => cluster.start_agent_of(programs).unwrap(),
            None => cluster.start_agent().unwrap(),
        }
        let said = format!("programs of another build replaced pods={PODS}");
        cluster.wait("all are replaced", || cluster.agent_log().contains(&said)).unwrap();
        all_enabled(&cluster);
        let now = programs(&pods);
        assert_eq!(now.len(), PODS * (Hook::ALL.len() + 1));
        assert!(now.is_disjoint(&seen), "round {round}: some are the old ones: {now:?} {seen:?}");
        seen.extend(now);
    }
    // The same build once more has nothing to replace.
    let before = programs(&pods);
    cluster.kill_agent().unwrap();
    cluster.start_agent().unwrap();
    cluster.wait("taken over", || cluster.agent_log().contains("taken over")).unwrap();
    all_enabled(&cluster);
    assert_eq!(programs(&pods), before);

    let made = none_failed(loads);
    println!("{made} connections over five replacements");
    assert!(made > 500, "only {made}: nothing was tried");
    assert!(ztunnel.violations().is_empty(), "{:?}", ztunnel.violations());
}

/// An agent of another layout has left its pins: nothing of them is used, and the reason is said.
#[test]
fn pins_of_another_layout_are_refused() {
    let mut cluster = Cluster::new().unwrap();
    let other = format!("{PIN_ROOT}/v999/pods/4711");
    fs::create_dir_all(&other).unwrap();
    let output = cluster.agent_command().unwrap().output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("v999") && said.contains("weir uninstall"), "{said}");
    fs::remove_dir(&other).unwrap();
    cluster.start_agent().unwrap();
    cluster.wait("starts", || cluster.agent_log().contains("taken over")).unwrap();
}

/// A second agent on the same pins ends, and says why; the first one goes on.
#[test]
fn two_agents_never_share_pins() {
    let mut cluster = Cluster::new().unwrap();
    cluster.start_agent().unwrap();
    cluster.wait("starts", || cluster.agent_log().contains("taken over")).unwrap();
    let output = cluster.agent_command().unwrap().output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("another weir"), "{said}");
    assert!(Path::new(ZDS_SOCKET).exists(), "the first one's socket");
    let ztunnel = start_ztunnel(&Mesh::default()).unwrap();
    assert!(ztunnel.wait_ready(Duration::from_secs(5)), "the first one serves");
}

/// The objects with another version: what the loader reads is the same, the file is not.
fn other_programs() -> PathBuf {
    let dir = PathBuf::from("/run/other-programs");
    fs::create_dir_all(&dir).unwrap();
    let Objects { pod, node } = Objects::get().unwrap();
    for (name, mut object) in [("weir-pod.bpf.o", pod), ("weir-node.bpf.o", node)] {
        object.extend(b"another version");
        fs::write(dir.join(name), object).unwrap();
    }
    dir
}

/// Kernel ids of all programs that run in the pods: of steer by its link, of the others by the filters that run.
fn programs(pods: &[(Pod, App)]) -> BTreeSet<u64> {
    let mut ids = BTreeSet::new();
    for (pod, _) in pods {
        let link = pod.pin("steer_link");
        let shown = run("bpftool", &["-j", "link", "show", "pinned", link.to_str().unwrap()]).unwrap();
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        ids.insert(shown["prog_id"].as_u64().unwrap());
        for filter in ["dev eth0 ingress", "dev lo ingress", "dev eth0 egress"] {
            let args: Vec<&str> = "-j filter show".split(' ').chain(filter.split(' ')).collect();
            let shown = run_in(&pod.host, "tc", &args).unwrap();
            let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
            let of = |filter: &serde_json::Value| filter["options"]["prog"]["id"].as_u64();
            ids.extend(shown.as_array().unwrap().iter().filter_map(of));
        }
    }
    ids
}
