//! Which pods belong to the mesh: one pure function of a pod, its namespace and the configuration.
//!
//! The rules are Istio's, asked in this order; the first that applies decides and names the reason:
//!
//! 1. The pod has ended → leave, `terminal`.
//! 2. It uses the node's network → leave, `host_network`.
//! 3. It is a ztunnel → leave, `ztunnel_pod`; it is weir's own → leave, `own_pod`. Both carry the opt-out
//!    label as well, but no selector may be able to make the mesh depend on itself.
//! 4. Its namespace is excluded → leave, `excluded_namespace`; the pod's own labels do not override this.
//! 5. It has a sidecar → leave, `sidecar`.
//! 6. The labels of its namespace are not known → wait, `namespace_unknown`.
//! 7. No enablement selector matches → leave, `not_selected`.
//! 8. It has no address yet → wait, `no_address`.
//! 9. Otherwise → enrol.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{
    names,
    reason::Reason,
    selector::{LabelSelector, Labels, null_is_empty},
    workload::Pod,
    yaml::{self, YamlError},
};

/// What shall become of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// It shall be in the mesh.
    Enrol,
    /// It shall not, and is taken out if it is.
    Leave(Reason),
    /// Not decidable, or not feasible, yet. What is established stays as it is: an address that the
    /// kubelet has not posted again after a restart is no reason to take a pod out.
    Wait(Reason),
}

impl Decision {
    /// Why.
    pub fn reason(self) -> Reason {
        match self {
            Self::Enrol => Reason::Selected,
            Self::Leave(reason) | Self::Wait(reason) => reason,
        }
    }
}

/// What the configuration says about eligibility.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// A pod that any of these matches is selected.
    pub selectors: EnablementSelectors,
    /// Namespaces whose pods are never enrolled.
    pub excluded_namespaces: BTreeSet<String>,
    /// Where ztunnel runs.
    pub system_namespace: String,
    /// Where weir runs.
    pub own_namespace: String,
}

impl Policy {
    /// The decision on `pod`; `namespace` is what its namespace is labelled with, as far as known.
    pub fn decide(&self, pod: &Pod, namespace: Option<&Labels>) -> Decision {
        if let Some(reason) = self.never(pod) {
            return Decision::Leave(reason);
        }
        let Some(namespace) = namespace else {
            return Decision::Wait(Reason::NamespaceUnknown);
        };
        if !self.selectors.select(&pod.labels, namespace) {
            return Decision::Leave(Reason::NotSelected);
        }
        if pod.ips.is_empty() {
            return Decision::Wait(Reason::NoAddress);
        }
        Decision::Enrol
    }

    /// Is a pod without a label of its own selected, in a namespace with these labels?
    pub fn selects_all(&self, namespace: &Labels) -> bool {
        self.selectors.select(&Labels::new(), namespace)
    }

    /// What rules a pod out whatever the selectors say.
    fn never(&self, pod: &Pod) -> Option<Reason> {
        let is = |(key, value): (&str, &str)| pod.labels.get(key).is_some_and(|it| it == value);
        let namespace = &pod.info.namespace;
        let rules = [
            (pod.terminal, Reason::Terminal),
            (pod.host_network, Reason::HostNetwork),
            (*namespace == self.system_namespace && is(names::ZTUNNEL_APP), Reason::ZtunnelPod),
            (*namespace == self.own_namespace && is(names::OWN_APP), Reason::OwnPod),
            (self.excluded_namespaces.contains(namespace), Reason::ExcludedNamespace),
            (pod.annotations.contains_key(names::SIDECAR_STATUS), Reason::Sidecar),
        ];
        rules.into_iter().find_map(|(applies, reason)| applies.then_some(reason))
    }
}

/// Istio's `enablementSelectors`: a list in which any element may select a pod. An empty list selects
/// nothing; an element without a selector selects everything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EnablementSelectors(pub Vec<EnablementSelector>);

/// One element: selects a pod when both of its selectors match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EnablementSelector {
    /// On the pod's labels.
    #[serde(deserialize_with = "null_is_empty")]
    pub pod_selector: LabelSelector,
    /// On the labels of its namespace.
    #[serde(deserialize_with = "null_is_empty")]
    pub namespace_selector: LabelSelector,
}

/// A value of `AMBIENT_ENABLEMENT_SELECTOR` that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("enablement selectors: {0}")]
pub struct SelectorError(#[from] YamlError);

impl EnablementSelectors {
    /// Reads Istio's YAML form (JSON is a part of YAML). Anything not understood is an error.
    pub fn from_yaml(text: &str) -> Result<Self, SelectorError> {
        Ok(yaml::read(text)?)
    }

    fn select(&self, pod: &Labels, namespace: &Labels) -> bool {
        self.0.iter().any(|it| it.pod_selector.matches(pod) && it.namespace_selector.matches(namespace))
    }
}

impl Default for EnablementSelectors {
    /// Istio's: the pod's label decides, and where it is neither `ambient` nor `none`, the namespace's.
    fn default() -> Self {
        use super::selector::Requirement;
        let ambient = || Labels::from([(names::DATAPLANE_MODE.to_owned(), "ambient".to_owned())]);
        let not_none = Requirement::NotIn(names::DATAPLANE_MODE.into(), vec!["none".into()]);
        Self(vec![
            EnablementSelector {
                pod_selector: LabelSelector { match_labels: ambient(), ..Default::default() },
                ..Default::default()
            },
            EnablementSelector {
                pod_selector: LabelSelector { match_expressions: vec![not_none], ..Default::default() },
                namespace_selector: LabelSelector { match_labels: ambient(), ..Default::default() },
            },
        ])
    }
}

#[cfg(test)]
#[path = "eligibility_tests.rs"]
mod tests;
