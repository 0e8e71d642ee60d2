//! Merge patches (RFC 7386), and which part of a write reaches the stored object.

use serde_json::{Map, Value};

/// Applies a merge patch: null removes, an object merges, anything else replaces.
pub(super) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let fields = target.as_object_mut().expect("made an object above");
    for (key, value) in patch {
        if value.is_null() {
            fields.remove(key);
        } else {
            merge(fields.entry(key.as_str()).or_insert(Value::Null), value);
        }
    }
}

/// Who writes, and through which door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Door {
    /// The object's own URL: its status stays.
    Main,
    /// `/status`: its spec and owners stay. Labels and annotations can be written: a node agent
    /// allowed no more than this marks its pods with them.
    Status,
    /// The test itself, in place of kubelets and controllers: all but identity can change.
    Test,
}

/// Fields of `metadata` the server alone writes.
const SYSTEM: [&str; 9] = [
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
];

/// Same, for a test, which may mark an object as being deleted.
const IDENTITY: [&str; 5] = ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"];

/// Puts the fields back that a write through `door` cannot change.
pub(super) fn keep(old: &Value, new: &mut Value, door: Door) {
    let restore = |new: &mut Map<String, Value>, old: &Value, field: &str| {
        match old.get(field) {
            Some(value) => new.insert(field.into(), value.clone()),
            None => new.remove(field),
        };
    };
    let Some(fields) = new.as_object_mut() else { return };
    let part = match door {
        Door::Main => Some("status"),
        Door::Status => Some("spec"),
        Door::Test => None,
    };
    if let Some(part) = part {
        restore(fields, old, part);
    }
    for implied in ["kind", "apiVersion"] {
        restore(fields, old, implied);
    }
    let metadata = fields.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
    let Some(metadata) = metadata.as_object_mut() else { return };
    let system: &[&str] = if door == Door::Test { &IDENTITY } else { &SYSTEM };
    for field in system {
        restore(metadata, &old["metadata"], field);
    }
    if door == Door::Status {
        restore(metadata, &old["metadata"], "ownerReferences");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The examples of RFC 7386, appendix A.
    #[test]
    fn rfc_7386() {
        let table = [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"})),
            (json!({"a": "b"}), json!({"a": null}), json!({})),
            (json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"})),
            (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "c"}), json!({"a": ["b"]}), json!({"a": ["b"]})),
            (json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}})),
            (json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]})),
            (json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"])),
            (json!({"a": "b"}), json!(["c"]), json!(["c"])),
            (json!({"a": "foo"}), json!(null), json!(null)),
            (json!({"a": "foo"}), json!("bar"), json!("bar")),
            (json!({"e": null}), json!({"a": 1}), json!({"e": null, "a": 1})),
            (json!([1, 2]), json!({"a": "b", "c": null}), json!({"a": "b"})),
            (json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}})),
        ];
        for (target, patch, want) in table {
            let mut got = target.clone();
            merge(&mut got, &patch);
            assert_eq!(got, want, "{target} + {patch}");
        }
    }

    #[test]
    fn doors() {
        let old = json!({
            "metadata": { "name": "a", "uid": "u", "labels": { "a": "1" }, "ownerReferences": ["o"] },
            "spec": { "x": 1 }, "status": { "y": 1 },
        });
        let new = json!({
            "metadata": { "name": "b", "uid": "v", "labels": { "a": "2" }, "ownerReferences": [],
                          "deletionTimestamp": "t" },
            "spec": { "x": 2 }, "status": { "y": 2 },
        });
        let through = |door| {
            let mut kept = new.clone();
            keep(&old, &mut kept, door);
            kept
        };
        let metadata = json!({ "name": "a", "uid": "u", "labels": { "a": "2" }, "ownerReferences": [] });
        assert_eq!(
            through(Door::Main),
            json!({ "metadata": metadata, "spec": { "x": 2 }, "status": { "y": 1 } })
        );
        let metadata = json!({ "name": "a", "uid": "u", "labels": { "a": "2" }, "ownerReferences": ["o"] });
        assert_eq!(
            through(Door::Status),
            json!({ "metadata": metadata, "spec": { "x": 1 }, "status": { "y": 2 } })
        );
        let metadata = json!({
            "name": "a", "uid": "u", "labels": { "a": "2" }, "ownerReferences": [], "deletionTimestamp": "t",
        });
        assert_eq!(
            through(Door::Test),
            json!({ "metadata": metadata, "spec": { "x": 2 }, "status": { "y": 2 } })
        );
    }
}
