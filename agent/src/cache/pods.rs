//! The index shared among tasks: written by the watches, read by everyone else.

use std::{
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

use super::{
    dirty::{Dirty, Subscribers},
    index::{Entry, Index},
};
use crate::domain::{
    eligibility::Policy,
    selector::Labels,
    workload::{Pod, PodUid},
};

/// The pods of this node. The lock within is held for the length of one change, never over I/O.
#[derive(Debug)]
pub struct Pods {
    inner: Mutex<Inner>,
    sync: watch::Sender<Sync>,
}

#[derive(Debug)]
struct Inner {
    index: Index,
    subscribers: Subscribers<PodUid>,
}

/// What the cache is filled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Pods of this node.
    Pods,
    /// Namespaces of the cluster.
    Namespaces,
}

/// How far the cache can be relied on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sync {
    /// The watch on pods.
    pub pods: Feed,
    /// The watch on namespaces.
    pub namespaces: Feed,
}

/// One watch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Feed {
    /// A whole list has been applied at least once. Stays true from then on: a cache that has become old
    /// is still what the node works from.
    pub listed: bool,
    /// What is wrong with the watch at present.
    pub error: Option<String>,
}

impl Sync {
    /// Both lists have been applied: the absence of a pod means something.
    pub fn complete(&self) -> bool {
        self.pods.listed && self.namespaces.listed
    }

    fn feed(&mut self, source: Source) -> &mut Feed {
        match source {
            Source::Pods => &mut self.pods,
            Source::Namespaces => &mut self.namespaces,
        }
    }
}

impl Pods {
    /// An empty cache.
    pub fn new(policy: Policy) -> Self {
        let inner = Inner { index: Index::new(policy), subscribers: Subscribers::default() };
        Self { inner: Mutex::new(inner), sync: watch::Sender::new(Sync::default()) }
    }

    /// The pod of this UID.
    pub fn get(&self, uid: &PodUid) -> Option<Entry> {
        self.lock().index.get(uid).cloned()
    }

    /// The pod of this UID, also when its sandbox is gone.
    pub fn known(&self, uid: &PodUid) -> Option<Entry> {
        self.lock().index.known(uid).cloned()
    }

    /// The pod of this name, also when its sandbox is gone.
    pub fn named(&self, namespace: &str, name: &str) -> Option<Entry> {
        self.lock().index.named(namespace, name).cloned()
    }

    /// Looks at all of it at one moment.
    pub fn look<T>(&self, look: impl FnOnce(&Index) -> T) -> T {
        look(&self.lock().index)
    }

    /// See [`Index::sandbox_made`].
    pub fn sandbox_made(&self, uid: &PodUid, ips: &[IpAddr]) {
        self.change(|index| index.sandbox_made(uid, ips));
    }

    /// See [`Index::sandbox_gone`].
    pub fn sandbox_gone(&self, uid: &PodUid) {
        self.change(|index| index.sandbox_gone(uid));
    }

    /// All pods, in no order.
    pub fn list(&self) -> Vec<Entry> {
        self.lock().index.iter().map(|(_, entry)| entry.clone()).collect()
    }

    /// From now on, every UID whose entry changes, appears or disappears; all that are known already to
    /// begin with. Nothing falls between the two.
    pub fn subscribe(&self) -> Dirty<PodUid> {
        let mut inner = self.lock();
        let Inner { index, subscribers } = &mut *inner;
        subscribers.add(index.iter().map(|(uid, _)| uid.clone()))
    }

    /// A pod is there, or is different.
    pub fn apply_pod(&self, pod: Pod) {
        self.change(|index| index.apply_pod(pod));
    }

    /// A pod has gone.
    pub fn delete_pod(&self, uid: &PodUid) {
        self.change(|index| index.delete_pod(uid));
    }

    /// A namespace is there, or is labelled differently.
    pub fn apply_namespace(&self, name: &str, labels: Labels) {
        self.change(|index| index.apply_namespace(name, labels));
    }

    /// A namespace has gone.
    pub fn delete_namespace(&self, name: &str) {
        self.change(|index| index.delete_namespace(name));
    }

    /// These are all the pods there are.
    pub fn reset_pods(&self, pods: Vec<Pod>) {
        self.change(|index| index.reset_pods(pods));
        self.listed(Source::Pods);
    }

    /// These are all the namespaces there are.
    pub fn reset_namespaces(&self, namespaces: Vec<(String, Labels)>) {
        self.change(|index| index.reset_namespaces(namespaces));
        self.listed(Source::Namespaces);
    }

    /// The configuration has changed.
    pub fn set_policy(&self, policy: Policy) {
        self.change(|index| index.set_policy(policy));
    }

    /// A watch has failed (`Some`), or works again. Is that news?
    pub fn report(&self, source: Source, error: Option<String>) -> bool {
        self.sync.send_if_modified(|sync| {
            let feed = sync.feed(source);
            let changed = feed.error != error;
            feed.error = error;
            changed
        })
    }

    /// How far the cache can be relied on.
    pub fn sync(&self) -> Sync {
        self.sync.borrow().clone()
    }

    /// Waits until the cache is complete.
    pub async fn synced(&self) {
        // The sender is `self`: it cannot be gone.
        let _ = self.sync.subscribe().wait_for(Sync::complete).await;
    }

    fn listed(&self, source: Source) {
        self.sync.send_if_modified(|sync| {
            let feed = sync.feed(source);
            let changed = *feed != Feed { listed: true, error: None };
            *feed = Feed { listed: true, error: None };
            changed
        });
    }

    fn change(&self, change: impl FnOnce(&mut Index) -> Vec<PodUid>) {
        let mut inner = self.lock();
        let changed = change(&mut inner.index);
        inner.subscribers.mark(&changed);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Arc, time::Duration};

    use super::*;
    use crate::domain::{config::AgentConfig, workload::testing::*};

    fn cache() -> Pods {
        Pods::new(AgentConfig::default().policy())
    }

    #[tokio::test(start_paused = true)]
    async fn complete_when_both_lists_are_in() {
        let cache = Arc::new(cache());
        let waiting = tokio::spawn({
            let cache = Arc::clone(&cache);
            async move { cache.synced().await }
        });
        cache.reset_pods(vec![]);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!waiting.is_finished());
        cache.reset_namespaces(vec![]);
        waiting.await.unwrap();
    }

    #[test]
    fn an_error_does_not_make_a_complete_cache_incomplete() {
        let cache = cache();
        cache.reset_pods(vec![]);
        cache.reset_namespaces(vec![]);
        cache.report(Source::Pods, Some("gone".into()));
        assert!(cache.sync().complete());
        assert_eq!(cache.sync().pods.error.as_deref(), Some("gone"));
        cache.reset_pods(vec![]);
        assert_eq!(cache.sync().pods.error, None);
    }

    #[test]
    fn a_subscriber_hears_of_what_was_there_and_of_what_changes() {
        let cache = cache();
        cache.apply_pod(pod("u1", "ns", "a"));
        let dirty = cache.subscribe();
        cache.apply_pod(pod("u2", "ns", "b"));
        cache.delete_pod(&"u2".into());
        assert_eq!(dirty.take_now(), BTreeSet::from(["u1".into(), "u2".into()]));
        cache.apply_pod(pod("u1", "ns", "a"));
        assert!(dirty.take_now().is_empty());
    }
}
