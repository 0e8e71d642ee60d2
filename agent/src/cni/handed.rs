//! The sandboxes that runtimes have handed over, and that still are.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

use crate::{
    domain::{cni::Attachment, workload::PodUid},
    netns::Netns,
};

/// By pod. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Handed {
    sandboxes: Arc<Mutex<HashMap<PodUid, Sandbox>>>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct Sandbox {
    netns: Netns,
    /// Network and interface. More than one where a pod has several networks: the last that goes takes the
    /// sandbox with it.
    attachments: BTreeSet<(String, Attachment)>,
    captured: bool,
}

impl Handed {
    /// Takes a sandbox, in the place of another namespace of the same pod. Is it a new one?
    pub fn hand(&self, uid: &PodUid, netns: &Netns, network: &str, attachment: &Attachment) -> bool {
        let mut sandboxes = self.lock();
        let new = sandboxes.get(uid).is_none_or(|sandbox| sandbox.netns.cookie() != netns.cookie());
        if new {
            let sandbox = Sandbox { netns: netns.clone(), attachments: BTreeSet::new(), captured: false };
            sandboxes.insert(uid.clone(), sandbox);
        }
        if let Some(sandbox) = sandboxes.get_mut(uid) {
            sandbox.attachments.insert((network.to_owned(), attachment.clone()));
        }
        drop(sandboxes);
        self.changed.send_replace(());
        new
    }

    /// The namespace handed over for this pod.
    pub fn netns(&self, uid: &PodUid) -> Option<Netns> {
        self.lock().get(uid).map(|sandbox| sandbox.netns.clone())
    }

    /// The pod is captured and acknowledged in this namespace.
    pub fn set_captured(&self, uid: &PodUid, cookie: u64) {
        let mut sandboxes = self.lock();
        if let Some(sandbox) = sandboxes.get_mut(uid).filter(|it| it.netns.cookie() == cookie && !it.captured)
        {
            sandbox.captured = true;
            drop(sandboxes);
            self.changed.send_replace(());
        }
    }

    /// Is it? `None`: this namespace is not, or no longer, the pod's.
    pub fn captured(&self, uid: &PodUid, cookie: u64) -> Option<bool> {
        let sandboxes = self.lock();
        sandboxes.get(uid).filter(|it| it.netns.cookie() == cookie).map(|sandbox| sandbox.captured)
    }

    /// Is it, in the namespace it has now?
    pub fn is_captured(&self, uid: &PodUid) -> bool {
        self.lock().get(uid).is_some_and(|sandbox| sandbox.captured)
    }

    /// Tells of changes.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// An attachment goes. Returns the pod when it was its sandbox's last.
    pub fn release(&self, network: &str, attachment: &Attachment) -> Option<PodUid> {
        self.release_where(|of, it| of == network && it == attachment).pop()
    }

    /// All attachments of a network but these are gone. Returns the pods whose sandbox went with them.
    pub fn keep_only(&self, network: &str, valid: &[Attachment]) -> Vec<PodUid> {
        self.release_where(|of, it| of == network && !valid.contains(it))
    }

    fn release_where(&self, goes: impl Fn(&str, &Attachment) -> bool) -> Vec<PodUid> {
        let mut gone = Vec::new();
        self.lock().retain(|uid, sandbox| {
            sandbox.attachments.retain(|(network, attachment)| !goes(network, attachment));
            let stays = !sandbox.attachments.is_empty();
            if !stays {
                gone.push(uid.clone());
            }
            stays
        });
        self.changed.send_replace(());
        gone
    }

    /// Takes a sandbox back, unless another has come in its place. Was it there?
    pub fn withdraw(&self, uid: &PodUid, cookie: u64) -> bool {
        let mut sandboxes = self.lock();
        let there = sandboxes.get(uid).is_some_and(|sandbox| sandbox.netns.cookie() == cookie);
        if there {
            sandboxes.remove(uid);
        }
        drop(sandboxes);
        self.changed.send_replace(());
        there
    }

    /// The pod is gone.
    pub fn forget(&self, uid: &PodUid) {
        self.lock().remove(uid);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Sandbox>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
