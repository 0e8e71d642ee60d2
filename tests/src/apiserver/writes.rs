//! Create, replace, patch and delete, with the rules of a real server.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use rand::Rng;
use serde_json::{Map, Value, json};

use super::{
    error::ApiError,
    events,
    object::{Key, Object},
    patch::{self, Door},
    resource::Resource,
    store::Store,
    validate,
};

/// A random (version 4) UUID.
fn new_uid() -> String {
    let bits = rand::rng().random::<u128>() & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// Now, as precise as `creationTimestamp` is.
pub(super) fn now() -> String {
    let now = Timestamp::now().as_second();
    Timestamp::from_second(now).expect("a second taken from a time").to_string()
}

fn metadata_of(body: &mut Value) -> Result<&mut Map<String, Value>, ApiError> {
    let fields = body.as_object_mut().ok_or_else(|| ApiError::bad_request("the body is not an object"))?;
    let metadata = fields.entry("metadata").or_insert_with(|| json!({}));
    metadata.as_object_mut().ok_or_else(|| ApiError::bad_request("metadata is not an object"))
}

/// Is the body of the kind the URL speaks of?
fn same_kind(resource: Resource, body: &Value) -> Result<(), ApiError> {
    let fits = |field: &str, want: &str| body[field].as_str().is_none_or(|is| is == want);
    if fits("kind", resource.kind()) && fits("apiVersion", resource.api_version()) {
        Ok(())
    } else {
        Err(ApiError::bad_request("the body is of another kind than the URL"))
    }
}

/// The form events are stored in, and the kind with it.
fn stored(resource: Resource, body: Value) -> Value {
    if resource == Resource::CoreEvents { events::from_core(body) } else { body }
}

fn default_fields(resource: Resource, name: &str, body: &mut Value) {
    match resource {
        Resource::Pods => {
            if body["spec"]["serviceAccountName"].as_str().is_none_or(str::is_empty) {
                body["spec"]["serviceAccountName"] = "default".into();
            }
            if body["status"]["phase"].is_null() {
                body["status"]["phase"] = "Pending".into();
            }
        }
        Resource::Namespaces => {
            body["metadata"]["labels"]["kubernetes.io/metadata.name"] = name.into();
            if body["status"]["phase"].is_null() {
                body["status"]["phase"] = "Active".into();
            }
        }
        _ => {}
    }
}

/// POST.
pub(super) fn create(
    store: &mut Store,
    resource: Resource,
    namespace: Option<&str>,
    mut body: Value,
) -> Result<Arc<Object>, ApiError> {
    let metadata = metadata_of(&mut body)?;
    if metadata.get("resourceVersion").and_then(Value::as_str).is_some_and(|version| !version.is_empty()) {
        return Err(ApiError::bad_request("a new object has no resourceVersion"));
    }
    let text = |field: &str| metadata.get(field).and_then(Value::as_str).filter(|text| !text.is_empty());
    let name = match (text("name"), text("generateName")) {
        (Some(name), _) => name.to_owned(),
        (None, Some(prefix)) => format!("{prefix}{:05x}", rand::rng().random_range(0..0x10_0000)),
        (None, None) => return Err(ApiError::invalid(resource, "", "metadata.name", "must be set")),
    };
    if text("namespace").is_some() && text("namespace") != namespace {
        return Err(ApiError::bad_request("the body is of another namespace than the URL"));
    }
    let key = Key::new(namespace.unwrap_or_default(), &name);
    for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "uid"] {
        metadata.remove(field);
    }
    same_kind(resource, &body)?;
    if resource.has_status() && resource != Resource::Nodes {
        body.as_object_mut().map(|fields| fields.remove("status"));
    }
    if let Some(namespace) = namespace
        && store.get(Resource::Namespaces, &Key::new("", namespace)).is_none()
    {
        return Err(ApiError::not_found(Resource::Namespaces, namespace));
    }
    if store.get(resource, &key).is_some() {
        return Err(ApiError::already_exists(resource, &name));
    }
    let value = complete(resource, &key, stored(resource, body))?;
    Ok(store.put(resource, key, value))
}

/// Fills in what the server adds to a new object, and checks it.
fn complete(resource: Resource, key: &Key, mut body: Value) -> Result<Value, ApiError> {
    let metadata = metadata_of(&mut body)?;
    metadata.insert("name".into(), (*key.name).into());
    if !key.namespace.is_empty() {
        metadata.insert("namespace".into(), (*key.namespace).into());
    }
    metadata.entry("uid").or_insert_with(|| new_uid().into());
    if metadata.get("creationTimestamp").is_none_or(Value::is_null) {
        metadata.insert("creationTimestamp".into(), now().into());
    }
    // A list or a text in place of an object would make the defaults below panic.
    let typed = |body| validate::typed(resource, body).map_err(ApiError::bad_request);
    let mut body = typed(body)?;
    default_fields(resource, &key.name, &mut body);
    let value = typed(body)?;
    validate::check(resource, &key.name, &value)?;
    Ok(value)
}

/// PUT.
pub(super) fn replace(
    store: &mut Store,
    resource: Resource,
    key: &Key,
    door: Door,
    mut body: Value,
) -> Result<Arc<Object>, ApiError> {
    let old = store.get(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?.clone();
    let metadata = metadata_of(&mut body)?;
    let differs = |field: &str, is: &str| {
        metadata.get(field).and_then(Value::as_str).is_some_and(|text| !text.is_empty() && text != is)
    };
    if differs("uid", &old.uid) {
        return Err(ApiError::conflict(resource, &key.name, "the uid is of another object"));
    }
    if !metadata.contains_key("name") || differs("name", &key.name) || differs("namespace", &key.namespace) {
        return Err(ApiError::bad_request("the body is of another name than the URL"));
    }
    current(resource, &old, &body)?;
    same_kind(resource, &body)?;
    let old_value = old.value(resource);
    update(store, resource, &old, &old_value, door, body, ApiError::bad_request)
}

/// PATCH with a merge patch. `uid_mismatch` is the code for a `metadata.uid` of another object.
pub(super) fn merge(
    store: &mut Store,
    resource: Resource,
    key: &Key,
    door: Door,
    body: &Value,
    uid_mismatch: u16,
) -> Result<Arc<Object>, ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad_request("a merge patch is an object"));
    }
    let old = store.get(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?.clone();
    let old_value = old.value(resource);
    let mut new = old_value.clone();
    patch::merge(&mut new, body);
    metadata_of(&mut new)?;
    let differs = |field: &str, is: &str| {
        new["metadata"][field].as_str().is_some_and(|text| !text.is_empty() && text != is)
    };
    if differs("name", &key.name) || differs("namespace", &key.namespace) {
        return Err(ApiError::bad_request("the patch changes the object's name"));
    }
    current(resource, &old, &new)?;
    if differs("uid", &old.uid) {
        return Err(match uid_mismatch {
            409 => ApiError::conflict(resource, &key.name, "the uid is of another object"),
            _ => ApiError::invalid(resource, &key.name, "metadata.uid", "field is immutable"),
        });
    }
    same_kind(resource, &new)?;
    let unreadable = |why: String| ApiError::invalid(resource, &key.name, "patch", &why);
    update(store, resource, &old, &old_value, door, new, unreadable)
}

/// Does the write come of the version there is, if it says so?
fn current(resource: Resource, old: &Object, new: &Value) -> Result<(), ApiError> {
    match new["metadata"]["resourceVersion"].as_str() {
        Some(version) if !version.is_empty() && version != old.version.to_string() => {
            Err(ApiError::conflict(
                resource,
                &old.key.name,
                "the object has been modified since the version given",
            ))
        }
        _ => Ok(()),
    }
}

fn update(
    store: &mut Store,
    resource: Resource,
    old: &Arc<Object>,
    old_value: &Value,
    door: Door,
    mut new: Value,
    unreadable: impl Fn(String) -> ApiError,
) -> Result<Arc<Object>, ApiError> {
    patch::keep(old_value, &mut new, door);
    let typed = |value| validate::typed(resource, stored(resource, value));
    let (old_value, mut new) =
        (typed(old_value.clone()).map_err(&unreadable)?, typed(new).map_err(unreadable)?);
    if resource == Resource::Namespaces {
        new["metadata"]["labels"]["kubernetes.io/metadata.name"] = (*old.key.name).into();
    }
    validate::check(resource, &old.key.name, &new)?;
    if resource == Resource::Pods
        && door == Door::Main
        && !validate::same_pod_spec(&old_value["spec"], &new["spec"])
    {
        let why = "an update may not change these fields of a pod";
        return Err(ApiError::invalid(resource, &old.key.name, "spec", why));
    }
    // A write that changes nothing has no version and wakes no watcher.
    if old_value == new {
        return Ok(old.clone());
    }
    Ok(store.put(resource, old.key.clone(), new))
}

/// DELETE, at once; `options` is the body. With a namespace goes all that is in it.
pub(super) fn delete(
    store: &mut Store,
    resource: Resource,
    key: &Key,
    options: &Value,
) -> Result<(Arc<Object>, u64), ApiError> {
    let old = store.get(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    let unlike =
        |field: &str, is: &str| options["preconditions"][field].as_str().is_some_and(|want| want != is);
    if unlike("uid", &old.uid) || unlike("resourceVersion", &old.version.to_string()) {
        return Err(ApiError::conflict(resource, &key.name, "a precondition of the delete does not hold"));
    }
    if resource == Resource::Namespaces {
        for inside in [Resource::Pods, Resource::Events] {
            let keys: Vec<Key> =
                store.objects(inside, Some(&key.name)).map(|object| object.key.clone()).collect();
            for key in keys {
                store.remove(inside, &key);
            }
        }
    }
    Ok(store.remove(resource, key).expect("found above"))
}

/// Writes an object as given, new or not. One whose uid differs replaces the old: a delete and a create.
pub(super) fn put(store: &mut Store, resource: Resource, mut body: Value) -> Result<Arc<Object>, ApiError> {
    let metadata = metadata_of(&mut body)?;
    let text = |field: &str| metadata.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let namespace = match (resource.namespaced(), text("namespace")) {
        (false, _) => String::new(),
        (true, namespace) if namespace.is_empty() => "default".into(),
        (true, namespace) => namespace,
    };
    let (key, uid) = (Key::new(&namespace, &text("name")), text("uid"));
    metadata.remove("resourceVersion");
    if resource.namespaced() && store.get(Resource::Namespaces, &Key::new("", &namespace)).is_none() {
        put(store, Resource::Namespaces, json!({ "metadata": { "name": namespace } }))?;
    }
    match store.get(resource, &key).cloned() {
        Some(old) if uid.is_empty() || *uid == *old.uid => {
            let old_value = old.value(resource);
            default_fields(resource, &key.name, &mut body);
            update(store, resource, &old, &old_value, Door::Test, body, ApiError::bad_request)
        }
        found => {
            let value = complete(resource, &key, body)?;
            if found.is_some() {
                store.remove(resource, &key);
            }
            Ok(store.put(resource, key, value))
        }
    }
}

#[cfg(test)]
#[path = "writes_tests.rs"]
mod tests;
