//! Requests in, responses out.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard},
    time::Instant,
};

use axum::{
    body::{Body, to_bytes},
    extract::{Query, Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::stream;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    Config, PatchRecord, RequestKind,
    error::ApiError,
    faults::Faults,
    object::{Key, Object, Shape},
    patch::Door,
    query::{self, Params},
    resource::{Resource, Route},
    store::{ListQuery, Page, Store},
    watch::{Watch, error_event},
    writes,
};

/// Largest body taken, as in a real server.
const BODY: usize = 3 << 20;
/// How many objects of a list are put into text at a time.
const CHUNK: usize = 500;

/// What all requests share.
pub(super) struct Shared {
    pub config: Config,
    store: RwLock<Store>,
    /// Tells watches of the newest version.
    pub written: watch::Sender<u64>,
    /// Tells watches to end, by changing.
    pub cuts: watch::Sender<u64>,
    /// Changes with every write and every request answered.
    pub activity: watch::Sender<u64>,
    pub faults: Faults,
    pub requests: Mutex<BTreeMap<RequestKind, u64>>,
    pub patches: Mutex<Vec<PatchRecord>>,
}

impl Shared {
    pub(super) fn new(config: Config) -> Self {
        Self {
            store: RwLock::new(Store::new(config.history)),
            config,
            written: watch::Sender::new(0),
            cuts: watch::Sender::new(0),
            activity: watch::Sender::new(0),
            faults: Faults::default(),
            requests: Mutex::default(),
            patches: Mutex::default(),
        }
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, Store> {
        self.store.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a write, and tells who watches.
    pub(super) fn write<T>(&self, write: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.store.write().unwrap_or_else(PoisonError::into_inner);
        let before = store.version();
        let result = write(&mut store);
        let after = store.version();
        drop(store);
        if after != before {
            self.written.send_replace(after);
            self.active();
        }
        result
    }

    fn active(&self) {
        self.activity.send_modify(|count| *count += 1);
    }

    fn count(&self, verb: &str, resource: &str, code: u16) {
        let kind = RequestKind { verb: verb.into(), resource: resource.into(), code };
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry(kind).or_default() += 1;
        self.active();
    }
}

/// Answers one request.
pub(super) async fn handle(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    // Before anything else: a request let in before a cut is cut.
    let cuts = shared.cuts.subscribe();
    let delay = shared.faults.delay();
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    let route = Route::parse(request.uri().path());
    let params = match Query::<Vec<(String, String)>>::try_from_uri(request.uri()) {
        Ok(Query(pairs)) => Params::new(pairs),
        Err(error) => return failure(&ApiError::bad_request(error.to_string())),
    };
    let verb = verb(request.method(), route.as_ref(), &params);
    let resource = route.as_ref().map_or_else(String::new, |route| {
        format!("{}{}", route.resource.plural(), if route.status { "/status" } else { "" })
    });
    let answer = match (shared.faults.strike(verb, &resource), route) {
        (Some(code), _) => Err(ApiError::injected(code)),
        (None, None) => elsewhere(request.uri().path()),
        (None, Some(route)) => serve(&shared, route, verb, &params, request, cuts).await,
    };
    let response = answer.unwrap_or_else(|error| failure(&error));
    shared.count(verb, &resource, response.status().as_u16());
    response
}

fn verb(method: &Method, route: Option<&Route>, params: &Params) -> &'static str {
    let one = route.is_none_or(|route| route.name.is_some());
    match (method.as_str(), one) {
        ("GET", true) => "get",
        ("GET", false) if params.is_watch() => "watch",
        ("GET", false) => "list",
        ("POST", false) => "create",
        ("PUT", true) => "update",
        ("PATCH", true) => "patch",
        ("DELETE", true) => "delete",
        _ => "",
    }
}

/// What is not a resource.
fn elsewhere(path: &str) -> Result<Response, ApiError> {
    match path.trim_end_matches('/') {
        "/readyz" | "/livez" | "/healthz" => Ok("ok".into_response()),
        "/version" => Ok(json_response(
            StatusCode::OK,
            &json!({
                "major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "", "gitTreeState": "clean",
                "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "linux/amd64",
            }),
        )),
        _ => Err(ApiError::no_such_path()),
    }
}

async fn serve(
    shared: &Arc<Shared>,
    route: Route,
    verb: &str,
    params: &Params,
    request: Request,
    cuts: watch::Receiver<u64>,
) -> Result<Response, ApiError> {
    let resource = route.resource;
    let accept = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let shape = query::shape(accept, verb == "list")?;
    let key =
        Key::new(route.namespace.as_deref().unwrap_or_default(), route.name.as_deref().unwrap_or_default());
    if params.is_dry_run() {
        return Err(ApiError::bad_request("dry runs are not served"));
    }
    let door = if route.status { Door::Status } else { Door::Main };
    let answer = |code, object: &Object, version| object_response(code, object, resource, shape, version);
    match verb {
        "get" => {
            let object = shared.read().get(resource, &key).cloned();
            let object = object.ok_or_else(|| ApiError::not_found(resource, &key.name))?;
            Ok(answer(StatusCode::OK, &object, object.version))
        }
        "list" => {
            let list = params.list(&route)?;
            let store = shared.read();
            if list.at_least > store.version() {
                return Err(ApiError::too_large(list.at_least, store.version()));
            }
            let (at, after, limit) = (list.at, list.after, list.limit);
            let page = store.list(&ListQuery { resource, filter: &list.filter, at, after, limit })?;
            drop(store);
            Ok(list_response(page, resource, shape))
        }
        "watch" => {
            let asked = params.watch(&route)?;
            let body = match Watch::new(shared.clone(), resource, asked, shape, cuts) {
                Ok(watch) => watch.into_body(),
                // Asked well, but not to be had: said in the stream, as a real server does.
                Err(error) => error_event(&error).into(),
            };
            Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
        }
        "create" => {
            let body = json_body(request, &["application/json"]).await?;
            if resource.namespaced() && route.namespace.is_none() {
                return Err(ApiError::with_code(405, "objects of this kind are created in a namespace"));
            }
            let namespace = route.namespace.as_deref();
            let object = shared.write(|store| writes::create(store, resource, namespace, body))?;
            Ok(answer(StatusCode::CREATED, &object, object.version))
        }
        "update" => {
            let body = json_body(request, &["application/json"]).await?;
            let object = shared.write(|store| writes::replace(store, resource, &key, door, body))?;
            Ok(answer(StatusCode::OK, &object, object.version))
        }
        "patch" => {
            let body = json_body(request, &["application/merge-patch+json"]).await?;
            let mismatch = shared.config.patch_uid_mismatch;
            let at = Instant::now();
            let done = shared.write(|store| writes::merge(store, resource, &key, door, &body, mismatch));
            let record = PatchRecord {
                at,
                resource: resource.plural().into(),
                namespace: (*key.namespace).into(),
                name: (*key.name).into(),
                status: route.status,
                code: done.as_ref().map_or_else(|error| error.code, |_| 200),
                body,
            };
            shared.patches.lock().unwrap_or_else(PoisonError::into_inner).push(record);
            let object = done?;
            Ok(answer(StatusCode::OK, &object, object.version))
        }
        "delete" if !route.status => {
            let options = json_body(request, &["application/json"]).await?;
            let (object, version) = shared.write(|store| writes::delete(store, resource, &key, &options))?;
            Ok(answer(StatusCode::OK, &object, version))
        }
        _ => Err(ApiError::with_code(405, "this method is not served here")),
    }
}

/// The body, which may be absent and is then null.
async fn json_body(request: Request, types: &[&str]) -> Result<Value, ApiError> {
    let (parts, body) = request.into_parts();
    if !content_type(&parts.headers).is_none_or(|is| types.contains(&is)) {
        return Err(ApiError::with_code(415, format!("bodies taken here: {}", types.join(", "))));
    }
    let body = to_bytes(body, BODY).await;
    let body = body.map_err(|_| ApiError::with_code(413, format!("a body of more than {BODY} bytes")))?;
    if body.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&body).map_err(|error| ApiError::bad_request(format!("the body: {error}")))
}

fn content_type(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().unwrap_or_default();
    value.split(';').next().map(str::trim)
}

fn json_response(code: StatusCode, value: &Value) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn failure(error: &ApiError) -> Response {
    let code = StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(code, &error.status());
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

fn object_response(
    code: StatusCode,
    object: &Object,
    resource: Resource,
    shape: Shape,
    version: u64,
) -> Response {
    let mut text = Vec::new();
    object.write(&mut text, resource, shape, version);
    (code, [(header::CONTENT_TYPE, "application/json")], text).into_response()
}

fn list_response(page: Page, resource: Resource, shape: Shape) -> Response {
    let (kind, api_version) = match shape {
        Shape::Metadata => ("PartialObjectMetadata", "meta.k8s.io/v1"),
        _ => (resource.kind(), resource.api_version()),
    };
    let mut metadata = json!({ "resourceVersion": page.version.to_string() });
    if let Some(next) = &page.next {
        metadata["continue"] = query::write_token(page.version, next).into();
    }
    if let Some(remaining) = page.remaining {
        metadata["remainingItemCount"] = remaining.into();
    }
    let head = format!(
        "{{\"kind\":\"{kind}List\",\"apiVersion\":\"{api_version}\",\"metadata\":{metadata},\"items\":["
    );
    let items = move |text: &mut Vec<u8>, objects: &[Arc<Object>]| {
        for (at, object) in objects.iter().enumerate() {
            if at > 0 {
                text.push(b',');
            }
            object.write(text, resource, shape, object.version);
        }
    };
    let objects = page.objects;
    let body = if objects.len() <= CHUNK {
        let mut text = head.into_bytes();
        items(&mut text, &objects);
        text.extend_from_slice(b"]}");
        Body::from(text)
    } else {
        // In pieces: a whole cluster's pods in one text are hundreds of megabytes.
        let chunks = objects.len().div_ceil(CHUNK);
        Body::from_stream(stream::iter((0..chunks).map(move |chunk| {
            let mut text = if chunk == 0 { head.clone().into_bytes() } else { b",".to_vec() };
            items(&mut text, &objects[chunk * CHUNK..objects.len().min((chunk + 1) * CHUNK)]);
            if chunk + 1 == chunks {
                text.extend_from_slice(b"]}");
            }
            Ok::<_, Infallible>(text)
        })))
    };
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}
