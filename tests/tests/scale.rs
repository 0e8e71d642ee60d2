//! Many pods, many changes: the labels decide in the end, and the work is bounded.
#![cfg(feature = "root")]

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::json;
use weir_tests::{
    cluster::{Cluster, MODE, Pod},
    meshed::start_ztunnel,
    world::{Families, PIN_ROOT, pins},
    ztunnel::Mesh,
};

/// Labels toggled at random, ztunnel replaced now and then, the agent killed now and then: in the end every pod is
/// where its label says, and nothing is pinned for the others. Thirty pods, two hundred toggles each on average.
/// `WEIR_SEED` repeats a run, `WEIR_LONG` makes ten of three.
#[test]
fn toggled_at_random_the_labels_decide() {
    let seeds: Vec<u64> = match std::env::var("WEIR_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) if std::env::var_os("WEIR_LONG").is_some() => (1..=10).collect(),
        Err(_) => (1..=3).collect(),
    };
    for seed in seeds {
        println!("seed {seed}");
        toggle(seed, 30, 200);
    }
}

fn toggle(seed: u64, pods: usize, toggles: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut cluster = Cluster::new().unwrap();
    cluster.namespace("shop", false);
    let pods: Vec<Pod> =
        (0..pods).map(|number| cluster.pod("shop", &format!("p{number}"), Families::Dual).unwrap()).collect();
    let mut ztunnel = start_ztunnel(&Mesh::default()).unwrap();
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
                ztunnel = start_ztunnel(&Mesh::default()).unwrap();
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
    let name = |pod: &Pod| pod.host.name().to_owned();
    let in_mesh: BTreeSet<String> =
        pods.iter().zip(&wanted).filter(|(_, wanted)| **wanted).map(|(pod, _)| name(pod)).collect();
    let pinned = || -> BTreeSet<String> {
        weir_agent::redirect::pinned(PIN_ROOT.as_ref()).into_iter().map(|pod| pod.record.name).collect()
    };
    if let Err(error) = cluster
        .wait("exactly the pods of the mesh are pinned", || pinned() == in_mesh && pins() == in_mesh.len())
    {
        let pinned = pinned();
        let (kept, missing) = (pinned.difference(&in_mesh), in_mesh.difference(&pinned));
        let (kept, missing): (Vec<_>, Vec<_>) = (kept.collect(), missing.collect());
        panic!("{kept:?} are pinned and {missing:?} are not, of {} directories: {error}", pins());
    }
    cluster
        .wait("exactly the pods of the mesh are served", || ztunnel.workloads().len() == in_mesh.len())
        .unwrap();
    assert!(ztunnel.violations().is_empty(), "{:?}", ztunnel.violations());
}

/// Looks rarely: what looks takes the machine's time from what is looked at.
fn wait_for(cluster: &Cluster, what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let rarely = || {
        std::thread::sleep(Duration::from_millis(20));
        done()
    };
    cluster.wait_for(what, Duration::from_secs(60), rarely).unwrap()
}

/// Whether all of them are annotated so.
fn all(cluster: &Cluster, pods: &[Pod], wanted: Option<&str>) -> bool {
    pods.iter().all(|pod| cluster.redirection(pod).as_deref() == wanted)
}

fn pods(cluster: &Cluster, namespace: &str, count: usize) -> Vec<Pod> {
    let name = |number| format!("{namespace}-{number}");
    (0..count).map(|number| cluster.pod(namespace, &name(number), Families::Dual).unwrap()).collect()
}

/// What the agent says at its end of the work it has done, per pod.
fn work(log: &str, pods: usize) -> (f64, f64, f64) {
    let line = log.lines().rfind(|line| line.contains("stopping")).unwrap();
    let number = |name: &str| -> f64 {
        let at = line.find(&format!("{name}=")).unwrap_or_else(|| panic!("no {name} in {line}"));
        let digits: String = line[at + name.len() + 1..].chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<f64>().unwrap() / pods as f64
    };
    (number("loads"), number("netlink"), number("visits"))
}

/// A full node comes up cold, half of it flips out and in by one label, and all leave. The times hold for a release
/// build on a machine that does nothing else, and are bounded with `WEIR_LONG`, which makes the node 500 pods large;
/// the work per pod always is.
#[test]
fn a_full_node_is_enrolled_and_released() {
    let long = std::env::var_os("WEIR_LONG").is_some();
    let half = if long { 250 } else { 50 };
    let mut cluster = Cluster::new().unwrap();
    cluster.namespace("shop", true);
    cluster.namespace("till", true);
    let (shop, till) = (pods(&cluster, "shop", half), pods(&cluster, "till", half));
    let count = 2 * half;
    let ztunnel = start_ztunnel(&Mesh::default()).unwrap();

    let began = Instant::now();
    cluster.start_agent().unwrap();
    wait_for(&cluster, "all are enrolled", || {
        all(&cluster, &shop, Some("enabled")) && all(&cluster, &till, Some("enabled"))
    });
    let enrolled = began.elapsed();
    let cpu = cluster.agent_cpu().unwrap();
    let patches = cluster.api.patches().len() as f64 / count as f64;
    let (loads, netlink, visits) = work(&cluster.stop_agent().unwrap(), count);
    println!(
        "{count} pods enrolled from a cold start in {enrolled:.1?} ({cpu:.1?} of processor time); per pod {loads:.2} \
         program loads, {netlink:.1} netlink requests, {visits:.1} visits to its namespace, {patches:.2} patches"
    );
    assert!(loads <= 4.1, "one object of four programs, once");
    assert!(netlink <= 80.0 && visits <= 24.0, "{netlink} {visits}");
    assert!(patches <= 1.1, "{patches} patches: `enabled`, and nothing before");

    cluster.start_agent().unwrap();
    wait_for(&cluster, "taken over", || cluster.agent_log().contains("taken over"));
    std::thread::sleep(Duration::from_secs(2));
    let flip = |in_mesh: bool, wanted: Option<&str>| {
        cluster.namespace("till", in_mesh);
        let pinned = if in_mesh { count } else { half };
        wait_for(&cluster, "half has flipped", || all(&cluster, &till, wanted) && pins() == pinned)
    };
    let (out, back) = (flip(false, None), flip(true, Some("enabled")));
    println!("{half} pods by their namespace's label: out in {out:.1?}, in again in {back:.1?}");
    assert!(all(&cluster, &shop, Some("enabled")));

    let began = Instant::now();
    cluster.namespace("shop", false);
    cluster.namespace("till", false);
    wait_for(&cluster, "all are released", || all(&cluster, &shop, None) && pins() == 0);
    println!(
        "{count} pods released in {:.1?}; then {}, {} descriptors",
        began.elapsed(),
        cluster.agent_memory().unwrap(),
        cluster.agent_descriptors().unwrap(),
    );
    assert!(cluster.agent_descriptors().unwrap() < 80, "descriptors of pods that have left");
    assert!(ztunnel.violations().is_empty(), "{:?}", ztunnel.violations());
    if long {
        assert!(enrolled < Duration::from_secs(10), "{enrolled:?}");
        assert!(out < Duration::from_secs(5) && back < Duration::from_secs(5), "{out:?} {back:?}");
    }
}

/// A large cluster, of which a node needs little: what the agent takes when nothing happens. See docs/scale.md.
#[test]
#[ignore = "takes a minute and a quiet machine, and judges the release build"]
fn a_large_cluster_costs_little() {
    const NAMESPACES: usize = 5_000;
    const ELSEWHERE: usize = 99_750;
    const HERE: usize = 250;
    const IDLE: Duration = Duration::from_secs(20);
    let mut cluster = Cluster::new().unwrap();
    for number in 0..NAMESPACES {
        let name = format!("team-{number:04}");
        let labels =
            [("kubernetes.io/metadata.name", name.as_str()), ("team", "payments"), (MODE, "ambient")];
        cluster.api.put_namespace(&name, &labels[..if number % 2 == 0 { 3 } else { 2 }]);
    }
    for number in 0..ELSEWHERE {
        cluster.api.put_pod(json!({
            "metadata": {
                "namespace": format!("team-{:04}", number % NAMESPACES),
                "name": format!("web-7d4b9c6f5-{number:06}"),
                "labels": { "app": "web", "pod-template-hash": "7d4b9c6f5" },
            },
            "spec": { "nodeName": format!("node{}", number % 400), "containers": [{ "name": "c", "image": "i" }] },
            "status": { "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }] },
        }));
    }
    cluster.namespace("shop", true);
    let pods = pods(&cluster, "shop", HERE);
    let ztunnel = start_ztunnel(&Mesh::default()).unwrap();
    cluster.start_agent().unwrap();
    wait_for(&cluster, "all are enrolled", || all(&cluster, &pods, Some("enabled")));
    println!("just enrolled: {}", cluster.agent_memory().unwrap());
    std::thread::sleep(Duration::from_secs(15));
    let before = cluster.agent_cpu().unwrap();
    std::thread::sleep(IDLE);
    let cpu = (cluster.agent_cpu().unwrap() - before).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    let memory = cluster.agent_memory().unwrap();
    println!(
        "{NAMESPACES} namespaces, {} pods, {HERE} of them here: {memory}; idle {cpu:.2} % of a core",
        ELSEWHERE + HERE
    );
    assert!(ztunnel.violations().is_empty(), "{:?}", ztunnel.violations());
    assert!(memory.all < 40 * 1024, "{memory}");
    assert!(cpu < 0.5, "{cpu} %");
}
