//! Why a pod is in the state it is in: one list that logs, status, Events and metrics share.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why. Every value is a stable, machine-readable word ([`Reason::as_str`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    // Why a pod belongs to the mesh, or does not.
    /// A selector picks the pod.
    Selected,
    /// No selector picks the pod.
    NotSelected,
    /// The pod uses the node's network.
    HostNetwork,
    /// The pod has a sidecar.
    Sidecar,
    /// The configuration excludes the pod's namespace.
    ExcludedNamespace,
    /// The pod has ended (`Succeeded` or `Failed`).
    Terminal,
    /// The pod is a ztunnel.
    ZtunnelPod,
    /// The pod is weir's own.
    OwnPod,
    /// The pod is no longer known to the API server.
    Deleted,

    // What a pod waits for before it can be decided or enrolled.
    /// The kubelet has not posted an address.
    NoAddress,
    /// The labels of the pod's namespace are not known.
    NamespaceUnknown,

    // What kept a step from succeeding.
    /// No process of the pod was found whose network namespace has the pod's address.
    NetnsNotFound,
    /// The namespace found may not be enrolled: it is the node's, or another pod's.
    NetnsRefused,
    /// Loading, pinning or attaching failed.
    PrepareFailed,
    /// No ztunnel is connected.
    NoZtunnel,
    /// ztunnel refused the pod.
    ZtunnelRefused,
    /// ztunnel did not answer in time.
    ZtunnelTimeout,
    /// Capture could not be switched on.
    SwitchOnFailed,
    /// The pod is switched on, but a check of the result failed.
    VerifyFailed,
    /// The annotation could not be written.
    AnnotateFailed,
    /// Draining could not be started.
    DrainFailed,
    /// ztunnel has not released the pod.
    RetractFailed,
    /// Capture could not be switched off.
    SwitchOffFailed,
    /// What was kept for a pod that is gone could not be removed.
    ForgetFailed,
    // What a look at a captured pod finds wrong.
    /// The link that attaches steer to the namespace is gone.
    LinkGone,
    /// The pod's programs are those of another build of weir.
    ProgramsOld,
    /// The pod's switches are not as its annotations ask for.
    SwitchesWrong,
    /// The programs do not know the addresses that the pod has.
    AddressesWrong,
    /// A tc filter of ours is missing, or another program is in its place.
    FilterGone,
    /// Somebody else's tc filter sits on a hook of ours.
    ForeignFilter,
    /// A routing rule or route of ours is missing, or one is there that should not be.
    RuleWrong,
    /// A sysctl of the pod is not as capture needs it.
    SysctlWrong,
    /// IPv6 was switched off in a pod that was captured with it.
    Ipv6Off,
    /// ztunnel does not listen in the pod.
    NoListener,
    /// A map of the pod's programs has no more room.
    MapFull,
    /// The pod runs in another namespace than the one that is captured.
    NetnsOther,
    /// The pod is prepared, and not captured yet.
    NotCaptured,

    // Neither of these.
    /// A fault asked for by the test configuration.
    Fault,
    /// A defect in weir itself; the log has more.
    Internal,
}

impl Reason {
    /// Every reason, for metrics that want a series for each.
    pub const ALL: [Self; 39] = [
        Self::Selected,
        Self::NotSelected,
        Self::HostNetwork,
        Self::Sidecar,
        Self::ExcludedNamespace,
        Self::Terminal,
        Self::ZtunnelPod,
        Self::OwnPod,
        Self::Deleted,
        Self::NoAddress,
        Self::NamespaceUnknown,
        Self::NetnsNotFound,
        Self::NetnsRefused,
        Self::PrepareFailed,
        Self::NoZtunnel,
        Self::ZtunnelRefused,
        Self::ZtunnelTimeout,
        Self::SwitchOnFailed,
        Self::VerifyFailed,
        Self::AnnotateFailed,
        Self::DrainFailed,
        Self::RetractFailed,
        Self::SwitchOffFailed,
        Self::ForgetFailed,
        Self::LinkGone,
        Self::ProgramsOld,
        Self::SwitchesWrong,
        Self::AddressesWrong,
        Self::FilterGone,
        Self::ForeignFilter,
        Self::RuleWrong,
        Self::SysctlWrong,
        Self::Ipv6Off,
        Self::NoListener,
        Self::MapFull,
        Self::NetnsOther,
        Self::NotCaptured,
        Self::Fault,
        Self::Internal,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Selected => "selected",
            Self::NotSelected => "not_selected",
            Self::HostNetwork => "host_network",
            Self::Sidecar => "sidecar",
            Self::ExcludedNamespace => "excluded_namespace",
            Self::Terminal => "terminal",
            Self::ZtunnelPod => "ztunnel_pod",
            Self::OwnPod => "own_pod",
            Self::Deleted => "deleted",
            Self::NoAddress => "no_address",
            Self::NamespaceUnknown => "namespace_unknown",
            Self::NetnsNotFound => "netns_not_found",
            Self::NetnsRefused => "netns_refused",
            Self::PrepareFailed => "prepare_failed",
            Self::NoZtunnel => "no_ztunnel",
            Self::ZtunnelRefused => "ztunnel_refused",
            Self::ZtunnelTimeout => "ztunnel_timeout",
            Self::SwitchOnFailed => "switch_on_failed",
            Self::VerifyFailed => "verify_failed",
            Self::AnnotateFailed => "annotate_failed",
            Self::DrainFailed => "drain_failed",
            Self::RetractFailed => "retract_failed",
            Self::SwitchOffFailed => "switch_off_failed",
            Self::ForgetFailed => "forget_failed",
            Self::LinkGone => "link_gone",
            Self::ProgramsOld => "programs_old",
            Self::SwitchesWrong => "switches_wrong",
            Self::AddressesWrong => "addresses_wrong",
            Self::FilterGone => "filter_gone",
            Self::ForeignFilter => "foreign_filter",
            Self::RuleWrong => "rule_wrong",
            Self::SysctlWrong => "sysctl_wrong",
            Self::Ipv6Off => "ipv6_off",
            Self::NoListener => "no_listener",
            Self::MapFull => "map_full",
            Self::NetnsOther => "netns_other",
            Self::NotCaptured => "not_captured",
            Self::Fault => "fault",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What kept a step from succeeding, and the particulars in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{reason}: {detail}")]
pub struct Failure {
    /// The kind of failure.
    pub reason: Reason,
    /// One line for a human: what was tried on what, and what came back.
    pub detail: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn words_are_unique_and_the_ones_serde_writes() {
        let words: BTreeSet<_> = Reason::ALL.iter().map(|r| r.as_str()).collect();
        assert_eq!(words.len(), Reason::ALL.len());
        for reason in Reason::ALL {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
        }
    }
}
