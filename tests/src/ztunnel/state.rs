//! Which pods are served: what ztunnel does with the agent's requests, without the socket they come by.

use std::{
    collections::{HashMap, HashSet},
    io, mem,
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;

use super::{
    log::Log,
    mesh::Mesh,
    netns::{self, NetnsId, PodNetns},
    proxy::Pod,
    wire::Request,
    workload::Workload,
};

type Uid = Arc<str>;

/// The pods of one stand-in.
pub struct State {
    home: Arc<OwnedFd>,
    mesh: Mesh,
    log: Arc<Log>,
    ipv6: bool,
    running: HashMap<Uid, Workload>,
    /// Could not be served so far.
    pending: HashMap<Uid, PodNetns>,
    /// UIDs named on this connection; `None` once its snapshot is complete.
    named: Option<HashSet<Uid>>,
    /// Where this connection's Adds have put pods.
    added: HashMap<Uid, NetnsId>,
}

/// What comes of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done.
    Ack,
    /// Could not be done; goes on being tried.
    Nack(String),
    /// The agent broke the protocol in a way that makes ztunnel exit.
    Exit(String),
}

impl State {
    /// Must be called on the thread that later serves.
    pub fn new(mesh: Mesh, log: Arc<Log>, ipv6: bool) -> io::Result<Self> {
        let home = Arc::new(netns::current()?);
        let (running, pending, added) = Default::default();
        Ok(Self { home, mesh, log, ipv6, running, pending, named: None, added })
    }

    /// Wraps a received namespace.
    pub fn pod_netns(&self, fd: OwnedFd) -> io::Result<PodNetns> {
        PodNetns::new(self.home.clone(), fd)
    }

    /// A connection begins.
    pub fn connected(&mut self) {
        self.named = Some(HashSet::new());
        self.pending.clear();
        self.added.clear();
    }

    /// Whether ztunnel would call itself ready, its connection aside.
    pub fn is_ready(&self) -> bool {
        self.named.is_none() && self.pending.is_empty()
    }

    /// Does what the agent asks; `refusal` makes an Add fail for no reason of its own.
    pub fn apply(&mut self, request: &Request, netns: Option<PodNetns>, refusal: Option<String>) -> Outcome {
        match (request, netns) {
            (Request::Add { uid, info: Some(_) }, Some(netns)) => {
                let uid: Uid = uid.as_str().into();
                if let Some(named) = &mut self.named {
                    named.insert(uid.clone());
                }
                self.added.insert(uid.clone(), netns.id());
                match self.add(uid, netns, refusal) {
                    Ok(()) => Outcome::Ack,
                    Err(e) => Outcome::Nack(format!("failure to start proxy : {e}")),
                }
            }
            (Request::Add { .. }, _) => Outcome::Exit("Add without workload info".into()),
            (Request::Keep(uid), _) => match &mut self.named {
                Some(named) => {
                    named.insert(uid.as_str().into());
                    Outcome::Ack
                }
                None => Outcome::Exit("Keep after SnapshotSent".into()),
            },
            (Request::Del(uid), _) => {
                match &mut self.named {
                    // Until the snapshot is complete nothing is stopped; then what is not named is.
                    Some(named) => {
                        named.remove(uid.as_str());
                        self.pending.remove(uid.as_str());
                    }
                    None => {
                        self.added.remove(uid.as_str());
                        drop(self.del(uid));
                    }
                }
                Outcome::Ack
            }
            (Request::SnapshotSent, _) => match self.named.take() {
                Some(named) => {
                    let cut = self.running.keys().filter(|uid| !named.contains(*uid));
                    for uid in cut.cloned().collect::<Vec<_>>() {
                        drop(self.del(&uid));
                    }
                    self.added.retain(|uid, _| named.contains(uid));
                    Outcome::Ack
                }
                None => Outcome::Exit("second SnapshotSent".into()),
            },
        }
    }

    /// The pod this connection has put into the same namespace as `uid`, if there is one.
    pub fn shares_netns(&self, uid: &str) -> Option<String> {
        let netns = self.added.get(uid)?;
        let shares = |(other, at): &(&Uid, &NetnsId)| &***other != uid && *at == netns;
        self.added.iter().find(shares).map(|(other, _)| other.to_string())
    }

    /// Serves a pod. One known in the same namespace is left alone, in another it is replaced; what
    /// cannot be served stays pending.
    pub fn add(&mut self, uid: Uid, netns: PodNetns, refusal: Option<String>) -> io::Result<()> {
        if self.running.get(&uid).is_some_and(|w| w.netns() == netns.id()) {
            return Ok(());
        }
        drop(self.del(&uid));
        let ips = netns.addresses().unwrap_or_default();
        let (mesh, log) = (self.mesh.clone(), self.log.clone());
        let pod = Pod { uid: uid.clone(), netns: netns.clone(), ips: ips.clone(), mesh, log };
        let started = match refusal {
            Some(text) => Err(io::Error::other(text)),
            None => Workload::start(pod, self.ipv6).map_err(io::Error::other),
        };
        match started {
            Ok(workload) => {
                self.mesh.join(&uid, &ips);
                self.running.insert(uid, workload);
                Ok(())
            }
            Err(e) => {
                self.pending.insert(uid, netns);
                Err(e)
            }
        }
    }

    /// Tries again what is pending.
    pub fn retry_pending(&mut self) {
        for (uid, netns) in mem::take(&mut self.pending) {
            // What fails again is pending again.
            let _ = self.add(uid, netns, None);
        }
    }

    /// Cuts a pod, if it is known: when the answer is dropped, or has been [`Workload::cut`].
    pub fn del(&mut self, uid: &str) -> Option<Workload> {
        self.pending.remove(uid);
        let cut = self.running.remove(uid)?;
        self.mesh.leave(uid);
        Some(cut)
    }

    /// UIDs served, sorted.
    pub fn running(&self) -> Vec<String> {
        sorted(self.running.keys())
    }

    /// UIDs that could not be served so far, sorted.
    pub fn pending(&self) -> Vec<String> {
        sorted(self.pending.keys())
    }

    /// The process exits: everything goes at once.
    pub fn exit(&mut self) {
        self.pending.clear();
        self.running.clear();
    }

    /// Lets all pods drain at once; afterwards none is served.
    pub fn drain(&mut self, deadline: Duration) -> impl Future<Output = ()> + use<> {
        self.pending.clear();
        let drained: Vec<_> = self.running.drain().map(|(_, w)| w.drain(deadline)).collect();
        async { drop(join_all(drained).await) }
    }
}

fn sorted<'a>(uids: impl Iterator<Item = &'a Uid>) -> Vec<String> {
    let mut uids: Vec<_> = uids.map(|uid| uid.to_string()).collect();
    uids.sort();
    uids
}
