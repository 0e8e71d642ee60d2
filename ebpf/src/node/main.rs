//! What one node needs of the data path: probe (which connections are the kubelet's) and adopt (which are older
//! than the enrolment).
#![no_std]
#![no_main]

mod adopt;
mod probe;
#[path = "../probes.rs"]
mod probes;

use aya_ebpf::{bindings::bpf_sock_ops, macros::map, maps::Array};
use weir_common::NodeConfig;

/// One entry.
#[map]
static NODE: Array<NodeConfig> = Array::with_max_entries(1, 0);

/// Cookie of the host's network namespace; 0, which no namespace has, until user space has set it.
#[inline(always)]
fn host_cookie() -> u64 {
    NODE.get(0).map_or(0, |node| node.host_cookie)
}

/// The kubelet's cgroup on the host.
// SAFETY (of the unsafe attributes here): names and sections are what the loader looks programs up by; each name
// is used once in this object.
#[unsafe(no_mangle)]
#[unsafe(link_section = "sockops")]
pub extern "C" fn probe(ctx: *mut bpf_sock_ops) -> u32 {
    probe::probe(ctx)
}

/// First pass over the sockets of a namespace: every connection is older than the enrolment.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/tcp")]
pub extern "C" fn adopt_all(ctx: *mut adopt::IterTcp) -> i32 {
    adopt::adopt(ctx, adopt::Pass::All)
}

/// Later passes: every connection that does not go over `lo` is older than the enrolment.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/tcp")]
pub extern "C" fn adopt_rest(ctx: *mut adopt::IterTcp) -> i32 {
    adopt::adopt(ctx, adopt::Pass::Rest)
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
