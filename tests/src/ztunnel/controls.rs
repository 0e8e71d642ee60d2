//! What a test tells a stand-in to do, and what it asks it about the agent.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::wire::Request;

/// Requests kept; the oldest give way.
const CAPACITY: usize = 65_536;

/// Shared between a stand-in's handle and its thread.
#[derive(Debug, Default)]
pub struct Controls {
    stalled: watch::Sender<bool>,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    refusals: VecDeque<String>,
    ack_delay: Duration,
    connected: bool,
    ready: bool,
    exited: bool,
    violations: Vec<String>,
    requests: VecDeque<Request>,
}

impl Controls {
    pub fn stall(&self, stalled: bool) {
        self.stalled.send_replace(stalled);
    }

    pub fn nack_next(&self, text: String) {
        self.inner().refusals.push_back(text);
    }

    pub fn delay_acks(&self, delay: Duration) {
        self.inner().ack_delay = delay;
    }

    pub fn is_connected(&self) -> bool {
        self.inner().connected
    }

    pub fn is_ready(&self) -> bool {
        self.inner().ready
    }

    pub fn has_exited(&self) -> bool {
        self.inner().exited
    }

    pub fn violations(&self) -> Vec<String> {
        self.inner().violations.clone()
    }

    pub fn requests(&self) -> Vec<Request> {
        self.inner().requests.iter().cloned().collect()
    }

    pub fn wait_ready(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut inner = self.inner();
        while !inner.ready {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            inner = self.changed.wait_timeout(inner, left).expect("nobody panics holding the controls").0;
        }
        true
    }

    pub(super) async fn while_stalled(&self) {
        // The sender lives in `self`.
        let _ = self.stalled.subscribe().wait_for(|stalled| !stalled).await;
    }

    pub(super) fn take_refusal(&self) -> Option<String> {
        self.inner().refusals.pop_front()
    }

    pub(super) fn ack_delay(&self) -> Duration {
        self.inner().ack_delay
    }

    pub(super) fn set_connected(&self, connected: bool) {
        let mut inner = self.inner();
        inner.connected = connected;
        inner.ready = false;
    }

    pub(super) fn set_ready(&self, ready: bool) {
        self.inner().ready = ready;
        self.changed.notify_all();
    }

    pub(super) fn set_exited(&self) {
        self.inner().exited = true;
    }

    pub(super) fn violation(&self, text: String) {
        self.inner().violations.push(text);
    }

    pub(super) fn record(&self, request: &Request) {
        let requests = &mut self.inner().requests;
        if requests.len() == CAPACITY {
            requests.pop_front();
        }
        requests.push_back(request.clone());
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics holding the controls")
    }
}
