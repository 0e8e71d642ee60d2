//! Label selectors, in the form Kubernetes and Istio write them.
//!
//! Read strictly: a selector with a misspelled key would be an empty one, and an empty one selects
//! everything.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

/// Labels of a pod or a namespace.
pub type Labels = BTreeMap<String, String>;

/// A `LabelSelector`: all of its requirements must hold, so the empty one selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LabelSelector {
    /// Labels that must be there with exactly this value.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Labels::is_empty")]
    pub match_labels: Labels,
    /// Further requirements.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<Requirement>,
}

/// One element of `matchExpressions`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawRequirement", into = "RawRequirement")]
pub enum Requirement {
    /// The label is there and has one of these values.
    In(String, Vec<String>),
    /// The label is absent, or has none of these values.
    NotIn(String, Vec<String>),
    /// The label is there.
    Exists(String),
    /// The label is absent.
    DoesNotExist(String),
}

impl LabelSelector {
    /// Do these labels fulfil every requirement?
    pub fn matches(&self, labels: &Labels) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.holds(labels))
    }
}

impl Requirement {
    fn holds(&self, labels: &Labels) -> bool {
        match self {
            Self::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
            Self::NotIn(key, values) => labels.get(key).is_none_or(|value| !values.contains(value)),
            Self::Exists(key) => labels.contains_key(key),
            Self::DoesNotExist(key) => !labels.contains_key(key),
        }
    }
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRequirement {
    key: String,
    operator: String,
    #[serde(default, deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    values: Vec<String>,
}

impl TryFrom<RawRequirement> for Requirement {
    type Error = String;

    fn try_from(raw: RawRequirement) -> Result<Self, String> {
        let RawRequirement { key, operator, values } = raw;
        if key.is_empty() {
            return Err("a requirement of matchExpressions needs a key".into());
        }
        match (operator.as_str(), values.is_empty()) {
            ("In", false) => Ok(Self::In(key, values)),
            ("NotIn", false) => Ok(Self::NotIn(key, values)),
            ("Exists", true) => Ok(Self::Exists(key)),
            ("DoesNotExist", true) => Ok(Self::DoesNotExist(key)),
            ("In" | "NotIn", true) => Err(format!("{operator} on {key} needs values")),
            ("Exists" | "DoesNotExist", false) => Err(format!("{operator} on {key} takes no values")),
            _ => Err(format!("operator {operator:?} on {key} is none of In, NotIn, Exists, DoesNotExist")),
        }
    }
}

impl From<Requirement> for RawRequirement {
    fn from(requirement: Requirement) -> Self {
        let (operator, key, values) = match requirement {
            Requirement::In(key, values) => ("In", key, values),
            Requirement::NotIn(key, values) => ("NotIn", key, values),
            Requirement::Exists(key) => ("Exists", key, Vec::new()),
            Requirement::DoesNotExist(key) => ("DoesNotExist", key, Vec::new()),
        };
        Self { key, operator: operator.into(), values }
    }
}

/// `key:` with nothing behind it means the same as leaving the key out.
pub(super) fn null_is_empty<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }

    fn selector(yaml: &str) -> LabelSelector {
        serde_saphyr::from_str(yaml).unwrap_or_else(|e| panic!("{yaml}: {e}"))
    }

    #[test]
    fn requirements() {
        type Pairs<'a> = &'a [(&'a str, &'a str)];
        let table: &[(&str, Pairs, bool)] = &[
            ("{}", &[], true),
            ("{}", &[("a", "1")], true),
            ("matchLabels:\nmatchExpressions:", &[("a", "1")], true),
            ("matchLabels: {a: '1'}", &[("a", "1"), ("b", "2")], true),
            ("matchLabels: {a: '1'}", &[("a", "2")], false),
            ("matchLabels: {a: '1'}", &[], false),
            ("matchLabels: {a: '1', b: '2'}", &[("a", "1")], false),
            ("matchExpressions: [{key: a, operator: In, values: [x, y]}]", &[("a", "y")], true),
            ("matchExpressions: [{key: a, operator: In, values: [x, y]}]", &[("a", "z")], false),
            ("matchExpressions: [{key: a, operator: In, values: [x]}]", &[], false),
            ("matchExpressions: [{key: a, operator: NotIn, values: [x]}]", &[("a", "x")], false),
            ("matchExpressions: [{key: a, operator: NotIn, values: [x]}]", &[("a", "y")], true),
            // An absent label is in no list.
            ("matchExpressions: [{key: a, operator: NotIn, values: [x]}]", &[], true),
            ("matchExpressions: [{key: a, operator: Exists}]", &[("a", "")], true),
            ("matchExpressions: [{key: a, operator: Exists}]", &[], false),
            ("matchExpressions: [{key: a, operator: DoesNotExist}]", &[("a", "")], false),
            ("matchExpressions: [{key: a, operator: DoesNotExist, values: []}]", &[], true),
            ("{matchLabels: {a: '1'}, matchExpressions: [{key: b, operator: Exists}]}", &[("a", "1")], false),
        ];
        for (yaml, given, expected) in table {
            assert_eq!(selector(yaml).matches(&labels(given)), *expected, "{yaml} on {given:?}");
        }
    }

    #[test]
    fn what_kubernetes_would_refuse_is_refused() {
        for yaml in [
            "matchlabels: {a: b}",
            "matchExpressions: [{key: a, operator: in, values: [x]}]",
            "matchExpressions: [{key: a, operator: In}]",
            "matchExpressions: [{key: a, operator: NotIn, values: []}]",
            "matchExpressions: [{key: a, operator: Exists, values: [x]}]",
            "matchExpressions: [{key: '', operator: Exists}]",
            "matchExpressions: [{operator: Exists}]",
            "matchExpressions: [{key: a, operator: Exists, value: x}]",
            "[]",
        ] {
            assert!(serde_saphyr::from_str::<LabelSelector>(yaml).is_err(), "{yaml} must not be read");
        }
    }

    #[test]
    fn survives_json() {
        let before =
            selector("{matchLabels: {a: b}, matchExpressions: [{key: c, operator: NotIn, values: [d]}]}");
        let after = serde_json::from_str(&serde_json::to_string(&before).unwrap()).unwrap();
        assert_eq!(before, after);
    }
}
