//! ztunnel's half of the protocol as a state machine: what it does with a request, and what kills it.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::AsFd,
};

use weir_agent::zds::codec::{Answer, Request};

/// What ztunnel sees of a namespace.
pub type Inode = (u64, u64);

pub fn inode(fd: &impl AsFd) -> Inode {
    let stat = nix::sys::stat::fstat(fd).unwrap();
    (stat.st_dev, stat.st_ino)
}

/// One ztunnel process: what it serves survives its connections.
#[derive(Debug, Default)]
pub struct Model {
    pub running: BTreeMap<String, Inode>,
    pub pending: BTreeMap<String, Inode>,
    /// UIDs named on this connection; `None` once the snapshot is complete.
    named: Option<BTreeSet<String>>,
    /// What this connection's Adds have started.
    started: BTreeMap<String, Inode>,
    /// What it was told to keep, wherever that runs.
    pub kept: BTreeSet<String>,
}

impl Model {
    /// A new connection begins.
    pub fn connected(&mut self) {
        self.named = Some(BTreeSet::new());
        self.pending.clear();
        self.started.clear();
        self.kept.clear();
    }

    pub fn has_snapshot(&self) -> bool {
        self.named.is_none()
    }

    /// Does as asked; panics where ztunnel would exit. With `refusal` a proxy that would have to be started
    /// fails to.
    pub fn handle(&mut self, request: Request, netns: Option<Inode>, refusal: Option<String>) -> Answer {
        assert_eq!(netns.is_some(), matches!(request, Request::Add { .. }), "descriptors with {request:?}");
        match request {
            Request::Add { uid, .. } => self.add(uid.to_string(), netns.unwrap(), refusal),
            Request::Keep(uid) => {
                let named = self.named.as_mut().expect("Keep after SnapshotSent: ztunnel exits");
                named.insert(uid.to_string());
                self.kept.insert(uid.to_string());
                Ok(())
            }
            Request::Del(uid) => {
                self.pending.remove(uid.as_str());
                self.kept.remove(uid.as_str());
                match &mut self.named {
                    Some(named) => drop(named.remove(uid.as_str())),
                    None => {
                        self.running.remove(uid.as_str());
                        self.started.remove(uid.as_str());
                    }
                }
                Ok(())
            }
            Request::SnapshotSent => {
                let named = self.named.take().expect("second SnapshotSent: ztunnel exits");
                self.running.retain(|uid, _| named.contains(uid));
                self.started.retain(|uid, _| named.contains(uid));
                Ok(())
            }
        }
    }

    fn add(&mut self, uid: String, netns: Inode, refusal: Option<String>) -> Answer {
        if let Some(named) = &mut self.named {
            named.insert(uid.clone());
        }
        // Only of its own connection's Adds can the agent know; the rest ends with the snapshot.
        let mut others = self.started.iter().filter(|(other, at)| **other != uid && **at == netns);
        assert_eq!(others.next(), None, "{uid} in the same namespace: they would share its traffic");
        self.started.insert(uid.clone(), netns);
        self.kept.remove(&uid);
        if self.running.get(&uid) == Some(&netns) {
            return Ok(());
        }
        self.running.remove(&uid);
        self.pending.remove(&uid);
        match refusal {
            Some(text) => {
                self.pending.insert(uid, netns);
                Err(text)
            }
            None => {
                self.running.insert(uid, netns);
                Ok(())
            }
        }
    }
}
