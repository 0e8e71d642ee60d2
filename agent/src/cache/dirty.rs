//! A set of keys to look at again, filled by many and emptied by one.

use std::{
    collections::BTreeSet,
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::Notify;

/// However often a key is marked before it is taken, it is taken once: memory and work are bounded by
/// the number of keys, not by the number of changes. Taken in order, so that a run can be repeated. Clones
/// share the set.
#[derive(Debug)]
pub struct Dirty<K> {
    shared: Arc<Shared<K>>,
}

#[derive(Debug)]
struct Shared<K> {
    keys: Mutex<BTreeSet<K>>,
    filled: Notify,
}

impl<K> Default for Dirty<K> {
    fn default() -> Self {
        let shared = Shared { keys: Mutex::default(), filled: Notify::new() };
        Self { shared: Arc::new(shared) }
    }
}

impl<K> Clone for Dirty<K> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<K: Ord> Dirty<K> {
    /// Marks keys.
    pub fn mark(&self, keys: impl IntoIterator<Item = K>) {
        let mut set = self.shared.keys.lock().unwrap_or_else(PoisonError::into_inner);
        set.extend(keys);
        if !set.is_empty() {
            self.shared.filled.notify_one();
        }
    }

    /// Waits until something is marked, and takes all of it. Nothing is lost when the wait is abandoned.
    pub async fn take(&self) -> BTreeSet<K> {
        loop {
            let taken = self.take_now();
            if !taken.is_empty() {
                return taken;
            }
            self.shared.filled.notified().await;
        }
    }

    /// Takes what is marked, be it nothing.
    pub fn take_now(&self) -> BTreeSet<K> {
        mem::take(&mut *self.shared.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Does anybody else hold this set?
    fn is_shared(&self) -> bool {
        Arc::strong_count(&self.shared) > 1
    }
}

/// Those who want to know of changes. One that has been dropped is forgotten at the next change.
#[derive(Debug)]
pub struct Subscribers<K>(Vec<Dirty<K>>);

impl<K> Default for Subscribers<K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Ord + Clone> Subscribers<K> {
    /// A new subscriber, for which `keys` are marked from the start.
    pub fn add(&mut self, keys: impl IntoIterator<Item = K>) -> Dirty<K> {
        let new = Dirty::default();
        new.mark(keys);
        self.0.push(new.clone());
        new
    }

    /// Marks keys for everyone.
    pub fn mark(&mut self, keys: &[K]) {
        if keys.is_empty() {
            return;
        }
        self.0.retain(Dirty::is_shared);
        for subscriber in &self.0 {
            subscriber.mark(keys.iter().cloned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn marked_often_taken_once() {
        let dirty = Dirty::default();
        for _ in 0..1000 {
            dirty.mark([1, 2]);
        }
        assert_eq!(dirty.take().await, BTreeSet::from([1, 2]));
        assert!(dirty.take_now().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_taker_is_woken_and_an_abandoned_wait_loses_nothing() {
        let dirty = Dirty::default();
        let impatient = tokio::time::timeout(std::time::Duration::from_secs(1), dirty.take());
        assert!(impatient.await.is_err());
        let taker = tokio::spawn({
            let dirty = dirty.clone();
            async move { dirty.take().await }
        });
        tokio::task::yield_now().await;
        dirty.mark([7]);
        assert_eq!(taker.await.unwrap(), BTreeSet::from([7]));
    }

    #[test]
    fn whoever_has_gone_is_forgotten() {
        let mut subscribers = Subscribers::default();
        let stays = subscribers.add([1]);
        drop(subscribers.add([1]));
        subscribers.mark(&[2]);
        assert_eq!(subscribers.0.len(), 1);
        assert_eq!(stays.take_now(), BTreeSet::from([1, 2]));
    }
}
