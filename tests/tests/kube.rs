//! The agent's side of the Kubernetes API, over real HTTP.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle, time::sleep};
use weir_agent::{
    cache::pods::{Pods, Source},
    domain::{
        config::AgentConfig,
        eligibility::Decision,
        enrolment::Step,
        notice::{Notice, What},
        reason::{Failure, Reason},
        workload::{Annotated, Pod, PodUid, Redirection},
    },
    kube::{annotate::Patcher, events},
};
use weir_tests::apiserver::{ApiServer, Config, Outage};

const NODE: &str = "n1";
const AMBIENT: &[(&str, &str)] = &[("istio.io/dataplane-mode", "ambient")];

fn pod(name: &str, node: &str) -> Value {
    json!({
        "metadata": { "namespace": "app", "name": name },
        "spec": { "nodeName": node, "serviceAccountName": "sa", "containers": [{ "name": "c", "image": "i" }] },
        "status": { "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }, { "ip": "fd00::1" }] },
    })
}

/// A cache that is being filled from a server.
struct Rig {
    api: ApiServer,
    cache: Arc<Pods>,
    running: JoinHandle<()>,
}

impl Rig {
    async fn new() -> Self {
        let api = ApiServer::start().await;
        Self::with(api)
    }

    fn with(api: ApiServer) -> Self {
        let config = AgentConfig { node_name: NODE.into(), ..AgentConfig::default() };
        let cache = Arc::new(Pods::new(config.policy()));
        // With the retries it has by default.
        let client = kube::Client::try_from(kube::Config::new(api.url().parse().unwrap())).unwrap();
        let running = tokio::spawn(weir_agent::kube::run(client, config, Arc::clone(&cache)));
        Self { api, cache, running }
    }

    async fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        for _ in 0..3000 {
            if done(self) {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("never: {what}; {:?} {:#?}", self.cache.sync(), self.cache.list());
    }

    fn named(&self, name: &str) -> Option<(Arc<Pod>, Decision)> {
        let all = self.cache.list().into_iter();
        all.map(|entry| (entry.pod, entry.decision)).find(|(pod, _)| pod.info.name == name)
    }

    fn decision(&self, name: &str) -> Option<Decision> {
        self.named(name).map(|(_, decision)| decision)
    }

    fn uid(&self, name: &str) -> Option<PodUid> {
        self.named(name).map(|(pod, _)| pod.uid.clone())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.running.abort();
    }
}

const OUT: Option<Decision> = Some(Decision::Leave(Reason::NotSelected));
const IN: Option<Decision> = Some(Decision::Enrol);

#[tokio::test]
async fn the_cache_has_this_nodes_pods_and_follows_labels() {
    let rig = Rig::new().await;
    rig.api.put_namespace("app", &[]);
    rig.api.put_pod(pod("a", NODE));
    rig.api.put_pod(pod("elsewhere", "n2"));
    rig.cache.synced().await;
    rig.until("listed", |rig| rig.decision("a") == OUT).await;
    let (seen, _) = rig.named("a").unwrap();
    assert_eq!((seen.info.service_account.as_str(), seen.ips.len()), ("sa", 2));
    assert!(seen.version > 0);
    assert_eq!(rig.cache.list().len(), 1);

    rig.api.set_namespace_labels("app", AMBIENT);
    rig.until("the namespace's label", |rig| rig.decision("a") == IN).await;
    rig.api.set_pod_labels("app", "a", &[("istio.io/dataplane-mode", "none")]);
    rig.until("the pod's label", |rig| rig.decision("a") == OUT).await;
    rig.api.set_pod_labels("app", "a", &[]);
    rig.until("no label", |rig| rig.decision("a") == IN).await;
    rig.api.merge_pod("app", "a", &json!({"status": {"phase": "Succeeded"}}));
    rig.until("ended", |rig| rig.decision("a") == Some(Decision::Leave(Reason::Terminal))).await;
    rig.api.delete_pod("app", "a");
    rig.until("deleted", |rig| rig.cache.list().is_empty()).await;
}

#[tokio::test]
async fn what_happened_while_the_watch_was_broken_is_found_out() {
    let rig = Rig::new().await;
    rig.api.put_namespace("app", AMBIENT);
    for name in ["stays", "goes", "replaced"] {
        rig.api.put_pod(pod(name, NODE));
    }
    rig.until("three", |rig| rig.cache.list().len() == 3 && rig.decision("goes") == IN).await;
    let before = rig.uid("replaced");

    rig.api.fail_all(Some(Outage::Refuse));
    rig.api.delete_pod("app", "goes");
    rig.api.delete_pod("app", "replaced");
    rig.api.put_pod(pod("replaced", NODE));
    rig.api.put_pod(pod("new", NODE));
    rig.api.compact();
    rig.until("noticed", |rig| rig.cache.sync().pods.error.is_some()).await;
    assert!(rig.cache.sync().complete(), "an old cache is still a cache");
    assert_eq!((rig.decision("goes"), rig.decision("stays")), (IN, IN));

    rig.api.fail_all(None);
    rig.until("the deletion inferred", |rig| rig.decision("goes").is_none()).await;
    rig.until("the new one there", |rig| rig.decision("new") == IN).await;
    rig.until("well again", |rig| rig.cache.sync().pods.error.is_none()).await;
    assert_ne!(rig.uid("replaced"), before);
    assert_eq!(rig.cache.list().len(), 3);
}

#[tokio::test]
async fn a_dropped_watch_is_taken_up_where_it_was() {
    let rig = Rig::new().await;
    rig.api.put_namespace("app", AMBIENT);
    rig.api.put_pod(pod("a", NODE));
    rig.until("one", |rig| rig.decision("a") == IN).await;
    let lists = rig.api.request_count("list", "pods");
    for round in 0..3 {
        rig.api.drop_watches();
        rig.api.put_pod(pod(&format!("b{round}"), NODE));
        rig.until("the next", |rig| rig.decision(&format!("b{round}")) == IN).await;
    }
    assert_eq!(rig.api.request_count("list", "pods"), lists, "nothing was listed again");
}

#[tokio::test]
async fn a_server_in_trouble_at_the_start_is_waited_for() {
    let api = ApiServer::start().await;
    api.put_namespace("app", AMBIENT);
    api.put_pod(pod("a", NODE));
    api.fail_next_of("list", "pods", 1, 403);
    api.fail_next_of("list", "namespaces", 1, 500);
    let rig = Rig::with(api);
    rig.until("told", |rig| rig.cache.sync().pods.error.is_some()).await;
    let error = rig.cache.sync().pods.error.unwrap();
    assert!(error.contains("ClusterRole") && error.lines().count() == 1, "{error}");
    rig.cache.synced().await;
    assert_eq!(rig.decision("a"), IN);
    assert!(!rig.cache.report(Source::Pods, None), "no error is left");
}

/// A pod as the server has it now.
async fn annotated(value: Option<&str>) -> (ApiServer, Pod) {
    annotated_on(Config::default(), value).await
}

async fn annotated_on(config: Config, value: Option<&str>) -> (ApiServer, Pod) {
    let rig = Rig::with(ApiServer::start_with(config).await);
    let mut new = pod("a", NODE);
    if let Some(value) = value {
        new["metadata"]["annotations"]["ambient.istio.io/redirection"] = value.into();
    }
    rig.api.put_namespace("app", &[]);
    rig.api.put_pod(new);
    rig.until("seen", |rig| rig.named("a").is_some()).await;
    (rig.api.clone(), (*rig.named("a").unwrap().0).clone())
}

fn says(api: &ApiServer) -> Option<String> {
    let annotations = api.pod("app", "a").unwrap().metadata.annotations.unwrap_or_default();
    annotations.get("ambient.istio.io/redirection").cloned()
}

#[tokio::test]
async fn the_annotation_is_written_and_removed_and_nothing_else_is() {
    let (api, pod) = annotated(Some("enabled")).await;
    assert_eq!(pod.redirection, Some(Redirection::Enabled));
    api.merge_pod("app", "a", &json!({"metadata": {"annotations": {"other": "stays"}}}));
    let patcher = Patcher::new(api.client());
    let mut versions = vec![pod.version];
    for (value, expected) in [
        (Some(Redirection::Pending), Some("pending")),
        (Some(Redirection::Enabled), Some("enabled")),
        (None, None),
    ] {
        let Annotated::Done { version } = patcher.set(&pod, value).await.unwrap() else { panic!("gone") };
        versions.push(version);
        assert_eq!(says(&api).as_deref(), expected);
    }
    assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
    assert_eq!(api.pod("app", "a").unwrap().metadata.annotations.unwrap()["other"], "stays");
    assert!(
        api.patches().iter().all(|patch| patch.status && patch.body["metadata"]["uid"] == pod.uid.as_str())
    );
}

#[tokio::test]
async fn a_successor_is_never_annotated() {
    for patch_uid_mismatch in [409, 422] {
        let (api, pod) = annotated_on(Config { patch_uid_mismatch, ..Config::default() }, None).await;
        let patcher = Patcher::new(api.client());
        api.delete_pod("app", "a");
        assert_eq!(patcher.set(&pod, Some(Redirection::Enabled)).await, Ok(Annotated::Gone));
        api.put_pod(self::pod("a", NODE));
        assert_eq!(patcher.set(&pod, Some(Redirection::Enabled)).await, Ok(Annotated::Gone));
        assert_eq!(says(&api), None);
    }
}

#[tokio::test]
async fn a_refused_patch_is_a_failure_that_says_why() {
    let (api, pod) = annotated(None).await;
    let patcher = Patcher::new(api.client());
    for (code, word) in [(500, ""), (403, "ClusterRole"), (409, ""), (422, "")] {
        api.fail_next_of("patch", "pods/status", 1, code);
        let failure = patcher.set(&pod, Some(Redirection::Enabled)).await.unwrap_err();
        assert_eq!(failure.reason, Reason::AnnotateFailed, "{code}");
        assert!(failure.detail.contains(word) && failure.detail.lines().count() == 1, "{failure}");
    }
    assert!(matches!(patcher.set(&pod, Some(Redirection::Enabled)).await, Ok(Annotated::Done { .. })));
}

#[tokio::test]
async fn notices_become_events_of_the_pod() {
    let (api, pod) = annotated(None).await;
    let (tell, notices) = mpsc::channel(8);
    let config = AgentConfig { pod_name: Some("weir-x".into()), ..AgentConfig::default() };
    let running = tokio::spawn(events::run(api.client(), config, notices));
    let pod = Arc::new(pod);
    let failure = Failure::new(Reason::NoZtunnel, "no ztunnel is connected");
    api.fail_next_of("create", "events", 1, 500);
    for what in [
        What::Repaired,
        What::Enrolled { old_connections: 2 },
        What::Stuck { step: Step::Publish, failure: failure.clone() },
        What::Stuck { step: Step::Publish, failure },
    ] {
        tell.send(Notice { pod: Arc::clone(&pod), what }).await.unwrap();
    }
    drop(tell);
    running.await.unwrap();
    let events = api.events();
    let told: Vec<_> = events.iter().map(|event| event.reason.as_deref().unwrap()).collect();
    // The first met a server in trouble; the last two are one, told twice.
    assert_eq!(told, ["Enrolled", "EnrolmentFailed"]);
    let regarding = events[0].regarding.as_ref().unwrap();
    assert_eq!(regarding.uid.as_deref(), Some(pod.uid.as_str()));
    assert_eq!(events[0].reporting_instance.as_deref(), Some("weir-x"));
    assert!(events[1].note.as_deref().unwrap().contains("no_ztunnel"));
    assert_eq!(events[1].series.as_ref().map(|series| series.count), Some(2));
}
