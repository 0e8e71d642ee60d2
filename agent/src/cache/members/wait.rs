//! Waiting for ztunnel: until it serves a pod, until it has let go of one.

use std::time::Duration;

use thiserror::Error;
use tokio::time::{Instant, timeout_at};

use super::{AckedBy, Inner, Members};
use crate::domain::workload::PodUid;

/// Why a pod is not (yet) served.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum AckError {
    /// Nobody was connected when the time was over.
    #[error("no ztunnel is connected")]
    NoZtunnel,
    /// ztunnel refused; it is offered again later, see [`Members::acked_by`].
    #[error("ztunnel: {0}")]
    Nacked(String),
    /// A ztunnel is connected, but did not answer in time.
    #[error("ztunnel did not answer in time")]
    Timeout,
    /// The pod was published anew or retracted meanwhile; the question has no answer any more.
    #[error("the pod changed meanwhile")]
    Superseded,
}

/// Why a pod is not (yet) released.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ReleaseError {
    /// Some ztunnel may still be serving it.
    #[error("ztunnel did not confirm in time that it stopped serving the pod")]
    Timeout,
    /// The pod was published again meanwhile.
    #[error("the pod was added again meanwhile")]
    Superseded,
}

impl Members {
    /// Waits until a connected ztunnel serves the pod as of `generation`, that is: until its listeners
    /// are up. A refusal is returned at once.
    pub async fn wait_acked(
        &self,
        uid: &PodUid,
        generation: u64,
        timeout: Duration,
    ) -> Result<AckedBy, AckError> {
        let settled = self.wait(timeout, |inner| inner.ack_of(uid, generation)).await;
        settled.unwrap_or_else(|| {
            Err(if self.connected() == 0 { AckError::NoZtunnel } else { AckError::Timeout })
        })
    }

    /// Waits until no connected ztunnel serves a retracted pod any more. With none connected that is at
    /// once: one that comes later learns from its snapshot.
    pub async fn wait_released(&self, uid: &PodUid, timeout: Duration) -> Result<(), ReleaseError> {
        self.wait(timeout, |inner| inner.release_of(uid)).await.unwrap_or(Err(ReleaseError::Timeout))
    }

    async fn wait<T>(&self, timeout: Duration, mut look: impl FnMut(&Inner) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut version = self.subscribe();
        loop {
            version.mark_unchanged();
            if let Some(found) = look(&self.inner()) {
                return Some(found);
            }
            // The sender lives in `self`: only the deadline can end this.
            timeout_at(deadline, version.changed()).await.ok()?.ok()?;
        }
    }
}

impl Inner {
    fn ack_of(&self, uid: &PodUid, generation: u64) -> Option<Result<AckedBy, AckError>> {
        if self.roster.members.get(uid).is_none_or(|m| m.generation != generation) {
            return Some(Err(AckError::Superseded));
        }
        if let Some(&by) = self.acked_by(uid, generation).first() {
            return Some(Ok(by));
        }
        let nack = self.views.values().rev().find_map(|view| view.nack_of(uid, generation));
        nack.map(|text| Err(AckError::Nacked(text.to_owned())))
    }

    fn release_of(&self, uid: &PodUid) -> Option<Result<(), ReleaseError>> {
        if self.roster.members.contains_key(uid) {
            return Some(Err(ReleaseError::Superseded));
        }
        (!self.views.values().any(|view| view.may_hold(uid))).then_some(Ok(()))
    }
}
