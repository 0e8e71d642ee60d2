//! Types and constants shared by the eBPF programs and user space.
//!
//! Everything here crosses the kernel boundary as bytes: `repr(C)`, no padding that is not named, sizes asserted
//! at compile time on both sides. Addresses are 16 bytes in network order, IPv4 in its mapped form
//! (`::ffff:a.b.c.d`), so that one code path serves both families.
#![no_std]

mod counters;
mod pod;
mod tuple;

pub use counters::{Counter, Counters, Family};
pub use pod::{
    DnsSlot, DnsSlotKey, ExcludedPort, KernelOffsets, MAX_REROUTE, NodeConfig, PodConfig, PodFlags,
    SocketNote, SocketVerdict,
};
pub use tuple::{Addr, Tuple};

/// SO_MARK that ztunnel puts on every socket it makes in a pod (its `PACKET_MARK`, 1337).
pub const ZTUNNEL_MARK: u32 = 0x539;
/// Bits of the mark that are compared, as in Istio's rules.
pub const MARK_MASK: u32 = 0xfff;
/// Mark of a connection older than the enrolment: matches [`ZTUNNEL_MARK`] under [`MARK_MASK`], so that it keeps
/// going straight out, and can be told from ztunnel's own.
pub const OLD_MARK: u32 = 0x1000_0539;

/// Mark of what ztunnel sends to the app, once it is on `lo`. The app's accepted socket inherits it
/// (`tcp_fwmark_accept`), so that its replies go back to ztunnel even where the pod's own connections to the same
/// peer would go directly. Does not match [`ZTUNNEL_MARK`].
pub const INSIDE_MARK: u32 = 0x2000_0000;

/// True for a mark that goes straight out: ztunnel's, or an old connection's.
#[inline(always)]
pub const fn is_marked(mark: u32) -> bool {
    mark & MARK_MASK == ZTUNNEL_MARK
}

/// ztunnel's listener for what the pod sends.
pub const OUTBOUND_PORT: u16 = 15001;
/// ztunnel's listener for plaintext that arrives.
pub const INBOUND_PORT: u16 = 15006;
/// ztunnel's HBONE listener.
pub const HBONE_PORT: u16 = 15008;
/// ztunnel's DNS listener, on loopback only.
pub const DNS_PROXY_PORT: u16 = 15053;
/// The port DNS is captured on.
pub const DNS_PORT: u16 = 53;

/// Slots of the per-pod sockmap that holds ztunnel's listeners.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerSlot {
    /// [`OUTBOUND_PORT`].
    Outbound = 0,
    /// [`INBOUND_PORT`].
    Inbound = 1,
    /// [`HBONE_PORT`].
    Hbone = 2,
}

impl ListenerSlot {
    /// Number of slots.
    pub const COUNT: u32 = 3;

    /// The port whose listener belongs into the slot.
    #[inline(always)]
    pub const fn port(self) -> u16 {
        match self {
            Self::Outbound => OUTBOUND_PORT,
            Self::Inbound => INBOUND_PORT,
            Self::Hbone => HBONE_PORT,
        }
    }
}

/// An entry of the `inside` map counts for this long, in nanoseconds: from loop to steer of one packet it lives for
/// microseconds, with a SYN cookie for one round trip inside the pod.
pub const INSIDE_MAX_AGE_NS: u64 = 2_000_000_000;
