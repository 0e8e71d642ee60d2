//! A limit on how often something is done.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

/// So many at once, then one every so often. Those who wait are served in turn.
#[derive(Debug)]
pub(super) struct Rate {
    every: Duration,
    burst: u32,
    /// When the allowance would be full again if nobody asked any more.
    full_at: Mutex<Instant>,
}

impl Rate {
    pub(super) fn new(every: Duration, burst: u32) -> Self {
        Self { every, burst, full_at: Mutex::new(Instant::now()) }
    }

    /// Waits until it may be done once.
    pub(super) async fn allow(&self) {
        sleep_until(self.reserve()).await;
    }

    fn reserve(&self) -> Instant {
        let now = Instant::now();
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        *full_at = (*full_at).max(now) + self.every;
        let slack = self.every * self.burst;
        full_at.checked_sub(slack).map_or(now, |at| at.max(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_then_a_steady_rate_then_a_burst_again() {
        let rate = Rate::new(Duration::from_millis(100), 3);
        let start = Instant::now();
        let mut at = Vec::new();
        for _ in 0..6 {
            rate.allow().await;
            at.push(start.elapsed().as_millis());
        }
        assert_eq!(at, [0, 0, 0, 100, 200, 300]);
        tokio::time::sleep(Duration::from_secs(9)).await;
        let start = Instant::now();
        for _ in 0..3 {
            rate.allow().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
