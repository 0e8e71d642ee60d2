//! One request at a time: preconditions, subresources, pages, events.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    time::Duration,
};

use k8s_openapi::api::core::v1::{Event as CoreEvent, Node, Pod};
use kube::{
    Api, Resource as _, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, VersionMatch},
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use serde_json::{Value, json};
use weir_tests::apiserver::{ApiServer, Config};

use super::{code, pod};

#[tokio::test]
async fn a_status_patch_has_preconditions() {
    let api = ApiServer::start().await;
    let uid = api.put_pod(pod("a", "p", "n1")).metadata.uid.unwrap();
    let pods: Api<Pod> = Api::namespaced(api.client(), "a");
    let patch = |metadata: Value| {
        let body = json!({ "metadata": metadata, "spec": { "nodeName": "n9" } });
        let pods = pods.clone();
        async move { pods.patch_status("p", &PatchParams::default(), &Patch::Merge(&body)).await }
    };
    let annotated = |value: &str| json!({ "example.com/mark": value });

    let done = patch(json!({ "uid": uid, "annotations": annotated("on") })).await.unwrap();
    assert_eq!(done.annotations()["example.com/mark"], "on");
    assert_eq!(
        done.spec.as_ref().unwrap().node_name.as_deref(),
        Some("n1"),
        "status does not reach the spec"
    );
    let version = done.resource_version().unwrap();
    let again = patch(json!({ "uid": uid, "annotations": annotated("on") })).await.unwrap();
    assert_eq!(again.resource_version().unwrap(), version, "a patch that changes nothing is no write");

    let other = "00000000-0000-4000-8000-000000000000";
    assert_eq!(code(patch(json!({ "uid": other, "annotations": annotated("off") })).await), 422);
    assert_eq!(code(patch(json!({ "resourceVersion": "1", "annotations": annotated("off") })).await), 409);
    assert_eq!(code(patch(json!({ "annotations": { "example.com/mark": 1 } })).await), 422);
    assert_eq!(code(patch(json!({ "name": "q" })).await), 400);
    let pinned =
        patch(json!({ "resourceVersion": version, "annotations": { "example.com/mark": null } })).await;
    assert!(pinned.unwrap().annotations().is_empty());

    api.delete_pod("a", "p");
    let gone = patch(json!({ "uid": uid, "annotations": annotated("on") })).await.unwrap_err();
    let kube::Error::Api(status) = gone else { panic!("{gone:?}") };
    assert!(status.is_not_found() && status.code == 404 && status.is_failure());
    let details = status.details.as_ref().unwrap();
    assert_eq!((details.name.as_str(), details.kind.as_str()), ("p", "pods"));

    let codes: Vec<u16> = api.patches().iter().map(|patch| patch.code).collect();
    assert_eq!(codes, [200, 200, 422, 409, 422, 400, 200, 404]);
    assert!(api.patches().iter().all(|patch| patch.status && patch.name == "p"));
    assert_eq!(api.patches()[0].body["metadata"]["uid"], json!(uid));

    let lenient = Config { patch_uid_mismatch: 409, ..Config::default() };
    let api = ApiServer::start_with(lenient).await;
    api.put_pod(pod("a", "p", "n1"));
    let pods: Api<Pod> = Api::namespaced(api.client(), "a");
    let body = json!({ "metadata": { "uid": other } });
    assert_eq!(code(pods.patch_status("p", &PatchParams::default(), &Patch::Merge(&body)).await), 409);
    let strategic = Patch::Strategic(&body);
    assert_eq!(code(pods.patch_status("p", &PatchParams::default(), &strategic).await), 415);
}

#[tokio::test]
async fn the_main_resource_keeps_status_and_most_of_the_spec() {
    let api = ApiServer::start().await;
    api.put_namespace("a", &[]);
    let pods: Api<Pod> = Api::namespaced(api.client(), "a");
    let new: Pod = serde_json::from_value(pod("a", "p", "n1")).unwrap();
    let created = pods.create(&PostParams::default(), &new).await.unwrap();
    assert_eq!(
        created.status.as_ref().unwrap().phase.as_deref(),
        Some("Pending"),
        "status is not the creator's"
    );
    assert_eq!(created.spec.as_ref().unwrap().service_account_name.as_deref(), Some("default"));
    assert_eq!(code(pods.create(&PostParams::default(), &new).await), 409);
    let nowhere: Api<Pod> = Api::namespaced(api.client(), "nowhere");
    let stray: Pod = serde_json::from_value(pod("nowhere", "p", "n1")).unwrap();
    assert_eq!(code(nowhere.create(&PostParams::default(), &stray).await), 404);

    let body = json!({ "status": { "phase": "Running" }, "metadata": { "labels": { "x": "y" } } });
    let patched = pods.patch("p", &PatchParams::default(), &Patch::Merge(&body)).await.unwrap();
    assert_eq!(patched.labels()["x"], "y");
    assert_eq!(patched.status.as_ref().unwrap().phase.as_deref(), Some("Pending"));
    let moved = json!({ "spec": { "nodeName": "n2" } });
    assert_eq!(code(pods.patch("p", &PatchParams::default(), &Patch::Merge(&moved)).await), 422);

    // A PUT of what was read long ago is a conflict; so is one of another pod by that name.
    assert_eq!(code(pods.replace("p", &PostParams::default(), &created).await), 409);
    let mut other = patched.clone();
    other.metadata.uid = Some("other".into());
    assert_eq!(code(pods.replace("p", &PostParams::default(), &other).await), 409);
    let mut fresh = patched.clone();
    fresh.status.as_mut().unwrap().phase = Some("Running".into());
    let fresh = pods.replace_status("p", &PostParams::default(), &fresh).await.unwrap();
    assert_eq!(fresh.status.unwrap().phase.as_deref(), Some("Running"));

    let uid = |uid: &str| DeleteParams {
        preconditions: Some(kube::api::Preconditions { uid: Some(uid.into()), resource_version: None }),
        ..DeleteParams::default()
    };
    assert_eq!(code(pods.delete("p", &uid("other")).await), 409);
    pods.delete("p", &uid(created.metadata.uid.as_deref().unwrap())).await.unwrap();
    assert_eq!(code(pods.get("p").await), 404);
}

#[tokio::test]
async fn pages_show_one_version() {
    let api = ApiServer::start().await;
    for at in 0..7 {
        api.put_pod(pod("a", &format!("p{at}"), if at % 2 == 0 { "even" } else { "odd" }));
    }
    let pods: Api<Pod> = Api::all(api.client());
    let first = pods.list(&ListParams::default().limit(3)).await.unwrap();
    assert_eq!((first.items.len(), first.metadata.remaining_item_count), (3, Some(4)));
    // Neither what is deleted, nor created, nor changed since is seen by the pages to come.
    api.delete_pod("a", "p4");
    api.put_pod(pod("a", "p45", "even"));
    api.set_pod_labels("a", "p5", &[("new", "yes")]);
    let mut seen: Vec<Pod> = first.items.clone();
    let mut next = first.metadata.continue_.clone();
    while let Some(token) = next.filter(|token| !token.is_empty()) {
        let page = pods.list(&ListParams::default().limit(3).continue_token(&token)).await.unwrap();
        assert_eq!(page.metadata.resource_version, first.metadata.resource_version);
        next = page.metadata.continue_.clone();
        seen.extend(page.items);
    }
    let names: Vec<String> = seen.iter().map(|pod| pod.name_any()).collect();
    assert_eq!(names, ["p0", "p1", "p2", "p3", "p4", "p5", "p6"]);
    assert!(!seen[5].labels().contains_key("new"));

    let version = first.metadata.resource_version.unwrap();
    let then = ListParams::default().fields("spec.nodeName=even").at(&version).matching(VersionMatch::Exact);
    let then = pods.list(&then).await.unwrap();
    let even: Vec<String> = then.items.iter().map(|pod| pod.name_any()).collect();
    assert_eq!(even, ["p0", "p2", "p4", "p6"]);
    let now = pods.list(&ListParams::default().fields("spec.nodeName=even").limit(3)).await.unwrap();
    assert_eq!(now.metadata.remaining_item_count, None, "unknown with a selector");
    assert!(now.metadata.continue_.is_some());

    api.compact();
    let old = first.metadata.continue_.unwrap();
    assert_eq!(code(pods.list(&ListParams::default().limit(3).continue_token(&old)).await), 410);
    let exact = ListParams::default().at(&version).matching(VersionMatch::Exact);
    assert_eq!(code(pods.list(&exact).await), 410);
    assert!(
        pods.list(&ListParams::default().at(&version).matching(VersionMatch::NotOlderThan)).await.is_ok()
    );
    let future = ListParams::default().at("99999").matching(VersionMatch::NotOlderThan);
    assert_eq!(code(pods.list(&future).await), 504);
}

#[tokio::test]
async fn without_a_handle_there_is_no_server() {
    let api = ApiServer::start().await;
    let client = api.client();
    let other = api.clone();
    drop(api);
    assert!(client.apiserver_version().await.is_ok(), "there is another handle");
    drop(other);
    assert!(!matches!(client.apiserver_version().await, Ok(_) | Err(kube::Error::Api(_))));
}

#[tokio::test]
async fn the_recorder_creates_events() {
    let api = ApiServer::start().await;
    let pod = api.put_pod(pod("a", "p", "n1"));
    let reporter = Reporter { controller: "weir".into(), instance: Some("weir-x".into()) };
    let recorder = Recorder::new(api.client(), reporter);
    let event = |note: String| Event {
        type_: EventType::Warning,
        reason: "NotRedirected".into(),
        note: Some(note),
        action: "Redirecting".into(),
        secondary: None,
    };
    recorder.publish(&event("first".into()), &pod.object_ref(&())).await.unwrap();
    recorder.publish(&event("first".into()), &pod.object_ref(&())).await.unwrap();
    let events = api.events();
    assert_eq!(events.len(), 1, "the second time is a patch of the first");
    assert_eq!(events[0].regarding.as_ref().unwrap().uid, pod.metadata.uid);
    assert_eq!(events[0].series.as_ref().unwrap().count, 2);
    let kinds: BTreeMap<String, u16> =
        api.requests().into_keys().map(|kind| (kind.verb, kind.code)).collect();
    assert_eq!(kinds, BTreeMap::from([("create".into(), 201), ("patch".into(), 200)]));

    // The older API shows the same event in its own words.
    let core: Api<CoreEvent> = Api::namespaced(api.client(), "a");
    let shown = core.list(&ListParams::default()).await.unwrap();
    assert_eq!(shown.items[0].message.as_deref(), Some("first"));
    assert_eq!(shown.items[0].involved_object.name.as_deref(), Some("p"));

    let long = Recorder::new(api.client(), "weir".into());
    assert_eq!(code(long.publish(&event("x".repeat(1025)), &pod.object_ref(&())).await), 422);
}

#[tokio::test]
async fn failures_on_demand() {
    let api = ApiServer::start().await;
    api.put_pod(pod("a", "p", "n1"));
    let pods: Api<Pod> = Api::namespaced(api.client(), "a");
    api.fail_next_of("get", "pods", 2, 500);
    assert!(pods.list(&ListParams::default()).await.is_ok());
    assert_eq!((code(pods.get("p").await), code(pods.get("p").await)), (500, 500));
    assert!(pods.get("p").await.is_ok());

    api.fail_next(1, 429);
    let request = http_get(&api, "/api/v1/namespaces/a/pods/p").await;
    assert!(request.starts_with("HTTP/1.1 429"), "{request}");
    assert!(request.to_lowercase().contains("\r\nretry-after: 1\r\n"), "{request}");
    assert!(http_get(&api, "/readyz").await.ends_with("ok"));
    assert_eq!(pods.get("p").await.unwrap().name_any(), "p");

    api.delay(Duration::from_millis(50));
    let begun = std::time::Instant::now();
    pods.get("p").await.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(50));
    api.heal();

    let no: Api<Node> = Api::all(api.client());
    assert_eq!(code(no.get("n1").await), 404);
    assert_eq!(code(pods.list(&ListParams::default().fields("spec.hostname=x")).await), 400);
    assert!(http_get(&api, "/apis/apps/v1/deployments").await.starts_with("HTTP/1.1 404"));
    let missing = api.wait_pod("a", "p", |_| false, Duration::from_millis(10)).await.unwrap_err();
    assert!(missing.to_string().contains("a/p"), "{missing}");
}

/// One request without a client in between, to see the headers.
async fn http_get(api: &ApiServer, path: &str) -> String {
    let address = api.url().strip_prefix("http://").unwrap().to_owned();
    let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
    let exchange = move || {
        let mut stream = std::net::TcpStream::connect(address)?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        std::io::Result::Ok(answer)
    };
    tokio::task::spawn_blocking(exchange).await.unwrap().unwrap()
}

#[tokio::test]
async fn a_kubeconfig_leads_to_it() {
    let api = ApiServer::start().await;
    let config = kube::config::Kubeconfig::from_yaml(&api.kubeconfig_yaml()).unwrap();
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(config, &options).await.unwrap();
    let client = kube::Client::try_from(config).unwrap();
    assert_eq!(client.apiserver_version().await.unwrap().minor, "33");
}
