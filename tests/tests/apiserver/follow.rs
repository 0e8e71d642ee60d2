//! Reflectors: they end up with what there is, whatever happens on the way.

use std::{collections::BTreeSet, hash::Hash, time::Duration};

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, ResourceExt,
    api::{WatchEvent, WatchParams},
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt,
        reflector::{self, ObjectRef, Store},
        utils::Backoff,
        watcher,
    },
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::json;
use tokio::task::JoinHandle;
use weir_tests::apiserver::{ApiServer, Config, Outage};

use super::{SOON, code, pod};

/// The same short pause each time: a test has no time for more.
#[derive(Clone)]
struct Soon;

impl Iterator for Soon {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(5))
    }
}

impl Backoff for Soon {
    fn reset(&mut self) {}
}

/// A task that ends with its test.
struct Follow(JoinHandle<()>);

impl Drop for Follow {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Follows the pods of a node, as the agent does.
fn follow_pods(api: &ApiServer, node: &str, strategy: watcher::InitialListStrategy) -> (Store<Pod>, Follow) {
    let (reader, writer) = reflector::store();
    let config = watcher::Config {
        field_selector: Some(format!("spec.nodeName={node}")),
        initial_list_strategy: strategy,
        ..watcher::Config::default()
    };
    // With the retries it has by default, as the agent's.
    let client = kube::Client::try_from(kube::Config::new(api.url().parse().unwrap())).unwrap();
    let events = watcher(Api::<Pod>::all(client), config).backoff(Soon);
    let following = reflector::reflector(writer, events).for_each(|_| async {});
    (reader, Follow(tokio::spawn(following)))
}

fn follow_namespaces(api: &ApiServer) -> (Store<PartialObjectMeta<Namespace>>, Follow) {
    let (reader, writer) = reflector::store();
    let events = watcher(Api::<PartialObjectMeta<Namespace>>::all(api.client()), watcher::Config::default())
        .backoff(Soon);
    let following = reflector::reflector(writer, events).for_each(|_| async {});
    (reader, Follow(tokio::spawn(following)))
}

/// Waits until a reflector's store is as wanted. It has no event for that, so this looks often.
async fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let looking = async {
        while !wanted() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    if tokio::time::timeout(SOON, looking).await.is_err() {
        panic!("not within {SOON:?}: {what}");
    }
}

async fn ready<K>(store: &Store<K>)
where
    K: reflector::Lookup + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    tokio::time::timeout(SOON, store.wait_until_ready()).await.expect("the first list ends").unwrap();
}

fn names(store: &Store<Pod>) -> Vec<String> {
    let mut names: Vec<String> = store.state().iter().map(|pod| pod.name_any()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reflector_follows_the_pods_of_a_node() {
    for strategy in [watcher::InitialListStrategy::ListWatch, watcher::InitialListStrategy::StreamingList] {
        let api = ApiServer::start().await;
        api.put_pod(pod("a", "first", "n1"));
        api.put_pod(pod("a", "elsewhere", "n2"));
        let (store, _following) = follow_pods(&api, "n1", strategy.clone());
        ready(&store).await;
        assert_eq!(names(&store), ["first"], "{strategy:?}");

        api.put_pod(pod("b", "second", "n1"));
        api.put_pod(pod("b", "other", "n2"));
        until("created", || names(&store) == ["first", "second"]).await;
        api.set_pod_labels("a", "first", &[("ambient", "yes")]);
        let first = ObjectRef::new("first").within("a");
        let label = |key: &str| store.get(&first).and_then(|pod| pod.labels().get(key).cloned());
        until("labelled", || label("ambient").is_some() && label("app").is_none()).await;
        // Enters and leaves the selection, while it exists all the time.
        api.merge_pod("b", "other", &json!({ "spec": { "nodeName": "n1" } }));
        until("moved in", || names(&store) == ["first", "other", "second"]).await;
        api.merge_pod("b", "other", &json!({ "spec": { "nodeName": "n3" } }));
        until("moved out", || names(&store) == ["first", "second"]).await;
        api.delete_pod("a", "first");
        until("deleted", || names(&store) == ["second"]).await;
        // One list or one stream: nothing made the client start over.
        let lists = u64::from(strategy == watcher::InitialListStrategy::ListWatch);
        assert_eq!((api.request_count("list", "pods"), api.request_count("watch", "pods")), (lists, 1));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_metadata_reflector_follows_namespaces() {
    let api = ApiServer::start().await;
    let (store, _following) = follow_namespaces(&api);
    ready(&store).await;
    let label = |name: &str| {
        store.get(&ObjectRef::new(name)).map(|one| one.labels().get("istio.io/dataplane-mode").cloned())
    };
    assert_eq!(label("default"), Some(None));
    api.put_namespace("mesh", &[("istio.io/dataplane-mode", "ambient")]);
    until("created", || label("mesh") == Some(Some("ambient".into()))).await;
    api.set_namespace_labels("mesh", &[]);
    until("unlabelled", || label("mesh") == Some(None)).await;
    let mesh = store.get(&ObjectRef::new("mesh")).unwrap();
    assert_eq!(mesh.labels().get("kubernetes.io/metadata.name").map(String::as_str), Some("mesh"));
    assert_eq!(mesh.types.as_ref().unwrap().kind, "PartialObjectMetadata");
    api.delete_namespace("mesh");
    until("deleted", || label("mesh").is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reflector_survives_cut_watches() {
    let api = ApiServer::start().await;
    let (store, _following) = follow_pods(&api, "n1", watcher::InitialListStrategy::ListWatch);
    ready(&store).await;
    for round in 1..=3 {
        api.wait_for(SOON, |api| (api.request_count("watch", "pods") >= round).then_some(())).await.unwrap();
        api.drop_watches();
        api.put_pod(pod("a", &format!("p{round}"), "n1"));
        until("written around a cut", || store.len() == usize::try_from(round).unwrap()).await;
    }
    // It went on from where it was.
    assert_eq!(api.request_count("list", "pods"), 1);
    assert!(api.request_count("watch", "pods") >= 4, "{:?}", api.requests());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reflector_lists_again_when_history_is_gone() {
    let api = ApiServer::start().await;
    api.put_pod(pod("a", "stays", "n1"));
    api.put_pod(pod("a", "goes", "n1"));
    let (store, _following) = follow_pods(&api, "n1", watcher::InitialListStrategy::ListWatch);
    until("listed", || store.len() == 2).await;
    api.wait_for(SOON, |api| (api.request_count("watch", "pods") == 1).then_some(())).await.unwrap();
    // While the client is away, things happen that nobody remembers.
    api.fail_all(Some(Outage::Refuse));
    api.delete_pod("a", "goes");
    api.put_pod(pod("a", "comes", "n1"));
    api.compact();
    api.fail_all(None);
    until("relisted", || names(&store) == ["comes", "stays"]).await;
    assert_eq!(api.request_count("list", "pods"), 2, "{:?}", api.requests());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reflector_survives_outages() {
    let api = ApiServer::start().await;
    let (store, _following) = follow_pods(&api, "n1", watcher::InitialListStrategy::ListWatch);
    ready(&store).await;
    let url = api.url();
    let address: std::net::SocketAddr = url.strip_prefix("http://").unwrap().parse().unwrap();
    for (round, outage) in [Outage::Refuse, Outage::Close, Outage::Status(503)].into_iter().enumerate() {
        let watches = api.request_count("watch", "pods");
        api.fail_all(Some(outage));
        api.put_pod(pod("a", &format!("p{round}"), "n1"));
        let client = api.client();
        let fresh =
            tokio::time::timeout(SOON, client.apiserver_version()).await.expect("it fails, or answers");
        match outage {
            Outage::Refuse => {
                let refused = std::net::TcpStream::connect(address).unwrap_err();
                assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
                assert!(!matches!(fresh, Ok(_) | Err(kube::Error::Api(_))), "{fresh:?}");
            }
            Outage::Close => assert!(!matches!(fresh, Ok(_) | Err(kube::Error::Api(_))), "{fresh:?}"),
            Outage::Status(status) => assert_eq!(code(fresh), status),
        }
        assert_eq!(store.len(), round, "nothing comes through an outage: {outage:?}");
        api.fail_all(None);
        until("after an outage", || store.len() == round + 1).await;
        assert_eq!(api.url(), url);
        assert!(api.request_count("watch", "pods") > watches);
    }
    assert_eq!(api.request_count("list", "pods"), 1, "an outage alone loses no history");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recreated_pod_is_another_one() {
    let api = ApiServer::start().await;
    let first = api.put_pod(pod("a", "p", "n1"));
    let again = api.put_pod(pod("a", "p", "n2"));
    assert_eq!(again.metadata.uid, first.metadata.uid, "written again, it stays itself");
    let start = api.resource_version();
    let mut other = pod("a", "p", "n1");
    other["metadata"]["uid"] = "another".into();
    api.put_pod(other);
    let pods: Api<Pod> = Api::all(api.client());
    let watch = pods.watch(&WatchParams::default().timeout(30), &start.to_string()).await.unwrap();
    let told: Vec<String> = watch
        .take(2)
        .map(|event| match event.unwrap() {
            WatchEvent::Deleted(pod) => format!("deleted {}", pod.uid().unwrap()),
            WatchEvent::Added(pod) => format!("added {}", pod.uid().unwrap()),
            other => panic!("{other:?}"),
        })
        .collect()
        .await;
    assert_eq!(told, [format!("deleted {}", first.uid().unwrap()), "added another".into()]);
}

/// Whatever happens between client and server, in the end the client has what the server has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reflector_ends_up_right() {
    let seed = rand::random();
    let mut rng = StdRng::seed_from_u64(seed);
    let api = ApiServer::start_with(Config { history: 20, ..Config::default() }).await;
    for strategy in [watcher::InitialListStrategy::ListWatch, watcher::InitialListStrategy::StreamingList] {
        let (store, _following) = follow_pods(&api, "n1", strategy);
        for _ in 0..400 {
            let name = format!("p{}", rng.random_range(0..30));
            match rng.random_range(0..40) {
                0 => api.drop_watches(),
                1 => api.compact(),
                2 => api.fail_all(Some(Outage::Refuse)),
                3 => api.fail_all(Some(Outage::Close)),
                4 => api.fail_next_of("watch", "pods", 2, 500),
                5 => api.fail_next_of("list", "pods", 1, 410),
                6..10 => api.fail_all(None),
                // Lets the client come in between.
                10..20 => tokio::time::sleep(Duration::from_millis(1)).await,
                20..24 => {
                    api.delete_pod("a", &name);
                }
                _ => {
                    let node = if rng.random_bool(0.6) { "n1" } else { "n2" };
                    let mut pod = pod("a", &name, node);
                    pod["metadata"]["labels"]["round"] = rng.random_range(0..1000).to_string().into();
                    api.put_pod(pod);
                }
            }
        }
        api.heal();
        let state = |pods: &mut dyn Iterator<Item = &Pod>| -> BTreeSet<(String, Option<String>)> {
            pods.map(|pod| (pod.name_any(), pod.resource_version())).collect()
        };
        let on_node =
            |pod: &&Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.as_deref() == Some("n1"));
        let want = state(&mut api.pods().iter().filter(on_node));
        let what = format!("the server's state, seed {seed}: {want:?}");
        until(&what, || state(&mut store.state().iter().map(|pod| &**pod)) == want).await;
    }
}
