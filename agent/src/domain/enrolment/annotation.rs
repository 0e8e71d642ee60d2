//! What the annotation says, between what was written and what the API server has told since.

use std::collections::VecDeque;

use crate::domain::workload::Redirection;

/// The watch tells of a write some time after it was made, and by then another may have been made. An
/// echo of our own earlier writes must not be mistaken for a change by somebody else: a pod believed to
/// be without the annotation would be taken out of the mesh with `enabled` still on it.
#[derive(Debug, Default)]
pub(super) struct Annotation {
    believed: Option<Redirection>,
    observed: Option<Redirection>,
    /// Writes the watch has not told of yet, oldest first.
    awaited: VecDeque<Option<Redirection>>,
}

/// Writes that are never told of are possible (a list may skip intermediate states), piling up is not.
const AWAITED_MAX: usize = 8;

impl Annotation {
    /// What it says, to the best of our knowledge.
    pub(super) fn believed(&self) -> Option<Redirection> {
        self.believed
    }

    /// The API server says it is `now`.
    pub(super) fn observe(&mut self, now: Option<Redirection>) {
        if now == self.observed {
            return;
        }
        self.observed = now;
        match self.awaited.iter().position(|write| *write == now) {
            Some(echo) => drop(self.awaited.drain(..=echo)),
            None => {
                self.awaited.clear();
                self.believed = now;
            }
        }
    }

    /// We have made it `now`.
    pub(super) fn wrote(&mut self, now: Option<Redirection>) {
        self.believed = now;
        self.awaited.push_back(now);
        if self.awaited.len() > AWAITED_MAX {
            self.awaited.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENABLED: Option<Redirection> = Some(Redirection::Enabled);
    const PENDING: Option<Redirection> = Some(Redirection::Pending);

    #[test]
    fn the_echo_of_an_earlier_write_changes_nothing() {
        let mut it = Annotation::default();
        it.wrote(PENDING);
        it.wrote(None);
        it.wrote(ENABLED);
        for echo in [PENDING, None, ENABLED] {
            it.observe(echo);
            assert_eq!(it.believed(), ENABLED, "after the echo of {echo:?}");
        }
    }

    #[test]
    fn an_echo_stands_for_all_writes_before_it() {
        let mut it = Annotation::default();
        it.wrote(PENDING);
        it.wrote(ENABLED);
        it.observe(ENABLED);
        it.observe(PENDING);
        assert_eq!(it.believed(), PENDING, "somebody else's: ours was told of already");
    }

    #[test]
    fn a_change_by_somebody_else_is_believed() {
        let mut it = Annotation::default();
        it.wrote(ENABLED);
        it.observe(ENABLED);
        it.observe(None);
        assert_eq!(it.believed(), None);
        it.observe(ENABLED);
        assert_eq!(it.believed(), ENABLED);
    }

    #[test]
    fn what_is_told_again_is_not_a_change() {
        let mut it = Annotation::default();
        it.observe(PENDING);
        it.wrote(ENABLED);
        it.observe(PENDING);
        assert_eq!(it.believed(), ENABLED);
    }

    #[test]
    fn writes_never_told_of_do_not_pile_up() {
        let mut it = Annotation::default();
        for _ in 0..1000 {
            it.wrote(ENABLED);
            it.wrote(None);
        }
        assert!(it.awaited.len() <= AWAITED_MAX);
    }
}
