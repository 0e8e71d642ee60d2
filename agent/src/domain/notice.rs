//! What the user of a pod is told about it, apart from its state: becomes a Kubernetes Event.

use std::sync::Arc;

use super::{enrolment::Step, overrides::BadAnnotation, reason::Failure, workload::Pod};

/// One thing that happened to one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The pod it happened to.
    pub pod: Arc<Pod>,
    /// What happened.
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A pod that was running already has been enrolled.
    Enrolled {
        /// Connections that existed then and go on outside the mesh.
        old_connections: usize,
    },
    /// Enrolment or removal does not get past a step. Told once per reason, not per attempt.
    Stuck {
        /// The step.
        step: Step,
        /// What it failed with.
        failure: Failure,
    },
    /// An enrolled pod that had lost something is complete again.
    Repaired,
    /// The pod has left the mesh.
    Unenrolled,
    /// An annotation means nothing; the default holds.
    BadAnnotation(BadAnnotation),
}
