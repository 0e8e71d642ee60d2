//! ztunnel is replaced on a node with many pods at a thousand connections a second, again and again: the new one
//! connects before the old one leaves, and no connection fails. (The bar that Istio sets itself is 90 %.)
#![cfg(feature = "root")]

use std::time::{Duration, Instant};

use weir_tests::{
    app::App,
    cluster::{Cluster, Pod},
    meshed::{none_failed, start_ztunnel, talk_in_a_ring},
    world::Host,
    ztunnel::Mesh,
};

const APP: u16 = 8080;
const PODS: usize = 20;
const ROUNDS: usize = 3;

#[test]
fn a_rolling_update_loses_no_connection() {
    let mut cluster = Cluster::new().unwrap();
    cluster.namespace("shop", true);
    let mesh = Mesh::default();
    let start = || start_ztunnel(&mesh).unwrap();
    let mut ztunnel = start();
    cluster.start_agent().unwrap();
    let pods: Vec<(Pod, App)> = (0..PODS)
        .map(|number| cluster.meshed_app(&mesh, "shop", &format!("p{number}"), APP).unwrap())
        .collect();
    for (pod, _) in &pods {
        cluster.wait_redirection(pod, Some("enabled")).unwrap();
    }
    // Every pod talks to the next, fifty times a second, over both families in turn.
    let hosts: Vec<&Host> = pods.iter().map(|(pod, _)| &pod.host).collect();
    let loads = talk_in_a_ring(&hosts, APP, 50);
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
    let made = none_failed(loads);
    println!("{made} connections in {took:.1?} through {PODS} pods and {ROUNDS} updates");
    assert!(made > 1000, "only {made}: nothing was tried");
    for (pod, _) in &pods {
        assert_eq!(cluster.redirection(pod).as_deref(), Some("enabled"));
    }
}
