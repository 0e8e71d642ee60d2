//! What weir knows of a pod, free of any Kubernetes type.

use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

/// Kubernetes pod UID. Also the `uid` ztunnel knows a workload by.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(Arc<str>);

impl PodUid {
    /// The UID as the API server writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for PodUid {
    fn from(uid: &str) -> Self {
        Self(uid.into())
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PodUid({})", self.0)
    }
}

/// What ztunnel needs to know of a workload: its identity is made of these three.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkloadInfo {
    /// Pod name.
    pub name: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Service account the pod runs as.
    pub service_account: String,
}

/// Value of the annotation `ambient.istio.io/redirection`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Redirection {
    /// Captured, acknowledged by ztunnel, verified.
    Enabled,
    /// Wanted, but not (or no longer) complete.
    Pending,
}

impl Redirection {
    /// The annotation's value as Istio writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Pending => "pending",
        }
    }
}

/// A pod of this node, reduced to what decides about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Kubernetes UID.
    pub uid: PodUid,
    /// Name, namespace, service account.
    pub info: WorkloadInfo,
    /// Labels, all of them: selectors may name any.
    pub labels: BTreeMap<String, String>,
    /// Only the annotations weir reads.
    pub annotations: BTreeMap<String, String>,
    /// `status.podIPs`, un-mapped; empty until the kubelet has posted them.
    pub ips: Vec<IpAddr>,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// Phase is `Succeeded` or `Failed`.
    pub terminal: bool,
    /// What `ambient.istio.io/redirection` says now. Never trusted, only compared before a patch.
    pub redirection: Option<Redirection>,
    /// `metadata.resourceVersion`. It grows with every change, of fields that are not kept here too.
    pub version: u64,
}

impl Pod {
    /// Is anything different but the version?
    pub fn differs(&self, other: &Self) -> bool {
        let Self { uid, info, labels, annotations, ips, host_network, terminal, redirection, version: _ } =
            self;
        (uid, info, labels, annotations) != (&other.uid, &other.info, &other.labels, &other.annotations)
            || (ips, host_network) != (&other.ips, &other.host_network)
            || (terminal, redirection) != (&other.terminal, &other.redirection)
    }
}

/// What became of an attempt to write the annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Annotated {
    /// It says what it should.
    Done {
        /// The version of the pod that this made.
        version: u64,
    },
    /// That pod no longer exists, though another of the same name may.
    Gone,
}

/// Pods for tests.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::domain::{names, selector::Labels};

    pub(crate) fn ambient() -> Labels {
        Labels::from([(names::DATAPLANE_MODE.into(), "ambient".into())])
    }

    pub(crate) fn pod(uid: &str, namespace: &str, name: &str) -> Pod {
        Pod {
            uid: uid.into(),
            info: WorkloadInfo {
                name: name.into(),
                namespace: namespace.into(),
                service_account: "sa".into(),
            },
            labels: Labels::new(),
            annotations: Labels::new(),
            ips: vec!["10.0.0.1".parse().unwrap()],
            host_network: false,
            terminal: false,
            redirection: None,
            version: 0,
        }
    }

    pub(crate) fn labelled(uid: &str, namespace: &str, name: &str, mode: &str) -> Pod {
        let labels = Labels::from([(names::DATAPLANE_MODE.into(), mode.into())]);
        Pod { labels, ..pod(uid, namespace, name) }
    }
}
