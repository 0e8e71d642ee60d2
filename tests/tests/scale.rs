//! Many pods, many changes: the labels decide in the end, and the work is bounded.
#![cfg(feature = "root")]

use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng, rngs::StdRng};
use weir_tests::{
    cluster::{Cluster, MODE, Pod, ZDS_SOCKET},
    world::{Families, PIN_ROOT},
    ztunnel::{Options, Ztunnel},
};

fn start_ztunnel() -> Ztunnel {
    Ztunnel::start(Options { zds: Some(ZDS_SOCKET.into()), ..Options::default() }).unwrap()
}

fn pins() -> usize {
    std::fs::read_dir(format!("{PIN_ROOT}/v1/pods")).map_or(0, Iterator::count)
}

/// Labels toggled at random, ztunnel replaced now and then, the agent killed now and then: in the end every pod is
/// where its label says, and nothing is pinned for the others. `WEIR_SEED` repeats a run, `WEIR_LONG` makes ten.
#[test]
fn toggled_at_random_the_labels_decide() {
    let seeds: Vec<u64> = match std::env::var("WEIR_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) if std::env::var_os("WEIR_LONG").is_some() => (1..=10).collect(),
        Err(_) => (1..=3).collect(),
    };
    for seed in seeds {
        println!("seed {seed}");
        let toggles = if std::env::var_os("WEIR_LONG").is_some() { 200 } else { 30 };
        toggle(seed, 30, toggles);
    }
}

fn toggle(seed: u64, pods: usize, toggles: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut cluster = Cluster::new().unwrap();
    cluster.namespace("shop", false);
    let pods: Vec<Pod> =
        (0..pods).map(|number| cluster.pod("shop", &format!("p{number}"), Families::Dual).unwrap()).collect();
    let mut ztunnel = start_ztunnel();
    cluster.start_agent().unwrap();
    let mut wanted = vec![false; pods.len()];
    for turn in 0..pods.len() * toggles {
        let which = rng.random_range(0..pods.len());
        wanted[which] = !wanted[which];
        let labels: &[(&str, &str)] = if wanted[which] { &[(MODE, "ambient")] } else { &[] };
        cluster.api.set_pod_labels("shop", pods[which].host.name(), labels);
        if turn % 10 == 0 {
            std::thread::sleep(Duration::from_millis(rng.random_range(0..10)));
        }
        match rng.random_range(0..300) {
            0 => {
                assert!(ztunnel.violations().is_empty(), "{:?}", ztunnel.violations());
                ztunnel = start_ztunnel();
            }
            1 => {
                cluster.kill_agent().unwrap();
                cluster.start_agent().unwrap();
            }
            _ => {}
        }
    }
    for (pod, wanted) in pods.iter().zip(&wanted) {
        cluster.wait_redirection(pod, wanted.then_some("enabled")).unwrap();
    }
    let in_mesh = wanted.iter().filter(|wanted| **wanted).count();
    cluster.wait("exactly the pods of the mesh are pinned", || pins() == in_mesh).unwrap();
    cluster.wait("exactly the pods of the mesh are served", || ztunnel.workloads().len() == in_mesh).unwrap();
    let pinned = weir_agent::redirect::pinned(PIN_ROOT.as_ref());
    for pod in &pinned {
        let index = pods.iter().position(|known| known.uid == pod.record.uid).unwrap();
        assert!(wanted[index], "{} is pinned", pod.record.name);
    }
    assert!(ztunnel.violations().is_empty(), "{:?}", ztunnel.violations());
}

/// A full node comes up cold, and its namespace flips: with the work counted per pod.
#[test]
fn a_full_node_is_enrolled_and_released() {
    let pods: usize = if std::env::var_os("WEIR_LONG").is_some() { 500 } else { 100 };
    let mut cluster = Cluster::new().unwrap();
    cluster.namespace("shop", true);
    let pods: Vec<Pod> =
        (0..pods).map(|number| cluster.pod("shop", &format!("p{number}"), Families::Dual).unwrap()).collect();
    let ztunnel = start_ztunnel();
    let began = Instant::now();
    cluster.start_agent().unwrap();
    let all = |wanted: Option<&str>| pods.iter().all(|pod| cluster.redirection(pod).as_deref() == wanted);
    cluster.wait_for("all are enrolled", Duration::from_secs(60), || all(Some("enabled"))).unwrap();
    let enrolled = began.elapsed();
    let patches = cluster.api.patches().len();
    let began = Instant::now();
    cluster.namespace("shop", false);
    cluster.wait_for("all are released", Duration::from_secs(60), || all(None) && pins() == 0).unwrap();
    let released = began.elapsed();
    let memory = cluster.agent_memory_kb().unwrap();
    println!(
        "{} pods: enrolled from a cold start in {enrolled:.1?}, released in {released:.1?}; {:.2} patches per pod \
         to enrol; agent's resident memory {} MB, descriptors {}",
        pods.len(),
        patches as f64 / pods.len() as f64,
        memory / 1024,
        cluster.agent_descriptors().unwrap(),
    );
    assert!(patches <= pods.len() * 2, "{patches} patches");
    assert!(cluster.agent_descriptors().unwrap() < 80, "descriptors of pods that have left");
    assert!(ztunnel.violations().is_empty(), "{:?}", ztunnel.violations());
}
