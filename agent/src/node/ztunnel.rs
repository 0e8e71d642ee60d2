//! The ztunnels of this node, as the reconciler drives them: by what the one set of members says.

use std::{sync::Arc, time::Duration};

use crate::{
    cache::members::{AckError, Members},
    domain::{
        reason::{Failure, Reason},
        workload::{PodUid, WorkloadInfo},
    },
    reconcile::{Handle, Netns, Published, Ztunnel},
    redirect,
};

/// Longer than the reconciler's own deadline, which is the one that counts.
const PATIENCE: Duration = Duration::from_secs(60);

/// See [`Ztunnel`].
pub struct Port {
    members: Members,
}

impl Port {
    /// Over this set.
    pub fn new(members: Members) -> Self {
        Self { members }
    }
}

impl Port {
    /// Makes the pod a member and waits for what ztunnel says.
    async fn tell(&self, uid: &PodUid, info: &WorkloadInfo, netns: &Netns) -> Published {
        let generation = match self.members.publish(uid.clone(), info.clone(), Some(Arc::clone(netns.fd()))) {
            Ok(generation) => generation,
            Err(error) => return Published::Nacked(format!("not sent: {error}")),
        };
        if self.members.connected() == 0 {
            // Told to the first that comes; the pod is tried again then.
            return Published::NoZtunnel;
        }
        match self.members.wait_acked(uid, generation, PATIENCE).await {
            Ok(by) => {
                let pid = by.peer.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
                Published::Acked(format!("ztunnel pid {pid}, connection {}", by.session))
            }
            Err(AckError::Nacked(words)) => Published::Nacked(words),
            Err(AckError::NoZtunnel) => Published::NoZtunnel,
            Err(_) => Published::Timeout,
        }
    }
}

/// Whether all of ztunnel's listeners are in the namespace. Where that cannot be seen, the later check says why.
async fn listens(netns: &Netns) -> bool {
    let netns = netns.clone();
    let looked = tokio::task::spawn_blocking(move || redirect::missing_listeners(&netns));
    looked.await.is_ok_and(|missing| missing.map_or(true, |missing| missing.is_empty()))
}

impl Ztunnel for Port {
    fn restore(&self, uid: &PodUid, info: &WorkloadInfo, netns: Option<Netns>) {
        if let Err(error) =
            self.members.publish(uid.clone(), info.clone(), netns.map(|netns| Arc::clone(netns.fd())))
        {
            tracing::warn!(%uid, %error, "not in the first snapshot");
        }
    }

    async fn publish(&self, uid: &PodUid, info: &WorkloadInfo, netns: Netns) -> Published {
        let published = self.tell(uid, info, &netns).await;
        if matches!(published, Published::Acked(_)) && !listens(&netns).await {
            // It acknowledged once, and its listeners have gone since. It ignores a second Add of what it knows.
            tracing::warn!(%uid, "ztunnel has acknowledged the pod but does not listen in it; it is told again");
            if self.retract(uid).await.is_ok() {
                return self.tell(uid, info, &netns).await;
            }
        }
        published
    }

    async fn retract(&self, uid: &PodUid) -> Result<(), Failure> {
        self.members.retract(uid);
        self.members
            .wait_released(uid, PATIENCE)
            .await
            .map_err(|error| Failure::new(Reason::RetractFailed, error.to_string()))
    }
}

/// Has pods that wait for a ztunnel tried again as soon as one comes, or answers.
pub async fn retry_on_arrival(members: Members, reconciler: Handle) {
    let mut changes = members.subscribe();
    let mut before = members.connected();
    while changes.changed().await.is_ok() {
        let now = members.connected();
        if now > before {
            reconciler.retry_now();
        }
        before = now;
    }
}
