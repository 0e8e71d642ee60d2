//! Pods of this node and labels of namespaces in, a decision per pod out.
//!
//! A plain state machine: no task, no lock, no API server. Every change returns the UIDs of exactly the
//! pods for which something that matters is different now.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use crate::domain::{
    eligibility::{Decision, Policy},
    selector::Labels,
    workload::{Pod, PodUid},
};

/// A pod and what is decided about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The decision.
    pub decision: Decision,
}

/// The index.
#[derive(Debug)]
pub struct Index {
    policy: Policy,
    pods: HashMap<PodUid, Entry>,
    namespaces: HashMap<String, Namespace>,
    sandboxes: HashMap<PodUid, Sandbox>,
}

/// What the runtime has said of a pod's sandbox, which the API server learns later, if at all.
#[derive(Debug)]
enum Sandbox {
    /// It has been made. `stand_in`: the addresses stand in for those that the kubelet has not posted.
    Made { ips: Vec<IpAddr>, stand_in: bool },
    /// It has been removed, and had these addresses: until there is another, there is nothing to enrol.
    Gone { ips: Vec<IpAddr> },
}

/// A namespace is kept while it has labels or pods here.
#[derive(Debug, Default)]
struct Namespace {
    labels: Option<Labels>,
    /// By name, which is what makes a pod's successor known as such.
    pods: HashMap<String, PodUid>,
}

impl Index {
    /// An empty index.
    pub fn new(policy: Policy) -> Self {
        Self { policy, pods: HashMap::new(), namespaces: HashMap::new(), sandboxes: HashMap::new() }
    }

    /// The pod of this UID; one whose sandbox is gone is none.
    pub fn get(&self, uid: &PodUid) -> Option<&Entry> {
        self.pods.get(uid).filter(|_| !matches!(self.sandboxes.get(uid), Some(Sandbox::Gone { .. })))
    }

    /// The pod of this UID, whatever the runtime has said.
    pub fn known(&self, uid: &PodUid) -> Option<&Entry> {
        self.pods.get(uid)
    }

    /// The pod of this name, whatever the runtime has said.
    pub fn named(&self, namespace: &str, name: &str) -> Option<&Entry> {
        self.pods.get(self.namespaces.get(namespace)?.pods.get(name)?)
    }

    /// Namespaces, and whether a pod of which nothing is known is selected there.
    pub fn namespaces(&self) -> impl Iterator<Item = (&str, bool)> {
        let of = |(name, namespace)| {
            let namespace: &Namespace = namespace;
            Some((name, self.policy.selects_all(namespace.labels.as_ref()?)))
        };
        self.namespaces.iter().map(|(name, namespace)| (name.as_str(), namespace)).filter_map(of)
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The runtime has made a sandbox for a pod, with these addresses. They hold until the kubelet posts some.
    pub fn sandbox_made(&mut self, uid: &PodUid, ips: &[IpAddr]) -> Vec<PodUid> {
        let stand_in = matches!(self.sandboxes.get(uid), Some(Sandbox::Made { stand_in: true, .. }));
        let before = self.sandboxes.insert(uid.clone(), Sandbox::Made { ips: ips.to_vec(), stand_in });
        let changed = self.overlay_again(uid);
        if matches!(before, Some(Sandbox::Gone { .. })) { vec![uid.clone()] } else { changed }
    }

    /// The runtime has removed it.
    pub fn sandbox_gone(&mut self, uid: &PodUid) -> Vec<PodUid> {
        let Some(entry) = self.pods.get_mut(uid) else { return Vec::new() };
        let (ips, stand_in) = match self.sandboxes.remove(uid) {
            Some(Sandbox::Made { ips, stand_in }) => (ips, stand_in),
            Some(Sandbox::Gone { ips }) => (ips, false),
            None => (entry.pod.ips.clone(), false),
        };
        if stand_in {
            // They were that sandbox's.
            Arc::make_mut(&mut entry.pod).ips.clear();
            self.decide(uid);
        }
        self.sandboxes.insert(uid.clone(), Sandbox::Gone { ips });
        vec![uid.clone()]
    }

    /// Lays the addresses of a pod's sandbox over the ones it has.
    fn overlay_again(&mut self, uid: &PodUid) -> Vec<PodUid> {
        let Some(entry) = self.pods.get_mut(uid) else { return Vec::new() };
        let Some(Sandbox::Made { ips, stand_in }) = self.sandboxes.get_mut(uid) else { return Vec::new() };
        if !(*stand_in || entry.pod.ips.is_empty()) || entry.pod.ips == *ips {
            return Vec::new();
        }
        *stand_in = true;
        Arc::make_mut(&mut entry.pod).ips.clone_from(ips);
        self.decide(uid);
        vec![uid.clone()]
    }

    fn decide(&mut self, uid: &PodUid) {
        let Some(entry) = self.pods.get_mut(uid) else { return };
        let namespace = self.namespaces.get(&entry.pod.info.namespace);
        entry.decision = self.policy.decide(&entry.pod, namespace.and_then(|it| it.labels.as_ref()));
    }

    /// All pods, in no order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&PodUid, &Entry)> {
        self.pods.iter()
    }

    /// A pod is there, or is different. A pod of the same name with another UID has then gone: names are
    /// unique, and the watch may have missed its end.
    pub fn apply_pod(&mut self, mut pod: Pod) -> Vec<PodUid> {
        let mut changed = Vec::new();
        let uid = pod.uid.clone();
        match self.sandboxes.get_mut(&uid) {
            Some(Sandbox::Made { ips, stand_in }) => {
                *stand_in = pod.ips.is_empty();
                if *stand_in {
                    pod.ips.clone_from(ips);
                }
            }
            // It has another sandbox by now, of which no runtime has told us.
            Some(Sandbox::Gone { ips }) if pod.ips.iter().any(|ip| !ips.contains(ip)) => {
                self.sandboxes.remove(&uid);
            }
            _ => {}
        }
        let namespace = self.namespaces.entry(pod.info.namespace.clone()).or_default();
        let before = namespace.pods.insert(pod.info.name.clone(), uid.clone());
        let decision = self.policy.decide(&pod, namespace.labels.as_ref());
        if let Some(before) = before.filter(|before| *before != uid) {
            self.pods.remove(&before);
            self.sandboxes.remove(&before);
            changed.push(before);
        }
        let entry = Entry { pod: Arc::new(pod), decision };
        let before = self.pods.insert(uid.clone(), entry.clone());
        if before.is_none_or(|it| it.pod.differs(&entry.pod) || it.decision != decision) {
            changed.push(uid);
        }
        changed
    }

    /// The pod of this UID has gone. Had a successor of its name come before, it would be gone already.
    pub fn delete_pod(&mut self, uid: &PodUid) -> Vec<PodUid> {
        let Some(Entry { pod, .. }) = self.pods.remove(uid) else {
            return Vec::new();
        };
        self.sandboxes.remove(uid);
        let name = &pod.info.namespace;
        if let Some(namespace) = self.namespaces.get_mut(name) {
            namespace.pods.remove(&pod.info.name);
            self.drop_if_empty(name);
        }
        vec![uid.clone()]
    }

    /// A namespace is there, or is labelled differently.
    pub fn apply_namespace(&mut self, name: &str, labels: Labels) -> Vec<PodUid> {
        let namespace = match self.namespaces.get_mut(name) {
            Some(known) if known.labels.as_ref() == Some(&labels) => return Vec::new(),
            Some(known) => known,
            None => self.namespaces.entry(name.to_owned()).or_default(),
        };
        namespace.labels = Some(labels);
        decide_again(&self.policy, namespace, &mut self.pods)
    }

    /// A namespace has gone. Pods that are still known in it wait for it, or for their own end.
    pub fn delete_namespace(&mut self, name: &str) -> Vec<PodUid> {
        let Some(namespace) = self.namespaces.get_mut(name) else {
            return Vec::new();
        };
        namespace.labels = None;
        let changed = decide_again(&self.policy, namespace, &mut self.pods);
        self.drop_if_empty(name);
        changed
    }

    /// These are all the pods there are: whatever else is known has gone.
    pub fn reset_pods(&mut self, pods: Vec<Pod>) -> Vec<PodUid> {
        let listed: HashSet<_> = pods.iter().map(|pod| pod.uid.clone()).collect();
        let gone: Vec<_> = self.pods.keys().filter(|uid| !listed.contains(*uid)).cloned().collect();
        let gone = gone.iter().flat_map(|uid| self.delete_pod(uid)).collect::<Vec<_>>();
        gone.into_iter().chain(pods.into_iter().flat_map(|pod| self.apply_pod(pod))).collect()
    }

    /// These are all the namespaces there are.
    pub fn reset_namespaces(&mut self, namespaces: Vec<(String, Labels)>) -> Vec<PodUid> {
        let listed: HashSet<_> = namespaces.iter().map(|(name, _)| name.clone()).collect();
        let gone: Vec<_> = self.namespaces.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        let mut changed: Vec<_> = gone.iter().flat_map(|name| self.delete_namespace(name)).collect();
        for (name, labels) in namespaces {
            changed.extend(self.apply_namespace(&name, labels));
        }
        changed
    }

    /// The configuration has changed.
    pub fn set_policy(&mut self, policy: Policy) -> Vec<PodUid> {
        self.policy = policy;
        let mut changed = Vec::new();
        for namespace in self.namespaces.values() {
            changed.extend(decide_again(&self.policy, namespace, &mut self.pods));
        }
        changed
    }

    fn drop_if_empty(&mut self, name: &str) {
        if self.namespaces.get(name).is_some_and(|it| it.labels.is_none() && it.pods.is_empty()) {
            self.namespaces.remove(name);
        }
    }
}

/// Decides about every pod of `namespace`; returns those about which something else is decided now.
fn decide_again(policy: &Policy, namespace: &Namespace, pods: &mut HashMap<PodUid, Entry>) -> Vec<PodUid> {
    let mut changed = Vec::new();
    for uid in namespace.pods.values() {
        let Some(entry) = pods.get_mut(uid) else { continue };
        let decision = policy.decide(&entry.pod, namespace.labels.as_ref());
        if decision != entry.decision {
            entry.decision = decision;
            changed.push(uid.clone());
        }
    }
    changed
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
