//! The one map that node and pods share.

use aya_ebpf::{macros::map, maps::LruHashMap};
use weir_common::Tuple;

/// Connections of the kubelet that are open, as the pod sees them. One per node, pinned; only connections that the
/// kubelet's cgroup opens from the host's namespace get in, so no pod can fill it.
#[map]
pub static PROBES: LruHashMap<Tuple, u8> = LruHashMap::with_max_entries(16384, 0);
