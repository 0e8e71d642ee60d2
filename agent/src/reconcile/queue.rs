//! Whose turn it is: a queue of keys in which a key is worked on by one at a time.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    hash::Hash,
};

use tokio::time::Instant;

/// The queue. A key in it is ready, waiting for a moment, or being worked on; one that is pushed while
/// being worked on has another turn afterwards.
#[derive(Debug)]
pub struct Queue<K> {
    keys: HashMap<K, Turn>,
    ready: VecDeque<K>,
    waiting: BTreeSet<(Instant, K)>,
}

#[derive(Clone, Copy, Debug)]
enum Turn {
    Ready,
    Waiting(Instant),
    Working { again: bool },
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self { keys: HashMap::new(), ready: VecDeque::new(), waiting: BTreeSet::new() }
    }
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    /// `key` shall have a turn as soon as possible.
    pub fn push(&mut self, key: K) {
        match self.keys.get_mut(&key) {
            Some(Turn::Ready) => return,
            Some(Turn::Working { again }) => {
                *again = true;
                return;
            }
            Some(Turn::Waiting(until)) => {
                let until = *until;
                self.waiting.remove(&(until, key.clone()));
            }
            None => {}
        }
        self.keys.insert(key.clone(), Turn::Ready);
        self.ready.push_back(key);
    }

    /// The next key to work on. It is handed back with [`Queue::done`].
    pub fn pop(&mut self) -> Option<K> {
        let key = self.ready.pop_front()?;
        self.keys.insert(key.clone(), Turn::Working { again: false });
        Some(key)
    }

    /// Work on `key` has ended; it shall have another turn at `retry`, or at once if it was pushed since.
    pub fn done(&mut self, key: K, retry: Option<Instant>) {
        match (self.keys.remove(&key), retry) {
            (Some(Turn::Working { again: true }), _) => self.push(key),
            (_, Some(at)) => {
                self.keys.insert(key.clone(), Turn::Waiting(at));
                self.waiting.insert((at, key));
            }
            (_, None) => {}
        }
    }

    /// When the next waiting key is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.waiting.first().map(|(at, _)| *at)
    }

    /// Makes every key ready whose moment has come.
    pub fn advance(&mut self, now: Instant) {
        while let Some((at, key)) = self.waiting.first().cloned()
            && at <= now
        {
            self.push(key);
        }
    }

    /// Makes every waiting key ready.
    pub fn wake_all(&mut self) {
        while let Some((_, key)) = self.waiting.first().cloned() {
            self.push(key);
        }
    }

    /// Nothing is ready, waiting or being worked on.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_key_waits_in_line_once() {
        let mut queue = Queue::default();
        for key in [1, 2, 1, 1] {
            queue.push(key);
        }
        assert_eq!((queue.pop(), queue.pop(), queue.pop()), (Some(1), Some(2), None));
    }

    #[test]
    fn a_key_being_worked_on_is_not_given_out_again_until_it_is_back() {
        let mut queue = Queue::default();
        queue.push(1);
        assert_eq!(queue.pop(), Some(1));
        queue.push(1);
        queue.push(1);
        assert_eq!(queue.pop(), None);
        queue.done(1, None);
        assert_eq!(queue.pop(), Some(1));
        queue.done(1, None);
        assert_eq!(queue.pop(), None);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_failed_key_is_due_when_its_time_has_come_or_when_it_is_pushed() {
        let mut queue = Queue::default();
        let now = Instant::now();
        let at = |ms| now + Duration::from_millis(ms);
        for key in [1, 2, 3] {
            queue.push(key);
            queue.pop();
        }
        queue.done(1, Some(at(10)));
        queue.done(2, Some(at(5)));
        queue.done(3, Some(at(20)));
        assert_eq!(queue.next_due(), Some(at(5)));
        queue.advance(at(4));
        assert_eq!(queue.pop(), None);
        queue.advance(at(5));
        assert_eq!(queue.pop(), Some(2));
        queue.push(3);
        assert_eq!(queue.pop(), Some(3));
        assert_eq!(queue.next_due(), Some(at(10)));
        queue.wake_all();
        assert_eq!((queue.pop(), queue.next_due()), (Some(1), None));
    }

    #[test]
    fn what_was_pushed_meanwhile_goes_before_the_wait() {
        let mut queue = Queue::default();
        queue.push(1);
        queue.pop();
        queue.push(1);
        queue.done(1, Some(Instant::now() + Duration::from_secs(9)));
        assert_eq!((queue.pop(), queue.next_due()), (Some(1), None));
    }
}
