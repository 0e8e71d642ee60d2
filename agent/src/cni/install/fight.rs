//! Another writer of the same configuration: how often it is answered, and when it is evaded.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// Writes that may follow one another at once: the first, two answers, and the evasion.
const BURST: usize = 4;
/// From then on, one in this time.
const PACE: Duration = Duration::from_secs(10);
/// As many losses in that time are no update of the network any more.
const LOSSES: usize = 3;
const WINDOW: Duration = Duration::from_secs(30);
/// A fight is over when nothing was lost for this long; the next one is told again.
const PEACE: Duration = Duration::from_secs(600);

/// Writes of ours, and what became of them.
#[derive(Debug, Default)]
pub(super) struct Fight {
    writes: VecDeque<Instant>,
    losses: VecDeque<Instant>,
    told: bool,
}

impl Fight {
    /// How long the next write has to wait.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        if self.writes.len() < BURST {
            return Duration::ZERO;
        }
        // As many tokens as a burst, each back after its pace.
        self.writes
            .front()
            .map_or(Duration::ZERO, |oldest| (*oldest + PACE * BURST as u32).saturating_duration_since(now))
    }

    /// Something was written.
    pub(super) fn wrote(&mut self, now: Instant) {
        self.writes.push_back(now);
        if self.writes.len() > BURST {
            self.writes.pop_front();
        }
    }

    /// What was written is not there any more. Is this the one that makes it a fight, and is to be told?
    pub(super) fn lost(&mut self, now: Instant) -> bool {
        if self.losses.back().is_some_and(|last| now.duration_since(*last) > PEACE) {
            self.told = false;
        }
        self.losses.push_back(now);
        while self
            .losses
            .front()
            .is_some_and(|first| now.duration_since(*first) > WINDOW && self.losses.len() > 1)
        {
            self.losses.pop_front();
        }
        let tells = self.losses.len() >= LOSSES && !self.told;
        self.told |= tells;
        tells
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(200);

    #[test]
    fn a_minute_of_rewriting_is_answered_with_few_writes_and_told_once() {
        let (start, mut fight) = (Instant::now(), Fight::default());
        let (mut writes, mut told) = (0, 0);
        for tick in 0..300 {
            let now = start + TICK * tick;
            if fight.wait(now).is_zero() {
                told += u32::from(fight.lost(now));
                fight.wrote(now);
                writes += 1;
            }
        }
        assert_eq!(told, 1);
        assert!((3..=8).contains(&writes), "{writes}");
        // Long after, it is another one.
        let later = start + PEACE * 2;
        assert!(fight.wait(later).is_zero());
        let told: Vec<bool> = (0..4).map(|tick| fight.lost(later + TICK * tick)).collect();
        assert_eq!(told, [false, false, true, false]);
    }

    #[test]
    fn now_and_then_is_no_fight() {
        let (start, mut fight) = (Instant::now(), Fight::default());
        for minute in 0..100 {
            let now = start + Duration::from_secs(60) * minute;
            assert!(fight.wait(now).is_zero());
            assert!(!fight.lost(now));
            fight.wrote(now);
        }
    }
}
