//! What each reason means for who reads it, and what to do about it.

use super::reason::Reason;

impl Reason {
    /// What it means, in one sentence.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Selected => "a selector picks the pod",
            Self::NotSelected => "neither the pod nor its namespace is labelled into the mesh",
            Self::HostNetwork => "the pod uses the node's network, which is never captured",
            Self::Sidecar => "the pod has a sidecar, which takes its traffic",
            Self::ExcludedNamespace => "the configuration excludes the pod's namespace",
            Self::Terminal => "the pod has ended",
            Self::ZtunnelPod => "the pod is a ztunnel",
            Self::OwnPod => "the pod is weir's own",
            Self::Deleted => "the pod is gone",
            Self::NoAddress => "the kubelet has not posted an address of the pod",
            Self::NamespaceUnknown => "the labels of the pod's namespace have not been read yet",
            Self::NetnsNotFound => "no process of the pod was found on this node",
            Self::NetnsRefused => "the pod's processes are in a namespace that has none of its addresses",
            Self::PrepareFailed => "programs, maps or filters could not be put into the pod",
            Self::NoZtunnel => "no ztunnel is connected to the agent",
            Self::ZtunnelRefused => "ztunnel refused the pod, in its own words",
            Self::ZtunnelTimeout => "ztunnel did not answer in time",
            Self::SwitchOnFailed => "capture could not be switched on",
            Self::VerifyFailed => "the check after switching on found something missing",
            Self::AnnotateFailed => "the API server did not take the annotation",
            Self::DrainFailed => "draining could not be started",
            Self::RetractFailed => "ztunnel has not let go of the pod",
            Self::SwitchOffFailed => "capture could not be switched off as a whole",
            Self::ForgetFailed => "what was kept of a pod that is gone could not be removed",
            Self::LinkGone => "steer is not attached to the pod's namespace: inbound traffic is not captured",
            Self::ProgramsOld => "the pod's programs are those of another build of weir",
            Self::SwitchesWrong => "the pod's switches are not as its annotations ask for",
            Self::AddressesWrong => "the pod has other addresses than its programs know",
            Self::FilterGone => "a tc filter of ours is missing or replaced",
            Self::ForeignFilter => "another program filters the pod's packets beside ours",
            Self::RuleWrong => "routing rules or routes of the pod are missing or too many",
            Self::SysctlWrong => "a sysctl of the pod has been changed",
            Self::Ipv6Off => "IPv6 was switched off in a pod that was captured with it",
            Self::NoListener => "ztunnel does not listen in the pod: its connections are refused",
            Self::MapFull => "a map of the pod's programs has no more room",
            Self::NetnsOther => "the pod's processes are in another namespace than the one that is captured",
            Self::NotCaptured => "the pod is prepared and not captured yet",
            Self::Fault => "a fault asked for by the test configuration",
            Self::Internal => "a defect in weir",
        }
    }

    /// What to do about it; none where all is as it is meant to be.
    pub fn remedy(self) -> Option<&'static str> {
        Some(match self {
            Self::Selected
            | Self::Terminal
            | Self::ZtunnelPod
            | Self::OwnPod
            | Self::Deleted
            | Self::Fault => {
                return None;
            }
            Self::NotSelected => "label the pod or its namespace istio.io/dataplane-mode=ambient",
            Self::HostNetwork => "run the pod without hostNetwork if it shall be in the mesh",
            Self::Sidecar => "remove the sidecar's injection, and make the pod anew",
            Self::ExcludedNamespace => "take the namespace out of excludeNamespaces",
            Self::NoAddress => {
                "look at the pod's Events: its sandbox was not made, or the kubelet does not report"
            }
            Self::NamespaceUnknown => "see /readyz and the agent's access to namespaces",
            Self::NetnsNotFound => {
                "see that the host's /proc is mounted (--proc) and the pod's containers run"
            }
            Self::NetnsRefused => {
                "a process in a foreign namespace hides the pod's: see the process that is named"
            }
            Self::PrepareFailed | Self::SwitchOnFailed => {
                "it is tried again; the detail has the kernel's answer"
            }
            Self::NoZtunnel => "see that ztunnel runs on this node, and that both use the same socket",
            Self::ZtunnelRefused | Self::ZtunnelTimeout => {
                "see ztunnel's log for this pod; its descriptor limit is a common cause"
            }
            Self::VerifyFailed => "the agent repairs and tries again; the detail says what was missing",
            Self::AnnotateFailed => "see the agent's rights on pods/status, and that the API server answers",
            Self::DrainFailed | Self::SwitchOffFailed | Self::ForgetFailed => {
                "it is tried again; the detail has the kernel's answer"
            }
            Self::RetractFailed => "see ztunnel's log; it is tried again",
            Self::LinkGone
            | Self::ProgramsOld
            | Self::SwitchesWrong
            | Self::AddressesWrong
            | Self::FilterGone
            | Self::RuleWrong
            | Self::SysctlWrong => "a running agent puts it back; find out who took it if it comes again",
            Self::ForeignFilter => {
                "find its owner with tc filter show and bpftool net in the pod's namespace; see that it lets packets on"
            }
            Self::Ipv6Off => "switch IPv6 on again in the pod, or make the pod anew without IPv6",
            Self::NoListener => {
                "see that ztunnel runs and has acknowledged the pod; the agent tells it again"
            }
            Self::MapFull => {
                "the detail names the map: fewer addresses or exclusions, or fewer DNS queries at once"
            }
            Self::NetnsOther => "a running agent enrols the new namespace; see its log if it does not",
            Self::NotCaptured => "see the agent's log for the step that has not succeeded",
            Self::Internal => "report it with the agent's log",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_says_what_it_means_in_one_line() {
        for reason in Reason::ALL {
            for text in [Some(reason.meaning()), reason.remedy()].into_iter().flatten() {
                assert!(
                    !text.is_empty() && text.lines().count() == 1 && !text.ends_with('.'),
                    "{reason}: {text}"
                );
            }
        }
    }
}
