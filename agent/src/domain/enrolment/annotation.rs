//! What the annotation says, between what was written and what the API server has told since.

use crate::domain::workload::Redirection;

/// The watch tells of a write some time after it was made, and by then another may have been made. Old
/// news must not be mistaken for a change: a pod believed to be without the annotation would be taken out
/// of the mesh with `enabled` still on it. Versions of the object tell old from new. After a write that
/// failed it may say either, whatever the watch tells, until a write succeeds.
#[derive(Debug, Default)]
pub(super) struct Annotation {
    believed: Option<Redirection>,
    version: u64,
    uncertain: bool,
}

impl Annotation {
    /// It says this, for all we know.
    pub(super) fn is(&self, value: Option<Redirection>) -> bool {
        self.believed == value && !self.uncertain
    }

    /// It cannot be ruled out that it says this.
    pub(super) fn may_be(&self, value: Option<Redirection>) -> bool {
        self.believed == value || self.uncertain
    }

    /// The watch says it was `value` in this version of the pod.
    pub(super) fn observe(&mut self, value: Option<Redirection>, version: u64) {
        if version >= self.version {
            self.believed = value;
            self.version = version;
        }
    }

    /// We have made it `value`, which made this version of the pod.
    pub(super) fn wrote(&mut self, value: Option<Redirection>, version: u64) {
        *self = Self { believed: value, version: version.max(self.version), uncertain: false };
    }

    /// A write has failed, or so it seems.
    pub(super) fn write_failed(&mut self) {
        self.uncertain = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENABLED: Option<Redirection> = Some(Redirection::Enabled);
    const PENDING: Option<Redirection> = Some(Redirection::Pending);

    #[test]
    fn old_news_changes_nothing() {
        let mut it = Annotation::default();
        it.wrote(PENDING, 5);
        it.wrote(None, 6);
        it.wrote(ENABLED, 8);
        for (value, version) in [(None, 4), (PENDING, 5), (None, 6), (None, 7), (ENABLED, 8)] {
            it.observe(value, version);
            assert!(it.is(ENABLED), "after {value:?} in {version}");
        }
    }

    #[test]
    fn a_later_change_by_somebody_else_is_believed() {
        let mut it = Annotation::default();
        it.wrote(ENABLED, 8);
        it.observe(None, 9);
        assert!(it.is(None));
        // A list served from a server that is behind.
        it.observe(ENABLED, 8);
        assert!(it.is(None));
        it.observe(PENDING, 11);
        assert!(it.is(PENDING) && !it.may_be(ENABLED));
    }

    #[test]
    fn after_a_failed_write_nothing_is_certain_until_one_succeeds() {
        let mut it = Annotation::default();
        it.write_failed();
        // Some other change, made before the write was applied.
        it.observe(None, 9);
        assert!(!it.is(None) && it.may_be(ENABLED));
        it.wrote(None, 11);
        assert!(it.is(None) && !it.may_be(ENABLED));
    }
}
