//! What the agent does with the plugin's requests.

use std::{net::IpAddr, os::fd::OwnedFd, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use super::{
    find::{self, Lookup},
    handed::Handed,
};
use crate::{
    cache::{index::Entry, members::Members, pods::Pods},
    domain::{
        cni::{Answer, PodId, Request, RequestVerb},
        eligibility::Decision,
        enrolment::{State, Step},
        reason::Reason,
        workload::PodUid,
    },
    netns::{Netns, interfaces},
    reconcile::Handle,
};

/// Until then an ADD has its answer: before the plugin gives up, which would be the less telling error.
const ADD_PATIENCE: Duration = Duration::from_millis(4500);
/// How long the cache may take to be complete, before the plugin is left to decide by itself.
const SYNC_PATIENCE: Duration = Duration::from_secs(1);
/// How often a decision that may change is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Whose namespace this is, by what is pinned.
pub type OwnerOf = Arc<dyn Fn(u64) -> Option<PodUid> + Send + Sync>;

/// What requests are served from.
pub struct Requests<L> {
    /// The pods.
    pub cache: Arc<Pods>,
    /// What brings them where they belong.
    pub reconciler: Handle,
    /// What was handed over.
    pub handed: Handed,
    /// The ztunnels.
    pub members: Members,
    /// The namespace that never belongs to a pod.
    pub host: Netns,
    /// The API server.
    pub lookup: L,
    /// What is pinned.
    pub owner_of: OwnerOf,
}

impl<L: Lookup> Requests<L> {
    /// Serves one. When the future is dropped before its end, an ADD is undone.
    pub async fn serve(&self, request: &Request, netns: Option<OwnedFd>) -> Answer {
        match (request.verb, netns) {
            (RequestVerb::Add, Some(netns)) => self.add(request, netns).await.unwrap_or_else(|answer| answer),
            (RequestVerb::Add, None) => Answer::Refused { detail: "ADD without a namespace".into() },
            (RequestVerb::Del, netns) => self.del(request, netns).await,
            (RequestVerb::Gc, _) => {
                for uid in self.handed.keep_only(&request.network, &request.valid) {
                    self.cache.sandbox_gone(&uid);
                }
                Answer::Done
            }
            (RequestVerb::Check, _) => self.check(&request.pod),
            (RequestVerb::Status, _) => self.status(),
        }
    }

    /// `Err` is an answer as well: one that is known early.
    async fn add(&self, request: &Request, fd: OwnedFd) -> Result<Answer, Answer> {
        let deadline = Instant::now() + ADD_PATIENCE;
        let netns = self.namespace(fd).await?;
        if timeout(SYNC_PATIENCE, self.cache.synced()).await.is_err() {
            return Err(Answer::Unready { detail: "it has not listed the node's pods yet".into() });
        }
        let uid = self.find(&request.pod, deadline).await?.pod.uid.clone();
        if let Some(Decision::Leave(reason)) = self.decision(&uid) {
            return Ok(Answer::Pass { reason });
        }
        let undo = self.hand_over(&uid, request, &netns).await;
        let answer = self.captured(&uid, netns.cookie(), deadline).await;
        if answer == Answer::Captured {
            undo.keep();
        }
        Ok(answer)
    }

    /// The descriptor, if it is the namespace of a pod.
    async fn namespace(&self, fd: OwnedFd) -> Result<Netns, Answer> {
        let opened = tokio::task::spawn_blocking(move || Netns::from_fd(Arc::new(fd))).await;
        let refused = |detail: String| Answer::Refused { detail };
        match opened {
            Ok(Ok(netns)) if netns.cookie() == self.host.cookie() => {
                Err(refused("the namespace handed over is the node's".into()))
            }
            Ok(Ok(netns)) => Ok(netns),
            Ok(Err(error)) => Err(refused(error.to_string())),
            Err(error) => Err(refused(error.to_string())),
        }
    }

    async fn find(&self, pod: &PodId, deadline: Instant) -> Result<Entry, Answer> {
        find::find(&self.cache, &self.lookup, pod, deadline).await.map_err(|detail| Answer::Failed {
            step: "find".into(),
            reason: Reason::Deleted,
            detail,
        })
    }

    fn decision(&self, uid: &PodUid) -> Option<Decision> {
        self.cache.known(uid).map(|entry| entry.decision)
    }

    async fn hand_over(&self, uid: &PodUid, request: &Request, netns: &Netns) -> Undo<'_> {
        if self.handed.hand(uid, netns, &request.network, &request.attachment) {
            let ips = match request.addresses.as_slice() {
                [] => addresses(netns.clone()).await,
                told => told.to_vec(),
            };
            debug!(pod = %request.pod, %uid, netns = netns.cookie(), ?ips, "sandbox handed over");
            self.cache.sandbox_made(uid, &ips);
        }
        if !self.handed.is_captured(uid) {
            // What is enrolled may be an older sandbox of this pod.
            self.reconciler.recheck([uid.clone()]);
        }
        Undo {
            handed: &self.handed,
            cache: &self.cache,
            uid: uid.clone(),
            cookie: netns.cookie(),
            keep: false,
        }
    }

    /// Waits for it, until the deadline.
    async fn captured(&self, uid: &PodUid, cookie: u64, deadline: Instant) -> Answer {
        let mut changes = self.handed.subscribe();
        loop {
            match self.handed.captured(uid, cookie) {
                Some(true) => return Answer::Captured,
                Some(false) => {}
                None => {
                    let detail = "the sandbox was removed, or another came in its place".into();
                    return Answer::Failed { step: "locate".into(), reason: Reason::NetnsNotFound, detail };
                }
            }
            match self.decision(uid) {
                Some(Decision::Leave(reason)) => return Answer::Pass { reason },
                Some(Decision::Wait(reason)) if Instant::now() >= deadline => {
                    let detail = "nothing was decided about the pod in time".into();
                    return Answer::Failed { step: "decide".into(), reason, detail };
                }
                _ if Instant::now() >= deadline => return self.failure(uid),
                _ => {}
            }
            let look_again = deadline.min(Instant::now() + LOOK_AGAIN);
            let _ = timeout_at(look_again, changes.changed()).await;
        }
    }

    /// Which step the enrolment has not got past, and why.
    fn failure(&self, uid: &PodUid) -> Answer {
        let view = self.reconciler.views().get(uid);
        let slow = view.as_ref().and_then(|view| view.slow);
        match (slow, view.and_then(|view| view.last_error)) {
            (Some(step), _) => Answer::Failed {
                step: step.as_str().into(),
                reason: reason_of(step),
                detail: "has not come to its end in time".into(),
            },
            (None, Some(failure)) => Answer::Failed {
                step: step_of(failure.reason).into(),
                reason: failure.reason,
                detail: failure.detail,
            },
            (None, None) => Answer::Failed {
                step: "enrol".into(),
                reason: Reason::Internal,
                detail: "has not come to its end in time, and nothing has failed: the node is busy".into(),
            },
        }
    }

    async fn del(&self, request: &Request, netns: Option<OwnedFd>) -> Answer {
        let released = self.handed.release(&request.network, &request.attachment);
        // Handed to an earlier agent: what it pinned says whose it is.
        let uid = match (released, netns) {
            (None, Some(fd)) => self.pinned_in(fd).await,
            (released, _) => released,
        };
        if let Some(uid) = uid {
            // Not before the pod is known: what an earlier agent left is taken over when it is.
            let _ = timeout(SYNC_PATIENCE, self.cache.synced()).await;
            self.cache.sandbox_gone(&uid);
        }
        Answer::Done
    }

    async fn pinned_in(&self, fd: OwnedFd) -> Option<PodUid> {
        let owner_of = Arc::clone(&self.owner_of);
        let found =
            tokio::task::spawn_blocking(move || owner_of(Netns::from_fd(Arc::new(fd)).ok()?.cookie()));
        // Where something was handed to this agent, only its attachments count.
        found.await.ok()?.filter(|uid| self.handed.netns(uid).is_none())
    }

    fn check(&self, pod: &PodId) -> Answer {
        let Some(entry) = find::known(&self.cache, pod) else {
            return Answer::Unready { detail: "the pod is not known".into() };
        };
        let uid = &entry.pod.uid;
        let view = self.reconciler.views().get(uid);
        let enrolled = view.is_some_and(|view| match view.state {
            State::Enrolled => true,
            // Being looked at again, or annotated.
            State::Enrolling => self.handed.is_captured(uid),
            _ => false,
        });
        match entry.decision {
            Decision::Leave(reason) => Answer::Pass { reason },
            _ if enrolled => Answer::Captured,
            _ => self.failure(uid),
        }
    }

    fn status(&self) -> Answer {
        if !self.cache.sync().complete() {
            return Answer::Unready { detail: "it has not listed the node's pods yet".into() };
        }
        if self.members.connected() == 0 {
            return Answer::Unready { detail: "no ztunnel is connected".into() };
        }
        Answer::Done
    }

    /// Drops what was handed over for pods that are gone, also where no DEL comes. Runs until dropped.
    pub async fn forget_what_is_gone(self: Arc<Self>) {
        self.cache.synced().await;
        let changes = self.cache.subscribe();
        loop {
            for uid in changes.take().await {
                if self.cache.known(&uid).is_none() {
                    self.handed.forget(&uid);
                }
            }
        }
    }
}

/// Takes a hand-over back when it was of no use.
struct Undo<'a> {
    handed: &'a Handed,
    cache: &'a Pods,
    uid: PodUid,
    cookie: u64,
    keep: bool,
}

impl Undo<'_> {
    fn keep(mut self) {
        self.keep = true;
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        // Captured meanwhile, for another call about the same sandbox: stays.
        let captured = self.handed.captured(&self.uid, self.cookie) == Some(true);
        if !self.keep && !captured && self.handed.withdraw(&self.uid, self.cookie) {
            self.cache.sandbox_gone(&self.uid);
        }
    }
}

/// What the namespace has, where the plugins before ours do not say.
async fn addresses(netns: Netns) -> Vec<IpAddr> {
    let listed = tokio::task::spawn_blocking(move || netns.enter(interfaces::list)).await;
    let Ok(Ok(Ok(interfaces))) = listed else { return Vec::new() };
    let global = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    interfaces.iter().flat_map(|interface| interface.addresses.iter().copied()).filter(global).collect()
}

/// The step that fails for this reason.
fn step_of(reason: Reason) -> &'static str {
    match reason {
        Reason::NetnsNotFound | Reason::NetnsRefused => Step::Locate.as_str(),
        Reason::PrepareFailed => Step::Prepare.as_str(),
        Reason::NoZtunnel | Reason::ZtunnelRefused | Reason::ZtunnelTimeout => Step::Publish.as_str(),
        Reason::SwitchOnFailed => Step::SwitchOn.as_str(),
        Reason::VerifyFailed => Step::Verify.as_str(),
        Reason::AnnotateFailed => "annotate",
        _ => "enrol",
    }
}

/// What a step that does not end is reported as.
fn reason_of(step: Step) -> Reason {
    match step {
        Step::Locate => Reason::NetnsNotFound,
        Step::Prepare => Reason::PrepareFailed,
        Step::Publish => Reason::ZtunnelTimeout,
        Step::SwitchOn => Reason::SwitchOnFailed,
        Step::Verify => Reason::VerifyFailed,
        Step::Annotate(_) => Reason::AnnotateFailed,
        Step::Drain => Reason::DrainFailed,
        Step::Retract => Reason::RetractFailed,
        Step::SwitchOff => Reason::SwitchOffFailed,
        Step::Forget => Reason::ForgetFailed,
    }
}
