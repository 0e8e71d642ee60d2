//! The two forms of an event: `events.k8s.io/v1`, and the older `v1`.

use serde_json::Value;

/// Fields named differently: newer name, older name.
const NAMES: [(&str, &str); 7] = [
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("reportingController", "reportingComponent"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
];

fn rename(
    mut event: Value,
    names: impl Iterator<Item = (&'static str, &'static str)>,
    version: &str,
) -> Value {
    if let Some(fields) = event.as_object_mut() {
        for (from, to) in names {
            if let Some(value) = fields.remove(from) {
                fields.insert(to.into(), value);
            }
        }
        fields.insert("apiVersion".into(), version.into());
    }
    event
}

/// From the newer form to the older.
pub(super) fn to_core(event: Value) -> Value {
    rename(event, NAMES.into_iter(), "v1")
}

/// From the older form to the newer.
pub(super) fn from_core(event: Value) -> Value {
    rename(event, NAMES.into_iter().map(|(newer, older)| (older, newer)), "events.k8s.io/v1")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn there_and_back() {
        let core = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "name": "e" }, "reason": "Because",
            "involvedObject": { "kind": "Pod", "name": "p" }, "message": "words", "reportingComponent": "c",
            "source": { "component": "c" }, "firstTimestamp": "t", "lastTimestamp": "u", "count": 3,
        });
        let newer = from_core(core.clone());
        assert_eq!(newer["regarding"]["name"], "p");
        assert_eq!((&newer["note"], &newer["deprecatedCount"]), (&json!("words"), &json!(3)));
        assert!(newer.get("message").is_none());
        assert_eq!(to_core(newer), core);
    }
}
