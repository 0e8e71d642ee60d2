//! One stored object: what selectors look at, and the JSON around it.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{events, resource::Resource};

/// Where an object is: its namespace (empty for cluster-wide kinds) and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl Key {
    pub(super) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

/// How much of an object to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// On its own, or in a watch event: with `kind` and `apiVersion`.
    Whole,
    /// In a list, which names the kind once.
    Item,
    /// As `PartialObjectMetadata`.
    Metadata,
}

/// A stored object.
///
/// It is kept as text cut open around its resource version: lists, watches and metadata-only views
/// are then concatenation, and a deleted object can be shown at the version of its deletion. Among
/// 100,000 pods a parsed tree each would be several times the memory.
#[derive(Debug)]
pub(super) struct Object {
    pub key: Key,
    pub version: u64,
    pub uid: Box<str>,
    /// Sorted by key.
    pub labels: Box<[(Box<str>, Box<str>)]>,
    /// `spec.nodeName`, empty if there is none.
    pub node: Box<str>,
    /// `status.phase`, empty if there is none.
    pub phase: Box<str>,
    /// Fields of `metadata` but for the resource version.
    metadata: Box<str>,
    /// The other fields: empty, or starting with a comma.
    rest: Box<str>,
}

impl Object {
    /// Takes a complete object: `metadata` must have its name and uid.
    pub(super) fn new(key: Key, version: u64, value: Value) -> Self {
        let Value::Object(mut fields) = value else { panic!("an object is a JSON object") };
        let mut metadata = match fields.remove("metadata") {
            Some(Value::Object(metadata)) => metadata,
            _ => Map::new(),
        };
        for implied in ["kind", "apiVersion"] {
            fields.remove(implied);
        }
        metadata.remove("resourceVersion");
        let mut labels: Vec<(Box<str>, Box<str>)> = metadata
            .get("labels")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .map(|(key, value)| (key.as_str().into(), value.as_str().unwrap_or_default().into()))
            .collect();
        labels.sort();
        let text = |within: &str, field: &str| -> Box<str> {
            fields.get(within).and_then(|part| part[field].as_str()).unwrap_or_default().into()
        };
        Self {
            key,
            version,
            uid: metadata.get("uid").and_then(Value::as_str).unwrap_or_default().into(),
            labels: labels.into(),
            node: text("spec", "nodeName"),
            phase: text("status", "phase"),
            metadata: inner(&metadata).into(),
            rest: if fields.is_empty() { "".into() } else { format!(",{}", inner(&fields)).into() },
        }
    }

    /// Value of a label.
    pub(super) fn label(&self, key: &str) -> Option<&str> {
        let at = self.labels.binary_search_by(|(label, _)| (**label).cmp(key)).ok()?;
        Some(&self.labels[at].1)
    }

    /// Appends the object as JSON, as if its resource version were `version`.
    pub(super) fn write(&self, out: &mut Vec<u8>, resource: Resource, shape: Shape, version: u64) {
        if resource == Resource::CoreEvents && shape != Shape::Metadata {
            // Rare enough to be converted each time it is looked at.
            let mut event = events::to_core(self.value_at(Resource::Events, version));
            if shape == Shape::Item {
                let fields = event.as_object_mut().expect("an event is a JSON object");
                fields.remove("kind");
                fields.remove("apiVersion");
            }
            out.extend_from_slice(event.to_string().as_bytes());
            return;
        }
        out.push(b'{');
        match shape {
            Shape::Whole => push(
                out,
                &["\"kind\":\"", resource.kind(), "\",\"apiVersion\":\"", resource.api_version(), "\","],
            ),
            Shape::Item => {}
            Shape::Metadata => {
                push(out, &["\"kind\":\"PartialObjectMetadata\",\"apiVersion\":\"meta.k8s.io/v1\","]);
            }
        }
        push(
            out,
            &["\"metadata\":{\"resourceVersion\":\"", &version.to_string(), "\",", &self.metadata, "}"],
        );
        if shape != Shape::Metadata {
            push(out, &[&self.rest]);
        }
        out.push(b'}');
    }

    /// The object as a tree, with `kind` and `apiVersion`.
    pub(super) fn value(&self, resource: Resource) -> Value {
        self.value_at(resource, self.version)
    }

    fn value_at(&self, resource: Resource, version: u64) -> Value {
        let mut text = Vec::new();
        self.write(&mut text, resource, Shape::Whole, version);
        serde_json::from_slice(&text).expect("written by this server")
    }
}

/// Text of an object without its braces.
fn inner(fields: &Map<String, Value>) -> String {
    let text = serde_json::to_string(fields).expect("a JSON tree");
    text[1..text.len() - 1].to_owned()
}

fn push(out: &mut Vec<u8>, parts: &[&str]) {
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn shapes() {
        let value = json!({
            "kind": "Pod", "apiVersion": "v1",
            "metadata": { "name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "1",
                          "labels": { "b": "2", "a": "1" } },
            "spec": { "nodeName": "n" }, "status": { "phase": "Running" },
        });
        let object = Object::new(Key::new("ns", "a"), 7, value.clone());
        let show = |shape, version| -> Value {
            let mut text = Vec::new();
            object.write(&mut text, Resource::Pods, shape, version);
            serde_json::from_slice(&text).unwrap()
        };
        let mut whole = value;
        whole["metadata"]["resourceVersion"] = "7".into();
        assert_eq!(object.value(Resource::Pods), whole);
        whole["metadata"]["resourceVersion"] = "9".into();
        assert_eq!(show(Shape::Whole, 9), whole);
        let metadata = whole["metadata"].clone();
        whole.as_object_mut().unwrap().retain(|key, _| !matches!(key.as_str(), "kind" | "apiVersion"));
        assert_eq!(show(Shape::Item, 9), whole);
        assert_eq!(
            show(Shape::Metadata, 9),
            json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata })
        );
        assert_eq!((object.label("a"), object.label("b"), object.label("c")), (Some("1"), Some("2"), None));
        assert_eq!((&*object.node, &*object.phase), ("n", "Running"));
    }

    #[test]
    fn nothing_but_metadata() {
        let object = Object::new(Key::new("", "a"), 7, json!({ "metadata": { "name": "a", "uid": "u" } }));
        assert_eq!(object.value(Resource::Nodes)["metadata"]["resourceVersion"], "7");
    }
}
