//! Per-pod and per-node configuration, and the records programs leave for user space.

use crate::Addr;

/// Interfaces that `istio.io/reroute-virtual-interfaces` can name per pod.
pub const MAX_REROUTE: usize = 8;

/// Switches of a pod's data path, bits of [`PodConfig::flags`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodFlags(pub u32);

impl PodFlags {
    /// Connections from outside are steered to ztunnel; without it they reach the app.
    pub const INBOUND: Self = Self(1);
    /// Segments of connections that are not adopted yet are dropped on `lo` instead of answered by a reset.
    pub const SWITCHING_ON: Self = Self(1 << 1);
    /// New connections of the app are dropped on `lo`, so that their retry goes direct.
    pub const DRAINING: Self = Self(1 << 2);
    /// DNS goes to ztunnel's DNS listener.
    pub const DNS: Self = Self(1 << 3);
    /// Nothing leaves the pod without ztunnel's mark.
    pub const GUARD: Self = Self(1 << 4);
    /// Some ports of the pod are reached directly.
    pub const EXCLUDE_INBOUND: Self = Self(1 << 5);
    /// Some remote ports or networks are reached directly.
    pub const EXCLUDE_OUTBOUND: Self = Self(1 << 6);

    /// True when all of `other`'s bits are set.
    #[inline(always)]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// With `other`'s bits set.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// With `other`'s bits cleared.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// The one entry of a pod's configuration map. Replaced as a whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodConfig {
    /// Switches.
    pub flags: PodFlags,
    /// Mark put on what arrives from outside: [`crate::OLD_MARK`] until inbound capture is on (the app's accepted
    /// sockets inherit it and stay direct for their life), [`crate::ZTUNNEL_MARK`] from then on.
    pub arrive_mark: u32,
    /// Interfaces whose arriving TCP is the pod's own outbound traffic; zeros at the end.
    pub reroute_ifindex: [u32; MAX_REROUTE],
}

/// Key of the map of excluded ports.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExcludedPort {
    /// Network order.
    pub port: u16,
    /// 1 for remote ports, 0 for the pod's own.
    pub outbound: u16,
}

/// The one entry of the node's configuration map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    /// SO_NETNS_COOKIE of the host's network namespace (Linux 5.14): only connections made there can be probes.
    pub host_cookie: u64,
}

/// Key of a DNS slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DnsSlotKey {
    /// Source port the query has on its way to ztunnel, network order.
    pub port: u16,
    /// IP protocol: TCP or UDP.
    pub protocol: u16,
}

/// What a DNS slot stands for: who asked whom.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DnsSlot {
    /// The server asked.
    pub server: Addr,
    /// The address the app asked from.
    pub client: Addr,
    /// Port the app asked from, network order.
    pub client_port: u16,
    /// Not used.
    pub pad: u16,
    /// Queries that were not answered yet, or [`DnsSlot::TAKEN`]; of a TCP connection, its packets so far.
    pub pending: u32,
    /// Last use, CLOCK_MONOTONIC (coarse) in nanoseconds.
    pub used_at: u64,
}

impl DnsSlot {
    /// Set in [`DnsSlot::pending`] while the slot goes over to another flow: its old one must not use it any more.
    pub const TAKEN: u32 = 1 << 31;
}

/// Byte offsets inside kernel structures that adopt reads, taken from the running kernel's BTF: compiled Rust has no
/// relocations for them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelOffsets {
    /// `struct sock_common`, `skc_state`.
    pub skc_state: u32,
    /// `struct sock_common`, `skc_family`.
    pub skc_family: u32,
    /// `struct sock_common`, `skc_daddr`.
    pub skc_daddr: u32,
    /// `struct sock`, `sk_rx_dst_ifindex`.
    pub sk_rx_dst_ifindex: u32,
    /// `struct sock`, `sk_dst_cache`.
    pub sk_dst_cache: u32,
    /// `struct dst_entry`, `dev`.
    pub dst_dev: u32,
    /// `struct net_device`, `ifindex`.
    pub dev_ifindex: u32,
}

/// What adopt did with a socket.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketVerdict {
    /// Marked as older than the enrolment.
    Adopted = 1,
    /// Carries ztunnel's mark.
    Marked = 2,
    /// Goes over `lo`: captured, or the pod talking to itself.
    Captured = 3,
    /// Cannot be marked: a connection whose handshake is not complete.
    Unfinished = 4,
    /// The kernel refused the mark.
    Failed = 5,
    /// Has been marked as older than the enrolment before.
    Old = 6,
}

/// One record of the adopt iterator's output.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketNote {
    /// A [`SocketVerdict`].
    pub verdict: u32,
    /// errno of the refusal, 0 otherwise.
    pub errno: i32,
    /// 1 for a connection over IPv6, 0 for IPv4 (also by a dual-stack socket).
    pub v6: u32,
}

const _: () = assert!(size_of::<PodConfig>() == 8 + 4 * MAX_REROUTE);
const _: () = assert!(size_of::<NodeConfig>() == 8 && size_of::<KernelOffsets>() == 28);
const _: () = assert!(size_of::<ExcludedPort>() == 4);
const _: () = assert!(size_of::<DnsSlotKey>() == 4 && size_of::<DnsSlot>() == 48);
const _: () = assert!(size_of::<SocketNote>() == 12);

#[cfg(feature = "user")]
mod user {
    use super::{DnsSlot, DnsSlotKey, ExcludedPort, KernelOffsets, NodeConfig, PodConfig};

    // SAFETY: two half words, no padding, every bit pattern is valid.
    unsafe impl aya::Pod for ExcludedPort {}
    // SAFETY: words only, no padding, every bit pattern is valid.
    unsafe impl aya::Pod for KernelOffsets {}
    // SAFETY: words only, no padding, every bit pattern is valid.
    unsafe impl aya::Pod for PodConfig {}
    // SAFETY: one word.
    unsafe impl aya::Pod for NodeConfig {}
    // SAFETY: two half words, no padding, every bit pattern is valid.
    unsafe impl aya::Pod for DnsSlotKey {}
    // SAFETY: 48 bytes, the gap after the port is a named field, every bit pattern is valid.
    unsafe impl aya::Pod for DnsSlot {}
}
