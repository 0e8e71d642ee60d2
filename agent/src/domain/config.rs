//! The agent's configuration: what can be set, and what holds when nothing is.
//!
//! This is the YAML file's form. Environment and flags are laid over it by the command line.

use std::{collections::BTreeSet, time::Duration};

use serde::Deserialize;

use super::{
    eligibility::{EnablementSelectors, Policy},
    yaml::{self, YamlError},
};

/// Everything the control plane part of the agent can be told.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AgentConfig {
    /// The node whose pods are ours. Has no default: see [`AgentConfig::check`].
    pub node_name: String,
    /// Name of the agent's own pod, for the Events it writes.
    pub pod_name: Option<String>,
    /// Namespace of the agent's own pod; the system namespace when empty.
    pub pod_namespace: Option<String>,
    /// Where ztunnel runs.
    pub system_namespace: String,
    /// Namespaces whose pods are never enrolled.
    pub exclude_namespaces: BTreeSet<String>,
    /// Which pods are in the mesh.
    pub enablement_selectors: EnablementSelectors,
    /// Capture DNS in pods that do not say otherwise.
    pub dns_capture: bool,
    /// Capture IPv6 in pods that have it.
    pub ipv6: bool,
    /// How enrolment is driven.
    #[serde(skip)]
    pub reconcile: ReconcileConfig,
}

/// A configuration the agent cannot run with.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is not YAML, or not of this form.
    #[error("configuration: {0}")]
    Unreadable(#[from] YamlError),
    /// There is no telling which pods are ours.
    #[error("the node's name is not known: set NODE_NAME (fieldRef spec.nodeName) or nodeName")]
    NoNodeName,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            node_name: String::new(),
            pod_name: None,
            pod_namespace: None,
            system_namespace: "istio-system".into(),
            exclude_namespaces: BTreeSet::from(["kube-system".into()]),
            enablement_selectors: EnablementSelectors::default(),
            dns_capture: true,
            ipv6: true,
            reconcile: ReconcileConfig::default(),
        }
    }
}

impl AgentConfig {
    /// Reads the YAML file's text. An empty file is the defaults; an unknown key is an error.
    pub fn from_yaml(text: &str) -> Result<Self, ConfigError> {
        Ok(yaml::read::<Option<Self>>(text)?.unwrap_or_default())
    }

    /// What must hold once every source has been read.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.node_name.is_empty() { Err(ConfigError::NoNodeName) } else { Ok(()) }
    }

    /// The part that decides about pods.
    pub fn policy(&self) -> Policy {
        Policy {
            selectors: self.enablement_selectors.clone(),
            excluded_namespaces: self.exclude_namespaces.clone(),
            system_namespace: self.system_namespace.clone(),
            own_namespace: self.pod_namespace.clone().unwrap_or_else(|| self.system_namespace.clone()),
        }
    }
}

/// A comma-separated list, as `EXCLUDE_NAMESPACES` has it: blanks around names and empty names mean nothing.
pub fn namespace_list(text: &str) -> BTreeSet<String> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// How enrolment is driven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReconcileConfig {
    /// Pods worked on at once.
    pub concurrency: usize,
    /// First wait after a failure; doubles from then on.
    pub backoff_min: Duration,
    /// Longest wait between two attempts.
    pub backoff_max: Duration,
    /// ztunnel's time to answer, both ways. A little over the 5 s after which a connection is given up,
    /// so that the more telling error comes first.
    pub ztunnel_deadline: Duration,
    /// The API server's time to take a patch.
    pub annotate_deadline: Duration,
    /// A step that takes longer gives up its place among the pods worked on at once, and is reported.
    pub slow: Duration,
}

impl Default for ReconcileConfig {
    fn default() -> Self {
        Self {
            concurrency: 16,
            backoff_min: Duration::from_millis(5),
            backoff_max: Duration::from_secs(15),
            ztunnel_deadline: Duration::from_secs(6),
            annotate_deadline: Duration::from_secs(30),
            slow: Duration::from_secs(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_is_the_defaults() {
        for text in ["", "# nothing\n", "{}"] {
            assert_eq!(AgentConfig::from_yaml(text).unwrap(), AgentConfig::default(), "{text:?}");
        }
    }

    #[test]
    fn a_file_changes_what_it_names_and_nothing_else() {
        let read = AgentConfig::from_yaml(
            "nodeName: n1\nexcludeNamespaces: [a, b]\nenablementSelectors:\n- podSelector: {matchLabels: {x: y}}\n",
        )
        .unwrap();
        assert_eq!(read.exclude_namespaces, BTreeSet::from(["a".into(), "b".into()]));
        assert_eq!(read.enablement_selectors.0.len(), 1);
        assert_eq!(read.system_namespace, "istio-system");
        assert!(read.check().is_ok());
    }

    #[test]
    fn a_misspelled_key_is_named() {
        let error = AgentConfig::from_yaml("nodename: n1").unwrap_err().to_string();
        assert!(error.contains("nodename"), "{error}");
    }

    #[test]
    fn without_a_node_name_there_is_nothing_to_run() {
        let error = AgentConfig::default().check().unwrap_err().to_string();
        assert!(error.contains("NODE_NAME"), "{error}");
    }

    #[test]
    fn own_pods_are_looked_for_where_the_agent_runs() {
        let config = AgentConfig::default();
        assert_eq!(config.policy().own_namespace, "istio-system");
        let config = AgentConfig { pod_namespace: Some("weir".into()), ..config };
        assert_eq!(config.policy().own_namespace, "weir");
    }

    #[test]
    fn lists_of_namespaces() {
        for (text, expected) in [
            ("", &[][..]),
            (" ", &[]),
            (",, ,", &[]),
            ("a", &["a"]),
            ("a,b", &["a", "b"]),
            (" a , b ,", &["a", "b"]),
            ("a,a", &["a"]),
        ] {
            assert!(namespace_list(text).iter().eq(expected), "{text:?}");
        }
    }
}
