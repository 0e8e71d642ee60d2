//! Counts of what takes the kernel's time, so that the work per pod can be told and bounded by tests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How often something has been done by this process.
#[derive(Debug)]
pub struct Count(AtomicU64);

impl Count {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn add(&self, times: usize) {
        self.0.fetch_add(times as u64, Relaxed);
    }

    /// So far.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Programs of pods that were loaded: each is verified and compiled by the kernel.
pub static LOADS: Count = Count::new();
/// Netlink requests: changes and questions.
pub static NETLINK: Count = Count::new();
/// Visits to namespaces: each is a thread that comes and goes.
pub static VISITS: Count = Count::new();
