//! The data path of one pod: steer, arrive, local, guard.
//!
//! Loaded once per pod, with maps of its own: a program of type sk_lookup cannot know its network namespace, and no
//! pod's traffic may evict what another pod needs. How a connection walks through them is
//! drawn in `docs/architecture.md`.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![allow(internal_features, reason = "AtomicU64 has no fetch_add on a target without compare-and-swap")]

mod arrive;
mod dns;
mod guard;
mod listener;
mod local;
mod maps;
mod packet;
#[path = "../probes.rs"]
mod probes;
mod shift;
mod steer;

use aya_ebpf::bindings::{__sk_buff, bpf_sk_lookup};

/// Length of an Ethernet header; every interface weir attaches to has one.
const ETHERNET: u32 = 14;

/// Picks the listener of a new connection.
// SAFETY (of the unsafe attributes here): names and sections are what the loader looks programs up by; each name
// is used once in this object.
#[unsafe(no_mangle)]
#[unsafe(link_section = "sk_lookup")]
pub extern "C" fn steer(ctx: *mut bpf_sk_lookup) -> u32 {
    steer::steer(ctx)
}

/// Ingress of every interface but `lo`.
#[unsafe(no_mangle)]
#[unsafe(link_section = "classifier")]
pub extern "C" fn arrive(skb: *mut __sk_buff) -> i32 {
    arrive::arrive(packet::Packet::new(skb, ETHERNET))
}

/// Ingress of `lo`.
#[unsafe(no_mangle)]
#[unsafe(link_section = "classifier")]
pub extern "C" fn local(skb: *mut __sk_buff) -> i32 {
    local::local(packet::Packet::new(skb, ETHERNET))
}

/// Egress of every interface but `lo`.
#[unsafe(no_mangle)]
#[unsafe(link_section = "classifier")]
pub extern "C" fn guard(skb: *mut __sk_buff) -> i32 {
    guard::guard(packet::Packet::new(skb, ETHERNET))
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing here can panic: the verifier would refuse the loop.
    loop {}
}

/// Helpers that are reserved for GPL-compatible programs are used.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
