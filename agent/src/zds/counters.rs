//! What happened on the socket, for metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use crate::cache::members::Action;

/// A count that only the code of this room adds to.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(super) fn add(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    pub(super) fn sub(&self) {
        self.0.fetch_sub(1, Relaxed);
    }

    pub(super) fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }
}

/// What became of one kind of request.
#[derive(Debug, Default)]
pub struct Results {
    /// ztunnel did it.
    pub acked: Count,
    /// ztunnel refused.
    pub nacked: Count,
    /// No usable answer; the connection is over.
    pub lost: Count,
}

/// How long ztunnel took to answer, in seconds: from half a millisecond to the deadline.
#[derive(Debug)]
pub struct Latency(pub Histogram);

impl Default for Latency {
    fn default() -> Self {
        Self(Histogram::new(exponential_buckets(0.0005, 2.0, 14)))
    }
}

/// All counts of the server.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections accepted.
    pub accepted: Count,
    /// Connections open, a hello said or not. The only one that goes down.
    pub open: Count,
    /// Connections refused because of who connected.
    pub refused: Count,
    /// Times accept itself failed.
    pub accept_errors: Count,
    /// Connections that ztunnel ended.
    pub left: Count,
    /// Connections that the agent ended, for any of the reasons of `SessionError`.
    pub closed: Count,
    /// Snapshots completed.
    pub snapshots: Count,
    /// Pods named in the last of them.
    pub last_snapshot_size: Count,
    /// When it was completed, in seconds since the epoch.
    pub last_snapshot_at: Count,
    /// Time to every answer, good or bad.
    pub answers: Latency,
    /// Add.
    pub add: Results,
    /// Keep.
    pub keep: Results,
    /// Del.
    pub del: Results,
    /// SnapshotSent.
    pub snapshot_sent: Results,
}

impl Counters {
    pub(super) fn of(&self, action: &Action) -> &Results {
        match action {
            Action::Add { .. } => &self.add,
            Action::Keep(_) => &self.keep,
            Action::Del(_) => &self.del,
            Action::SnapshotSent => &self.snapshot_sent,
        }
    }
}
