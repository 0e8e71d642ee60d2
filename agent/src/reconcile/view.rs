//! Where each pod stands, for `status`, metrics and readiness.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use crate::domain::{
    enrolment::{State, Step},
    reason::{Failure, Reason},
    workload::{PodUid, WorkloadInfo},
};

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    /// The pod.
    pub uid: PodUid,
    /// Name, namespace, service account. Absent for a pod left by an earlier agent that no longer exists.
    pub info: Option<WorkloadInfo>,
    /// Where it stands.
    pub state: State,
    /// Why: the last failure's reason, else the decision's.
    pub reason: Reason,
    /// In this state since.
    pub since: SystemTime,
    /// What the last attempt failed with, until one succeeds.
    pub last_error: Option<Failure>,
    /// Attempts that have failed in a row.
    pub failed_attempts: u32,
    /// A step that takes unusually long, while it does.
    pub slow: Option<Step>,
    /// The ztunnel that took the pod.
    pub acked_by: Option<String>,
    /// Connections that were there before the pod was enrolled.
    pub old_connections: usize,
    /// Changes of direction so far.
    pub generation: u64,
}

/// All pods. Clones share it. No reader waits for more than the copying of one entry.
#[derive(Clone, Debug, Default)]
pub struct Views(Arc<Mutex<HashMap<PodUid, PodView>>>);

impl Views {
    /// The pod of this UID.
    pub fn get(&self, uid: &PodUid) -> Option<PodView> {
        self.with(|views| views.get(uid).cloned())
    }

    /// All pods, by namespace and name.
    pub fn list(&self) -> Vec<PodView> {
        let mut all: Vec<PodView> = self.with(|views| views.values().cloned().collect());
        let key = |view: &PodView| {
            let info = view.info.as_ref();
            (info.map(|i| i.namespace.clone()), info.map(|i| i.name.clone()), view.uid.clone())
        };
        all.sort_by_cached_key(key);
        all
    }

    /// How many pods there are of each kind.
    pub fn count(&self) -> HashMap<(State, Reason), usize> {
        self.with(|views| {
            views.values().fold(HashMap::new(), |mut counts, view| {
                *counts.entry((view.state, view.reason)).or_default() += 1;
                counts
            })
        })
    }

    /// Shows `view`; `since` is kept when the state is the same as before.
    pub(super) fn show(&self, mut view: PodView) {
        self.with(|views| {
            if let Some(before) = views.get(&view.uid).filter(|before| before.state == view.state) {
                view.since = before.since;
            }
            views.insert(view.uid.clone(), view);
        });
    }

    /// Notes that a step of this pod takes long, or no longer does.
    pub(super) fn slow(&self, uid: &PodUid, step: Option<Step>) {
        self.with(|views| {
            if let Some(view) = views.get_mut(uid) {
                view.slow = step;
            }
        });
    }

    pub(super) fn remove(&self, uid: &PodUid) {
        self.with(|views| views.remove(uid));
    }

    fn with<T>(&self, access: impl FnOnce(&mut HashMap<PodUid, PodView>) -> T) -> T {
        access(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
