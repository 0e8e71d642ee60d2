//! ztunnel is replaced on a node with many pods at a thousand connections a second, again and again: the new one
//! connects before the old one leaves, and no connection fails. (The bar that Istio sets itself is 90 %.)
#![cfg(feature = "root")]

use std::time::{Duration, Instant};

use weir_tests::{
    app::App,
    cluster::{Cluster, Pod, ZDS_SOCKET},
    load::Load,
    world::{Families, addresses},
    ztunnel::{Mesh, Options, Ztunnel},
};

const APP: u16 = 8080;
const PODS: usize = 20;
const ROUNDS: usize = 3;

#[test]
fn a_rolling_update_loses_no_connection() {
    let mut cluster = Cluster::new().unwrap();
    cluster.namespace("shop", true);
    let mesh = Mesh::default();
    let start = || {
        let options = Options { mesh: mesh.clone(), zds: Some(ZDS_SOCKET.into()), ..Options::default() };
        Ztunnel::start(options).unwrap()
    };
    let mut ztunnel = start();
    cluster.start_agent().unwrap();
    let pods: Vec<(Pod, App)> = (0..PODS)
        .map(|number| {
            let pod = cluster.pod("shop", &format!("p{number}"), Families::Dual).unwrap();
            let app = App::start(&pod.host, APP).unwrap();
            mesh.join(&pod.uid, &addresses(&pod.host));
            (pod, app)
        })
        .collect();
    for (pod, _) in &pods {
        cluster.wait_redirection(pod, Some("enabled")).unwrap();
    }
    // Every pod talks to the next, fifty times a second, over both families in turn.
    let loads: Vec<Load> = (0..PODS)
        .map(|number| {
            let (from, to) = (&pods[number].0.host, &pods[(number + 1) % PODS].0.host);
            Load::start(from, vec![to.addr(false, APP), to.addr(true, APP)], 50)
        })
        .collect();
    let began = Instant::now();
    for _ in 0..ROUNDS {
        std::thread::sleep(Duration::from_millis(500));
        let new = start();
        assert!(new.wait_ready(Duration::from_secs(10)), "the new one has its snapshot");
        assert_eq!(new.workloads().len(), PODS);
        let old = std::mem::replace(&mut ztunnel, new);
        assert!(old.violations().is_empty(), "{:?}", old.violations());
        old.stop_gracefully();
    }
    std::thread::sleep(Duration::from_millis(500));
    let took = began.elapsed();
    let outcomes: Vec<_> = loads.into_iter().map(Load::stop).collect();
    let made: u64 = outcomes.iter().map(|outcome| outcome.ok).sum();
    println!("{made} connections in {took:.1?} through {PODS} pods and {ROUNDS} updates");
    let failed: Vec<_> = outcomes.iter().filter(|outcome| !outcome.failed.is_empty()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert!(made > 1000, "only {made}: nothing was tried");
    for (pod, _) in &pods {
        assert_eq!(cluster.redirection(pod).as_deref(), Some("enabled"));
    }
}
