//! What one connection has told its ztunnel, and what follows from it. Pure: no socket, no lock, no clock.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use nix::sys::stat::fstat;
use thiserror::Error;
use tokio::time::Instant;

use super::{Member, Netns, Peer, Roster};
use crate::domain::workload::{PodUid, WorkloadInfo};

/// Identity of a namespace as ztunnel sees it. No inode is reused while a descriptor is held, and every
/// member's is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NetnsId {
    dev: u64,
    ino: u64,
}

impl NetnsId {
    pub(super) fn of(fd: &impl AsFd) -> io::Result<Self> {
        let stat = fstat(fd)?;
        Ok(Self { dev: stat.st_dev, ino: stat.st_ino })
    }
}

/// Something to tell ztunnel.
#[derive(Clone, Debug)]
pub enum Action {
    /// Serve a pod.
    Add {
        /// Which.
        uid: PodUid,
        /// Who it is.
        info: WorkloadInfo,
        /// Where: goes along with the message.
        netns: Arc<OwnedFd>,
    },
    /// Leave a pod running. Only ever before [`Action::SnapshotSent`].
    Keep(PodUid),
    /// Stop serving a pod.
    Del(PodUid),
    /// Everything has been named. Exactly once a connection.
    SnapshotSent,
}

/// What a connection shall do next.
#[derive(Clone, Debug)]
pub enum Next {
    /// Tell this, and wait for the answer.
    Send(Action),
    /// Nothing until the set changes, or until then.
    Idle(Option<Instant>),
}

/// ztunnel refused what it never refuses: the two ends do not agree on what was said.
#[derive(Debug, Error)]
#[error("ztunnel refused {action}: {text}")]
pub struct UnexpectedNack {
    action: &'static str,
    text: String,
}

#[derive(Debug)]
pub(super) struct View {
    peer: Peer,
    snapshot_done: bool,
    told: BTreeMap<PodUid, Told>,
    /// Namespaces of what was told: two pods of one namespace must never be there at once.
    held: HashMap<NetnsId, PodUid>,
    /// Pods to be looked at.
    dirty: BTreeSet<PodUid>,
    /// Refused pods, by when to offer them again.
    retries: BTreeSet<(Instant, PodUid)>,
    in_flight: Option<InFlight>,
}

/// What ztunnel was last told of a pod.
#[derive(Debug)]
struct Told {
    generation: u64,
    /// `None`: only kept.
    netns: Option<NetnsId>,
    answer: Answer,
}

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Awaited,
    Acked,
    Nacked { text: String, retry: Instant },
}

#[derive(Debug)]
enum InFlight {
    Add(PodUid),
    Keep,
    Del(PodUid),
    Snapshot,
}

impl View {
    pub(super) fn new(peer: Peer, members: impl Iterator<Item = PodUid>) -> Self {
        let (told, held, retries) = Default::default();
        Self { peer, snapshot_done: false, told, held, dirty: members.collect(), retries, in_flight: None }
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    pub(super) fn snapshot_done(&self) -> bool {
        self.snapshot_done
    }

    /// The pod has changed, come or gone.
    pub(super) fn mark(&mut self, uid: PodUid) {
        self.dirty.insert(uid);
    }

    /// Has become the newest: whatever others were told is now for this one.
    pub(super) fn catch_up(&mut self, members: impl Iterator<Item = PodUid>) {
        self.dirty.extend(members);
    }

    pub(super) fn has_acked(&self, uid: &PodUid, generation: u64) -> bool {
        let acked = |t: &Told| t.generation == generation && t.netns.is_some() && t.answer == Answer::Acked;
        self.told.get(uid).is_some_and(acked)
    }

    pub(super) fn nack_of(&self, uid: &PodUid, generation: u64) -> Option<&str> {
        match self.told.get(uid) {
            Some(Told { generation: g, answer: Answer::Nacked { text, .. }, .. }) if *g == generation => {
                Some(text)
            }
            _ => None,
        }
    }

    pub(super) fn acked(&self) -> usize {
        self.told.values().filter(|t| t.netns.is_some() && t.answer == Answer::Acked).count()
    }

    pub(super) fn nacked(&self) -> Vec<(PodUid, String)> {
        let nacked = |(uid, told): (&PodUid, &Told)| match &told.answer {
            Answer::Nacked { text, .. } => Some((uid.clone(), text.clone())),
            _ => None,
        };
        self.told.iter().filter_map(nacked).collect()
    }

    /// Whether ztunnel may be serving the pod. Before its snapshot it may be serving anything, from an
    /// earlier connection.
    pub(super) fn may_hold(&self, uid: &PodUid) -> bool {
        !self.snapshot_done || self.told.contains_key(uid)
    }

    pub(super) fn next(&mut self, roster: &Roster, newest: bool, now: Instant) -> Next {
        debug_assert!(self.in_flight.is_none(), "one request at a time");
        if !self.snapshot_done && !roster.complete {
            return Next::Idle(None);
        }
        self.take_due(now);
        while let Some(uid) = self.dirty.first().cloned() {
            let member = roster.members.get(&uid);
            let action = if self.snapshot_done {
                self.follow(&uid, member, newest, now)
            } else {
                self.name(&uid, member)
            };
            // It stays dirty until there is nothing left to say of it.
            match action {
                Some(action) => return Next::Send(self.sent(action, roster)),
                None => drop(self.dirty.remove(&uid)),
            }
        }
        if self.snapshot_done {
            Next::Idle(self.retries.first().map(|(at, _)| *at))
        } else {
            Next::Send(self.sent(Action::SnapshotSent, roster))
        }
    }

    fn take_due(&mut self, now: Instant) {
        while let Some((at, uid)) = self.retries.pop_first() {
            if at > now {
                self.retries.insert((at, uid));
                return;
            }
            self.dirty.insert(uid);
        }
    }

    /// Before the end of the snapshot every member is named once, on every connection: what is not named is
    /// cut. Changes and departures wait: until its snapshot is complete ztunnel stops nothing on a Del.
    fn name(&self, uid: &PodUid, member: Option<&Member>) -> Option<Action> {
        let member = member.filter(|_| !self.told.contains_key(uid))?;
        Some(match &member.netns {
            Some(netns) if !self.held.contains_key(&netns.id) => add(uid, member, netns),
            // Held by a pod that is gone but not yet deletable: named now, added when that one has left.
            _ => Action::Keep(uid.clone()),
        })
    }

    /// After the snapshot: deletions on every connection, additions on the newest.
    ///
    /// A refused pod is added again without a Del: if ztunnel has meanwhile started it by its own retry, the
    /// Add is acknowledged and changes nothing, where a Del would cut the connections it already has.
    fn follow(&self, uid: &PodUid, member: Option<&Member>, newest: bool, now: Instant) -> Option<Action> {
        let told = self.told.get(uid);
        let Some(member) = member else {
            return told.map(|_| Action::Del(uid.clone()));
        };
        let netns = member.netns.as_ref();
        if let Some(other) = netns.and_then(|n| self.held.get(&n.id)).filter(|&holder| holder != uid) {
            return Some(Action::Del(other.clone()));
        }
        let moved = |t: &Told| t.netns.zip(netns).is_some_and(|(told, now)| told != now.id);
        match told {
            Some(t) if t.generation < member.info_since => return Some(Action::Del(uid.clone())),
            // An Add would replace it, but that is for the newest.
            Some(t) if !newest && moved(t) => return Some(Action::Del(uid.clone())),
            _ => {}
        }
        let netns = netns.filter(|_| newest)?;
        let settled = told
            .is_some_and(|t| t.generation == member.generation && t.netns.is_some() && !t.answer.is_due(now));
        (!settled).then(|| add(uid, member, netns))
    }

    /// Notes an action as sent, though not yet answered.
    fn sent(&mut self, action: Action, roster: &Roster) -> Action {
        self.in_flight = Some(match &action {
            Action::Add { uid, .. } => {
                self.tell(uid, &roster.members[uid], true, Answer::Awaited);
                InFlight::Add(uid.clone())
            }
            Action::Keep(uid) => {
                self.tell(uid, &roster.members[uid], false, Answer::Acked);
                InFlight::Keep
            }
            Action::Del(uid) => InFlight::Del(uid.clone()),
            Action::SnapshotSent => InFlight::Snapshot,
        });
        action
    }

    fn tell(&mut self, uid: &PodUid, member: &Member, with_netns: bool, answer: Answer) {
        self.forget(uid);
        let netns = member.netns.as_ref().filter(|_| with_netns).map(|n| n.id);
        self.held.extend(netns.map(|id| (id, uid.clone())));
        self.told.insert(uid.clone(), Told { generation: member.generation, netns, answer });
    }

    fn forget(&mut self, uid: &PodUid) {
        if let Some(id) = self.told.remove(uid).and_then(|t| t.netns) {
            self.held.remove(&id);
        }
    }

    pub(super) fn answered(
        &mut self,
        answer: Result<(), String>,
        roster: &Roster,
        retry: Instant,
    ) -> Result<(), UnexpectedNack> {
        let asked = self.in_flight.take().expect("an answer follows a request");
        match (asked, answer) {
            (InFlight::Add(uid), answer) => {
                let told = self.told.get_mut(&uid).expect("noted when it was sent");
                told.answer = match answer {
                    Ok(()) => Answer::Acked,
                    Err(text) => {
                        self.retries.insert((retry, uid));
                        Answer::Nacked { text, retry }
                    }
                };
            }
            (InFlight::Keep, Ok(())) => {}
            (InFlight::Del(uid), Ok(())) => self.forget(&uid),
            (InFlight::Snapshot, Ok(())) => {
                self.snapshot_done = true;
                // Changes and departures that waited for this.
                self.dirty.extend(self.told.keys().chain(roster.members.keys()).cloned());
            }
            (InFlight::Keep, Err(text)) => return Err(UnexpectedNack { action: "Keep", text }),
            (InFlight::Del(_), Err(text)) => return Err(UnexpectedNack { action: "Del", text }),
            (InFlight::Snapshot, Err(text)) => {
                return Err(UnexpectedNack { action: "SnapshotSent", text });
            }
        }
        Ok(())
    }
}

impl Answer {
    /// Refused, and the pause is over.
    fn is_due(&self, now: Instant) -> bool {
        matches!(self, Self::Nacked { retry, .. } if *retry <= now)
    }
}

fn add(uid: &PodUid, member: &Member, netns: &Netns) -> Action {
    Action::Add { uid: uid.clone(), info: member.info.clone(), netns: netns.fd.clone() }
}
