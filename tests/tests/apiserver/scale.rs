//! The API server with a whole cluster's pods: what the agent's scale tests stand on.

use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{ListParams, WatchEvent, WatchParams},
};
use serde_json::json;
use weir_tests::apiserver::ApiServer;

const PODS: usize = 100_000;
const NODES: usize = 200;

/// `cargo test -p weir-tests --test apiserver -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a quarter of a minute, and 200 MB"]
async fn a_whole_cluster() {
    let api = ApiServer::start().await;
    let begun = Instant::now();
    for at in 0..PODS {
        api.put_pod(json!({
            "metadata": {
                "namespace": format!("ns{}", at % 100), "name": format!("deployment-7d4b9c6f5-{at:06}"),
                "labels": { "app": "web", "pod-template-hash": "7d4b9c6f5", "version": "v1" },
                "annotations": { "kubernetes.io/config.source": "api" },
            },
            "spec": {
                "nodeName": format!("node{}", at % NODES),
                "containers": [{ "name": "main", "image": "registry.example.com/team/web:v1.2.3",
                                 "ports": [{ "containerPort": 8080 }], "env": [{ "name": "A", "value": "b" }] }],
            },
            "status": { "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }] },
        }));
    }
    println!("{PODS} pods written in {:?}", begun.elapsed());

    let pods: Api<Pod> = Api::all(api.client());
    let params = ListParams::default().fields("spec.nodeName=node7");
    let mut fastest = Duration::MAX;
    let mut version = String::new();
    for _ in 0..10 {
        let begun = Instant::now();
        let list = pods.list(&params).await.unwrap();
        fastest = fastest.min(begun.elapsed());
        assert_eq!(list.items.len(), PODS / NODES);
        version = list.metadata.resource_version.unwrap();
    }
    println!("one node's {} pods listed, over HTTP and parsed, in {fastest:?}", PODS / NODES);
    // Walking all pods takes an order of magnitude more; so does a server that is busy with that.
    assert!(fastest < Duration::from_millis(100), "{fastest:?}");

    let begun = Instant::now();
    let mut next: Option<String> = None;
    let mut listed = 0;
    loop {
        let mut params = ListParams::default().limit(5000);
        params.continue_token = next;
        let page = pods.list_metadata(&params).await.unwrap();
        listed += page.items.len();
        next = page.metadata.continue_.filter(|token| !token.is_empty());
        if next.is_none() {
            break;
        }
    }
    assert_eq!(listed, PODS);
    println!("all metadata listed in pages in {:?}", begun.elapsed());

    // A watch of one node amid writes elsewhere sees its own, soon.
    let params = WatchParams::default().fields("spec.nodeName=node7");
    let mut watch = pods.watch(&params, &version).await.unwrap().boxed();
    let begun = Instant::now();
    for at in 0..2000 {
        let name = format!("deployment-7d4b9c6f5-{at:06}");
        api.set_pod_labels(&format!("ns{}", at % 100), &name, &[("touched", "yes")]);
    }
    let wrote = begun.elapsed();
    for _ in 0..2000 / NODES {
        match watch.try_next().await.unwrap().unwrap() {
            WatchEvent::Modified(pod) => assert!(pod.labels().contains_key("touched")),
            other => panic!("{other:?}"),
        }
    }
    println!(
        "2000 pods changed in {wrote:?}, the watch was through with its own after {:?}",
        begun.elapsed()
    );
}
