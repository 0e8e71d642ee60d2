//! The set of pods every ztunnel of this node shall know: one truth for all ZDS connections.
//!
//! Nothing is queued. Publishing and retracting change the set and mark the pod in each connection's
//! [`view`]; a connection asks for its next step when it has time for one, and gets what is true by then.
//! A pod that came and went meanwhile costs nothing, and memory is bounded by pods times connections.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use thiserror::Error;
use tokio::{sync::watch, time::Instant};

use crate::{
    domain::workload::{PodUid, WorkloadInfo},
    zds::codec::{MAX_REQUEST, Request},
};

mod view;
mod wait;

pub use view::{Action, Next, UnexpectedNack};
use view::{NetnsId, View};
pub use wait::{AckError, ReleaseError};

/// Default of [`Members::new`]: as often as ztunnel itself tries again.
const NACK_BACKOFF: Duration = Duration::from_secs(5);

/// Handle to the set; clones share it.
#[derive(Clone, Debug)]
pub struct Members {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// Changes of the set and of who is newest: what a connection has to act on.
    work: watch::Sender<u64>,
    /// Every change, answers included: what a waiter or `status` looks at.
    version: watch::Sender<u64>,
    nack_backoff: Duration,
}

#[derive(Debug, Default)]
struct Inner {
    roster: Roster,
    /// By age: the last one is the newest.
    views: BTreeMap<u64, View>,
    last_session: u64,
}

/// The set itself, without the connections.
#[derive(Debug, Default)]
struct Roster {
    complete: bool,
    last_generation: u64,
    members: BTreeMap<PodUid, Member>,
    owners: HashMap<NetnsId, PodUid>,
}

/// A pod of the set.
#[derive(Debug)]
struct Member {
    info: WorkloadInfo,
    netns: Option<Netns>,
    generation: u64,
    /// Generation in which `info` became what it is. A ztunnel that was told an older one ignores the new
    /// info until it has been told to forget the pod.
    info_since: u64,
}

/// What came of putting a pod into the set.
struct Published {
    generation: u64,
    changed: bool,
    /// To be closed without the lock.
    _unused: Option<Netns>,
}

#[derive(Clone, Debug)]
struct Netns {
    fd: Arc<OwnedFd>,
    id: NetnsId,
}

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// As the kernel reports it; `None` for a process outside our PID namespace.
    pub pid: Option<i32>,
    /// Effective user.
    pub uid: u32,
}

/// Which connection acknowledged a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckedBy {
    /// Number of the connection, counted from the agent's start.
    pub session: u64,
    /// Who it is.
    pub peer: Peer,
}

/// A connection as `status` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    /// Number of the connection, counted from the agent's start.
    pub session: u64,
    /// Who it is.
    pub peer: Peer,
    /// It is the one new pods are added to.
    pub newest: bool,
    /// It has acknowledged its snapshot.
    pub snapshot_done: bool,
    /// Pods it acknowledged.
    pub acked: usize,
    /// Pods it refused, with its words.
    pub nacked: Vec<(PodUid, String)>,
}

/// Why a pod cannot be in the set.
#[derive(Debug, Error)]
pub enum PublishError {
    /// ztunnel would listen twice in one pod and share its traffic at random.
    #[error("network namespace already belongs to pod {0}")]
    NetnsTaken(PodUid),
    /// ztunnel would drop the connection over it, again and again.
    #[error("name, namespace and service account make a message of {0} bytes, ztunnel takes {MAX_REQUEST}")]
    TooLong(usize),
    /// The descriptor is of no use.
    #[error("network namespace cannot be identified: {0}")]
    Netns(#[source] io::Error),
}

impl Default for Members {
    fn default() -> Self {
        Self::new(NACK_BACKOFF)
    }
}

impl Members {
    /// An empty set that is not complete yet. `nack_backoff` is the pause before a refused pod is offered
    /// again.
    pub fn new(nack_backoff: Duration) -> Self {
        let (inner, work, version) = Default::default();
        Self { shared: Arc::new(Shared { inner, work, version, nack_backoff }) }
    }

    /// Puts a pod into the set, or changes what is known of it. The answer is its generation: the same as
    /// before if nothing changed.
    ///
    /// Without a namespace the pod is only kept by ztunnels that serve it already; publish it again when
    /// the namespace is known. On an error the set is as it was.
    pub fn publish(
        &self,
        uid: PodUid,
        info: WorkloadInfo,
        netns: Option<Arc<OwnedFd>>,
    ) -> Result<u64, PublishError> {
        let len = Request::Add { uid: uid.clone(), info: info.clone() }.encoded_len();
        if len > MAX_REQUEST {
            return Err(PublishError::TooLong(len));
        }
        let netns = netns.map(|fd| NetnsId::of(&fd).map(|id| Netns { fd, id }));
        let netns = netns.transpose().map_err(PublishError::Netns)?;
        let mut inner = self.inner();
        let published = inner.roster.publish(&uid, info, netns)?;
        if published.changed {
            inner.mark(&uid);
            self.work_changed(inner);
        }
        Ok(published.generation)
    }

    /// Takes a pod out of the set; every connection that was told of it will tell its ztunnel. See
    /// [`Members::wait_released`].
    pub fn retract(&self, uid: &PodUid) {
        let mut inner = self.inner();
        // Held to the end: its descriptor is closed without the lock.
        let gone = inner.roster.retract(uid);
        if gone.is_some() {
            inner.mark(uid);
            self.work_changed(inner);
        }
    }

    /// Says that every pod of the node has been considered. Until then no snapshot is sent: it would cut
    /// the pods that are missing from it.
    pub fn set_complete(&self) {
        let mut inner = self.inner();
        inner.roster.complete = true;
        self.work_changed(inner);
    }

    /// Whether [`Members::set_complete`] was called.
    pub fn is_complete(&self) -> bool {
        self.inner().roster.complete
    }

    /// Number of pods in the set.
    pub fn len(&self) -> usize {
        self.inner().roster.members.len()
    }

    /// Whether the set has no pod.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Generation of a pod, if it is in the set.
    pub fn generation(&self, uid: &PodUid) -> Option<u64> {
        self.inner().roster.members.get(uid).map(|m| m.generation)
    }

    /// Number of ztunnels connected.
    pub fn connected(&self) -> usize {
        self.inner().views.len()
    }

    /// Connections that acknowledged the pod as it is now, the newest first.
    pub fn acked_by(&self, uid: &PodUid) -> Vec<AckedBy> {
        let inner = self.inner();
        inner.roster.members.get(uid).map(|m| inner.acked_by(uid, m.generation)).unwrap_or_default()
    }

    /// All connections, the oldest first.
    pub fn sessions(&self) -> Vec<SessionStatus> {
        let inner = self.inner();
        let newest = inner.newest();
        let status = |(&session, view): (&u64, &View)| SessionStatus {
            session,
            peer: view.peer(),
            newest: Some(session) == newest,
            snapshot_done: view.snapshot_done(),
            acked: view.acked(),
            nacked: view.nacked(),
        };
        inner.views.iter().map(status).collect()
    }

    /// A number that changes with everything in here: pods, connections and answers.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.shared.version.subscribe()
    }

    /// Enters a connection. From now on nothing that happens to the set escapes it, and it is the newest.
    pub fn register(&self, peer: Peer) -> Session {
        let mut inner = self.inner();
        inner.last_session += 1;
        let id = inner.last_session;
        let view = View::new(peer, inner.roster.members.keys().cloned());
        inner.views.insert(id, view);
        let work = self.shared.work.subscribe();
        self.work_changed(inner);
        Session { members: self.clone(), id, work }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.shared.inner.lock().expect("nobody panics holding the set")
    }

    /// Lets go of the set, then wakes whoever has to look at it.
    fn work_changed(&self, inner: MutexGuard<'_, Inner>) {
        drop(inner);
        self.shared.work.send_modify(|v| *v += 1);
        self.shared.version.send_modify(|v| *v += 1);
    }
}

impl Inner {
    fn newest(&self) -> Option<u64> {
        self.views.last_key_value().map(|(&id, _)| id)
    }

    fn mark(&mut self, uid: &PodUid) {
        for view in self.views.values_mut() {
            view.mark(uid.clone());
        }
    }

    fn acked_by(&self, uid: &PodUid, generation: u64) -> Vec<AckedBy> {
        let acked = self.views.iter().rev().filter(|(_, view)| view.has_acked(uid, generation));
        acked.map(|(&session, view)| AckedBy { session, peer: view.peer() }).collect()
    }
}

impl Roster {
    fn publish(
        &mut self,
        uid: &PodUid,
        info: WorkloadInfo,
        netns: Option<Netns>,
    ) -> Result<Published, PublishError> {
        let id = netns.as_ref().map(|n| n.id);
        if let Some(owner) = id.and_then(|id| self.owners.get(&id)).filter(|&owner| owner != uid) {
            return Err(PublishError::NetnsTaken(owner.clone()));
        }
        let before = self.members.get(uid);
        let same_info = before.is_some_and(|m| m.info == info);
        let same_netns = before.is_some_and(|m| m.netns.as_ref().map(|n| n.id) == id);
        if let Some(member) = before.filter(|_| same_info && same_netns) {
            return Ok(Published { generation: member.generation, changed: false, _unused: netns });
        }
        let info_since = before.filter(|_| same_info).map(|m| m.info_since);
        if let Some(left) = before.and_then(|m| m.netns.as_ref()) {
            self.owners.remove(&left.id);
        }
        self.owners.extend(id.map(|id| (id, uid.clone())));
        self.last_generation += 1;
        let generation = self.last_generation;
        let info_since = info_since.unwrap_or(generation);
        let replaced = self.members.insert(uid.clone(), Member { info, netns, generation, info_since });
        Ok(Published { generation, changed: true, _unused: replaced.and_then(|m| m.netns) })
    }

    fn retract(&mut self, uid: &PodUid) -> Option<Member> {
        let member = self.members.remove(uid)?;
        if let Some(netns) = &member.netns {
            self.owners.remove(&netns.id);
        }
        Some(member)
    }
}

/// A connection's hold on the set; dropping it takes the connection out, and the previous one becomes the
/// newest and catches up.
#[derive(Debug)]
pub struct Session {
    members: Members,
    id: u64,
    work: watch::Receiver<u64>,
}

impl Session {
    /// Number of the connection, counted from the agent's start.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The next thing to tell this ztunnel. After [`Next::Send`] call [`Session::answered`] before asking
    /// again.
    pub fn next_step(&mut self) -> Next {
        // Seen before looked at: a change in between wakes us once too often, never once too seldom.
        self.work.mark_unchanged();
        let mut inner = self.members.inner();
        let newest = inner.newest() == Some(self.id);
        let Inner { roster, views, .. } = &mut *inner;
        let view = views.get_mut(&self.id).expect("entered at register, taken out at drop");
        view.next(roster, newest, Instant::now())
    }

    /// Takes ztunnel's answer to what [`Session::next_step`] said last. Only an Add may be refused.
    pub fn answered(&mut self, answer: Result<(), String>) -> Result<(), UnexpectedNack> {
        let mut inner = self.members.inner();
        let retry = Instant::now() + self.members.shared.nack_backoff;
        let Inner { roster, views, .. } = &mut *inner;
        let view = views.get_mut(&self.id).expect("entered at register, taken out at drop");
        let result = view.answered(answer, roster, retry);
        drop(inner);
        self.members.shared.version.send_modify(|v| *v += 1);
        result
    }

    /// Returns when there may be something new to ask for. Cancel-safe.
    pub async fn changed(&mut self) {
        // The sender lives in `members`, which we hold.
        let _ = self.work.changed().await;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut inner = self.members.inner();
        inner.views.remove(&self.id);
        let Inner { roster, views, .. } = &mut *inner;
        if let Some(mut newest) = views.last_entry() {
            newest.get_mut().catch_up(roster.members.keys().cloned());
        }
        self.members.work_changed(inner);
    }
}
