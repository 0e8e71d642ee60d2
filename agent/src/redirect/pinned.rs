//! What the pins tell of the pods of a node; needs no agent.

use std::{fs, path::Path};

use weir_common::{Counters, PodConfig};

use super::layout_dir;
use crate::{
    domain::record::Record,
    kernel::{OldConnections, PodDir},
};

/// A pod as its pins tell it.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// Who, and since when.
    pub record: Record,
    /// Its switches.
    pub config: PodConfig,
    /// Its counters.
    pub counters: Counters,
    /// Connections that were older than the enrolment.
    pub old: OldConnections,
    /// Whether steer's link is there.
    pub linked: bool,
}

/// Every pod that is pinned under `root`; needs no agent. Directories that make no sense are left out.
pub fn pinned(root: &Path) -> Vec<Pinned> {
    let Ok(entries) = fs::read_dir(layout_dir(root).join("pods")) else { return Vec::new() };
    let mut pods: Vec<Pinned> = entries
        .flatten()
        .filter_map(|entry| {
            let dir = PodDir::new(entry.path());
            Some(Pinned {
                record: dir.read_record().ok()?,
                config: dir.config().ok()?,
                counters: dir.counters().ok()?,
                old: dir.old_connections().ok()?,
                linked: dir.has_link(),
            })
        })
        .collect();
    pods.sort_by(|a, b| (&a.record.namespace, &a.record.name).cmp(&(&b.record.namespace, &b.record.name)));
    pods
}
