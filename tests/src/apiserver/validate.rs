//! What a real server refuses, as far as a node agent can get it wrong.

use k8s_openapi::api::{
    core::v1::{Namespace, Node, Pod},
    events::v1::Event,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::{error::ApiError, resource::Resource};

/// Reads the value as its kind and writes it back: unknown fields are gone, wrong types an error.
pub(super) fn typed(resource: Resource, value: Value) -> Result<Value, String> {
    fn through<T: DeserializeOwned + Serialize>(value: Value) -> serde_json::Result<Value> {
        serde_json::from_value::<T>(value).and_then(serde_json::to_value)
    }
    let typed = match resource {
        Resource::Pods => through::<Pod>(value),
        Resource::Namespaces => through::<Namespace>(value),
        Resource::Nodes => through::<Node>(value),
        Resource::Events | Resource::CoreEvents => through::<Event>(value),
    };
    typed.map_err(|error| error.to_string())
}

/// Checks a complete object of the (newer) stored form.
pub(super) fn check(resource: Resource, name: &str, value: &Value) -> Result<(), ApiError> {
    let invalid = |field: &str, why: &str| Err(ApiError::invalid(resource, name, field, why));
    if !is_name(name) {
        return invalid("metadata.name", "not a lowercase DNS name");
    }
    let metadata = &value["metadata"];
    for (key, label) in entries(&metadata["labels"]) {
        if !is_key(key) || !is_label(label.as_str().unwrap_or("")) {
            return invalid("metadata.labels", "not a label");
        }
    }
    let mut size = 0;
    for (key, annotation) in entries(&metadata["annotations"]) {
        if !is_key(&key.to_lowercase()) {
            return invalid("metadata.annotations", "not a qualified name");
        }
        size += key.len() + annotation.as_str().unwrap_or("").len();
    }
    if size > 256 * 1024 {
        return invalid("metadata.annotations", "more than 256 KiB in all");
    }
    match resource {
        Resource::Pods if value["spec"]["containers"].as_array().is_none_or(Vec::is_empty) => {
            invalid("spec.containers", "a pod has at least one")
        }
        Resource::Events => check_event(name, value),
        _ => Ok(()),
    }
}

/// What the newer API demands of an event; the older one is lax.
fn check_event(name: &str, event: &Value) -> Result<(), ApiError> {
    let invalid = |field: &str, why: &str| Err(ApiError::invalid(Resource::Events, name, field, why));
    let limits = [
        ("action", 128),
        ("reason", 128),
        ("reportingController", 253),
        ("reportingInstance", 128),
        ("type", 16),
    ];
    for (field, limit) in limits {
        match event[field].as_str() {
            None | Some("") => return invalid(field, "must be set"),
            Some(text) if text.len() > limit => return invalid(field, "too long"),
            Some(_) => {}
        }
    }
    if event["note"].as_str().is_some_and(|note| note.len() > 1024) {
        return invalid("note", "more than 1024 bytes");
    }
    if !matches!(event["type"].as_str(), Some("Normal" | "Warning")) {
        return invalid("type", "neither Normal nor Warning");
    }
    if event["eventTime"].is_null() {
        return invalid("eventTime", "must be set");
    }
    // Events about cluster-wide objects go to the default namespace.
    let about =
        event["regarding"]["namespace"].as_str().filter(|about| !about.is_empty()).unwrap_or("default");
    if event["metadata"]["namespace"].as_str() != Some(about) {
        return invalid("regarding.namespace", "not the namespace of the event");
    }
    Ok(())
}

/// Do two pod specs differ in no more than an update may change?
pub(super) fn same_pod_spec(old: &Value, new: &Value) -> bool {
    fn frozen(spec: &Value) -> Value {
        let mut spec = spec.clone();
        if let Some(fields) = spec.as_object_mut() {
            fields.retain(|field, _| {
                !matches!(
                    field.as_str(),
                    "activeDeadlineSeconds" | "terminationGracePeriodSeconds" | "tolerations"
                )
            });
            for list in ["containers", "initContainers"] {
                for container in fields.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
                    container.as_object_mut().map(|container| container.remove("image"));
                }
            }
        }
        spec
    }
    frozen(old) == frozen(new)
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter)
}

fn edges_alphanumeric(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

/// DNS subdomain, as names are.
fn is_name(text: &str) -> bool {
    let part = |part: &str| {
        edges_alphanumeric(part)
            && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    text.len() <= 253 && text.split('.').all(part)
}

fn is_label(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.is_empty() || (text.len() <= 63 && edges_alphanumeric(text) && text.chars().all(plain))
}

/// A label's or annotation's key: a name, with a domain before it or without.
fn is_key(text: &str) -> bool {
    let (domain, name) = text.split_once('/').unwrap_or(("a", text));
    is_name(domain) && !name.is_empty() && is_label(name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn metadata() {
        let table = [
            ("a", json!({}), true),
            ("a-1.b", json!({ "labels": { "a.io/b": "C_d.1", "e": "" } }), true),
            ("A", json!({}), false),
            ("-a", json!({}), false),
            ("a..b", json!({}), false),
            ("a", json!({ "labels": { "a/b/c": "" } }), false),
            ("a", json!({ "labels": { "a": "b c" } }), false),
            ("a", json!({ "labels": { "a": "-" } }), false),
            ("a", json!({ "labels": { "": "b" } }), false),
            ("a", json!({ "annotations": { "a.io/b": "any { text }" } }), true),
            ("a", json!({ "annotations": { "a b": "" } }), false),
            ("a", json!({ "annotations": { "a": "x".repeat(256 * 1024) } }), false),
        ];
        for (name, metadata, fine) in table {
            let value = json!({ "metadata": metadata });
            assert_eq!(check(Resource::Namespaces, name, &value).is_ok(), fine, "{name} {metadata}");
        }
    }

    #[test]
    fn events() {
        let event = json!({
            "metadata": { "namespace": "ns" }, "regarding": { "namespace": "ns" }, "type": "Normal",
            "action": "a", "reason": "r", "reportingController": "c", "reportingInstance": "i",
            "eventTime": "2024-01-01T00:00:00.000000Z",
        });
        assert_eq!(check(Resource::Events, "e", &event), Ok(()));
        let broken = [
            ("type", json!("Fatal")),
            ("reason", json!("")),
            ("action", json!("x".repeat(129))),
            ("note", json!("x".repeat(1025))),
            ("eventTime", json!(null)),
            ("regarding", json!({ "namespace": "other" })),
            ("regarding", json!({})),
        ];
        for (field, value) in broken {
            let mut event = event.clone();
            event[field] = value;
            assert!(check(Resource::Events, "e", &event).is_err(), "{event}");
        }
    }

    #[test]
    fn pod_specs() {
        let old = json!({ "nodeName": "n", "containers": [{ "name": "c", "image": "1" }] });
        let same = json!({ "nodeName": "n", "containers": [{ "name": "c", "image": "2" }],
                           "tolerations": [{ "key": "k" }] });
        assert!(same_pod_spec(&old, &same));
        let moved = json!({ "nodeName": "m", "containers": [{ "name": "c", "image": "1" }] });
        assert!(!same_pod_spec(&old, &moved));
    }

    #[test]
    fn types() {
        let wrong = json!({ "metadata": { "annotations": { "a": 1 } } });
        assert!(typed(Resource::Namespaces, wrong).is_err());
        let extra = json!({ "metadata": { "name": "a", "unheard": 1 } });
        let typed = typed(Resource::Namespaces, extra).unwrap();
        assert_eq!(typed["metadata"], json!({ "name": "a" }));
    }
}
