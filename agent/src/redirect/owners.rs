//! Whose the pinned namespaces are: read from each record once, as every pod that is enrolled asks.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
};

use super::{RedirectError, error::directory};
use crate::{domain::workload::PodUid, kernel::PodDir};

/// Owners by namespace cookie, as far as read.
#[derive(Debug, Default)]
pub(super) struct Owners(Mutex<BTreeMap<u64, PodUid>>);

impl Owners {
    /// Notes that a namespace is this pod's from now on.
    pub(super) fn note(&self, cookie: u64, uid: PodUid) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(cookie, uid);
    }

    /// Namespaces that are pinned for this pod. The directory tells which there are.
    pub(super) fn namespaces(&self, pods: &Path, uid: &PodUid) -> Result<Vec<u64>, RedirectError> {
        let names = fs::read_dir(pods).map_err(directory(pods))?.flatten().map(|entry| entry.file_name());
        let there: BTreeSet<u64> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
        let mut owners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        owners.retain(|cookie, _| there.contains(cookie));
        for cookie in there {
            if let Entry::Vacant(unknown) = owners.entry(cookie)
                && let Ok(record) = PodDir::new(pods.join(cookie.to_string())).read_record()
            {
                unknown.insert(record.uid());
            }
        }
        Ok(owners.iter().filter(|(_, owner)| *owner == uid).map(|(cookie, _)| *cookie).collect())
    }
}
