//! Watches: what they tell, where they start and how they end.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{WatchEvent, WatchParams},
};
use weir_tests::apiserver::{ApiServer, Config};

use super::{SOON, pod};

#[tokio::test]
async fn watches_tell_what_they_are_asked_for() {
    let config = Config { bookmark_every: Duration::from_millis(20), history: 4, ..Config::default() };
    let api = ApiServer::start_with(config).await;
    let pods: Api<Pod> = Api::all(api.client());
    let start = api.resource_version();
    let params = WatchParams::default().labels("app in (p, q),!hidden").timeout(30);
    let mut watch = pods.watch(&params, &start.to_string()).await.unwrap().boxed();
    api.put_pod(pod("a", "other", "n1"));
    let created = api.put_pod(pod("a", "p", "n1"));
    api.set_pod_labels("a", "p", &[("app", "q")]);
    api.set_pod_labels("a", "p", &[("app", "q"), ("hidden", "")]);
    let mut told = Vec::new();
    while told.len() < 4 {
        match watch.try_next().await.unwrap().unwrap() {
            WatchEvent::Added(pod) => told.push(("added", pod)),
            WatchEvent::Modified(pod) => told.push(("modified", pod)),
            WatchEvent::Deleted(pod) => told.push(("deleted", pod)),
            // It moves on, though nothing here happens: once all is told.
            WatchEvent::Bookmark(mark) if told.len() == 3 => {
                assert_eq!(mark.metadata.resource_version, api.resource_version().to_string());
                assert_eq!(mark.types.kind, "Pod");
                told.push(("bookmark", Pod::default()));
            }
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(error) => panic!("{error}"),
        }
    }
    let kinds: Vec<&str> = told.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, ["added", "modified", "deleted", "bookmark"]);
    assert_eq!(told[0].1.resource_version(), created.resource_version());
    // What left is shown as it was last seen, at the version at which it left.
    assert!(!told[2].1.labels().contains_key("hidden"));
    assert_eq!(told[2].1.resource_version(), api.pod("a", "p").unwrap().resource_version());

    // The namespaces and pods of before are beyond the window of four changes by now.
    api.put_pod(pod("a", "r", "n1"));
    let mut late = pods.watch(&params, &start.to_string()).await.unwrap().boxed();
    match late.try_next().await.unwrap() {
        Some(WatchEvent::Error(error)) => assert_eq!((error.code, error.reason.as_str()), (410, "Expired")),
        other => panic!("{other:?}"),
    }
    assert!(late.try_next().await.unwrap().is_none(), "nothing follows");

    let short = WatchParams::default().timeout(1);
    let ends = pods.watch(&short, &api.resource_version().to_string()).await.unwrap();
    let last: Vec<_> = tokio::time::timeout(SOON, ends.try_collect()).await.expect("it ends").unwrap();
    assert!(matches!(last.last(), Some(WatchEvent::Bookmark(_))), "{last:?}");
}

#[tokio::test]
async fn a_running_watch_outlives_compaction() {
    let api = ApiServer::start().await;
    let pods: Api<Pod> = Api::all(api.client());
    let version = api.resource_version().to_string();
    let mut watch = pods.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    // Of another kind: the watch has missed nothing, though its version is forgotten.
    api.put_namespace("b", &[]);
    api.compact();
    api.put_pod(pod("b", "p", "n1"));
    assert!(matches!(watch.try_next().await.unwrap(), Some(WatchEvent::Added(_))));
    // A new one cannot know that.
    let mut late = pods.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    match late.try_next().await.unwrap() {
        Some(WatchEvent::Error(error)) => assert_eq!(error.code, 410),
        other => panic!("{other:?}"),
    }
}

/// Neither the deadline nor a cut waits until there is nothing more to tell.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_watch_ends() {
    // It shall not end for being slow.
    let api = ApiServer::start_with(Config { history: 10_000_000, ..Config::default() }).await;
    api.put_pod(pod("a", "p", "n1"));
    let writing = {
        let api = api.clone();
        tokio::spawn(async move {
            for round in 0_u64.. {
                api.set_pod_labels("a", "p", &[("round", &round.to_string())]);
                tokio::task::yield_now().await;
            }
        })
    };
    let pods: Api<Pod> = Api::all(api.client());
    let version = || api.resource_version().to_string();
    let short = pods.watch(&WatchParams::default().timeout(1), &version()).await.unwrap();
    let told: Vec<_> = tokio::time::timeout(SOON, short.try_collect()).await.expect("it ends").unwrap();
    assert!(told.len() > 10 && matches!(told.last(), Some(WatchEvent::Bookmark(_))));

    let mut long = pods.watch(&WatchParams::default(), &version()).await.unwrap().boxed();
    long.try_next().await.unwrap();
    api.drop_watches();
    let ending = async { while let Ok(Some(_)) = long.try_next().await {} };
    tokio::time::timeout(SOON, ending).await.expect("it is cut");
    writing.abort();
}
