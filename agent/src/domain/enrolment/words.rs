//! What the machine is told, and what it answers.

use serde::{Deserialize, Serialize};

use crate::domain::{eligibility::Decision, reason::Reason, workload::Redirection};

/// One thing to do for one pod. Every step may be repeated at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Find the pod's network namespace.
    Locate,
    /// Load, pin and attach what will capture, without capturing.
    Prepare,
    /// Hand the namespace to ztunnel and wait until it listens there.
    Publish,
    /// Adopt the connections that exist, then capture.
    SwitchOn,
    /// Check that what is there does what it should.
    Verify,
    /// Write or remove the annotation.
    Annotate(Option<Redirection>),
    /// Drop new connections silently while the pod is on its way out.
    Drain,
    /// Take the pod from every ztunnel and wait until each has let go.
    Retract,
    /// Stop capturing and remove everything from the namespace.
    SwitchOff,
    /// Remove what is kept for a pod outside of its namespace.
    Forget,
}

impl Step {
    /// Every step.
    pub const ALL: [Self; 12] = [
        Self::Locate,
        Self::Prepare,
        Self::Publish,
        Self::SwitchOn,
        Self::Verify,
        Self::Annotate(Some(Redirection::Enabled)),
        Self::Annotate(Some(Redirection::Pending)),
        Self::Annotate(None),
        Self::Drain,
        Self::Retract,
        Self::SwitchOff,
        Self::Forget,
    ];

    /// The word for it, in logs, metrics and the test configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Locate => "locate",
            Self::Prepare => "prepare",
            Self::Publish => "publish",
            Self::SwitchOn => "switch_on",
            Self::Verify => "verify",
            Self::Annotate(Some(Redirection::Enabled)) => "annotate_enabled",
            Self::Annotate(Some(Redirection::Pending)) => "annotate_pending",
            Self::Annotate(None) => "unannotate",
            Self::Drain => "drain",
            Self::Retract => "retract",
            Self::SwitchOff => "switch_off",
            Self::Forget => "forget",
        }
    }
}

/// What is wanted of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// In the mesh.
    Enrol,
    /// Out of the mesh.
    Leave,
    /// Out of the mesh, and its namespace is going or gone: nothing is done in there any more. The pod
    /// itself may still exist and have an annotation to be removed.
    Forget,
    /// As it is.
    Hold,
}

impl From<Option<Decision>> for Goal {
    /// The goal behind a decision; there is none about a pod that is gone.
    fn from(decision: Option<Decision>) -> Self {
        match decision {
            None | Some(Decision::Leave(Reason::Terminal)) => Self::Forget,
            Some(Decision::Leave(_)) => Self::Leave,
            Some(Decision::Enrol) => Self::Enrol,
            Some(Decision::Wait(_)) => Self::Hold,
        }
    }
}

/// Where a pod stands, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Not in the mesh, and nothing of ours is in it.
    Outside,
    /// Selected, but something that is not in our hands is missing.
    Waiting,
    /// On its way in.
    Enrolling,
    /// Captured, acknowledged, verified, annotated.
    Enrolled,
    /// Wanted in the mesh; the last attempt failed and will be repeated.
    Pending,
    /// On its way out.
    Leaving,
}

impl State {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Outside => "outside",
            Self::Waiting => "waiting",
            Self::Enrolling => "enrolling",
            Self::Enrolled => "enrolled",
            Self::Pending => "pending",
            Self::Leaving => "leaving",
        }
    }
}
