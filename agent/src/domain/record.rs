//! What is pinned with a pod besides programs and maps: who it is, and how to undo what was done to it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::workload::{PodUid, WorkloadInfo};

/// Version of the pin layout and of every shared type. Another one is never re-used.
pub const LAYOUT: u32 = 1;

/// Written when the pod's directory is made, and when its programs are replaced. Lives in a map of its own, because bpffs holds no files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`LAYOUT`] of the agent that wrote it.
    pub layout: u32,
    /// Boot the namespace belongs to (`/proc/sys/kernel/random/boot_id`): pins do not outlive it, a copy might.
    pub boot_id: String,
    /// SO_NETNS_COOKIE.
    pub cookie: u64,
    /// Pod UID; a made-up one when the data path was switched on by hand.
    pub uid: String,
    /// Pod name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// Service account.
    pub service_account: String,
    /// Sysctls as they were.
    pub sysctls: BTreeMap<String, String>,
    /// Which programs run there ([`PodPrograms::version`](crate::kernel::PodPrograms::version)).
    #[serde(default)]
    pub programs: String,
    /// When, seconds since the epoch.
    pub since: u64,
}

impl Record {
    /// The pod's UID.
    pub fn uid(&self) -> PodUid {
        PodUid::from(self.uid.as_str())
    }

    /// What ztunnel needs to know.
    pub fn info(&self) -> WorkloadInfo {
        WorkloadInfo {
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            service_account: self.service_account.clone(),
        }
    }
}
