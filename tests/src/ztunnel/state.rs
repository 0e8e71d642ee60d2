//! Which pods are served: what ztunnel does with the agent's requests, without the socket they come by.

use std::{collections::HashMap, os::fd::OwnedFd, sync::Arc, time::Duration};

use futures::future::join_all;

use super::{
    log::Log,
    mesh::Mesh,
    netns::{self, PodNetns},
    proxy::Pod,
    workload::{StartError, Workload},
};

/// The pods of one stand-in.
pub struct State {
    home: Arc<OwnedFd>,
    mesh: Mesh,
    log: Arc<Log>,
    ipv6: bool,
    running: HashMap<Arc<str>, Workload>,
    pending: HashMap<Arc<str>, PodNetns>,
}

impl State {
    /// Must be called on the thread that later serves.
    pub fn new(mesh: Mesh, log: Arc<Log>, ipv6: bool) -> std::io::Result<Self> {
        let home = Arc::new(netns::current()?);
        let (running, pending) = (HashMap::new(), HashMap::new());
        Ok(Self { home, mesh, log, ipv6, running, pending })
    }

    /// Wraps a received namespace.
    pub fn pod_netns(&self, fd: OwnedFd) -> std::io::Result<PodNetns> {
        PodNetns::new(self.home.clone(), fd)
    }

    /// Serves a pod. One known in the same namespace is left alone, in another it is replaced; what
    /// cannot be served stays pending.
    pub fn add(&mut self, uid: &str, netns: PodNetns) -> Result<(), StartError> {
        let uid: Arc<str> = uid.into();
        if self.running.get(&uid).is_some_and(|w| w.netns() == netns.id()) {
            return Ok(());
        }
        drop(self.del(&uid));
        let ips = netns.addresses().unwrap_or_default();
        let (mesh, log) = (self.mesh.clone(), self.log.clone());
        let pod = Pod { uid: uid.clone(), netns: netns.clone(), ips: ips.clone(), mesh, log };
        match Workload::start(pod, self.ipv6) {
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

    /// Lets all pods drain at once; afterwards none is served.
    pub fn drain(&mut self, deadline: Duration) -> impl Future<Output = ()> + use<> {
        self.pending.clear();
        let drained: Vec<_> = self.running.drain().map(|(_, w)| w.drain(deadline)).collect();
        async { drop(join_all(drained).await) }
    }
}

fn sorted<'a>(uids: impl Iterator<Item = &'a Arc<str>>) -> Vec<String> {
    let mut uids: Vec<_> = uids.map(|uid| uid.to_string()).collect();
    uids.sort();
    uids
}
