//! Which listener a new TCP connection of the pod is given to. Runs only when no established socket was found.

use aya_ebpf::{
    bindings::{
        bpf_sk_lookup,
        sk_action::{SK_DROP, SK_PASS},
    },
    helpers::{bpf_map_lookup_elem, bpf_sk_assign, bpf_sk_release},
};
use weir_common::{Addr, Counter, Family, HBONE_PORT, ListenerSlot, PodConfig, PodFlags, Tuple};

use crate::{
    maps::{self, LISTENERS},
    packet::TCP,
    probes::PROBES,
};

/// Interface index of `lo`, the same in every namespace.
const LOOPBACK_IFINDEX: u32 = 1;
const AF_INET: u32 = 2;
/// Assign this very socket: without it the kernel balances over the SO_REUSEPORT group, which an app with ztunnel's
/// uid can join.
const BPF_SK_LOOKUP_F_NO_REUSEPORT: u64 = 2;

/// What to do with the connection.
enum Decision {
    /// The kernel's own look-up.
    Pass,
    /// The same, counted.
    PassAs(Counter),
    /// ztunnel's listener, or refuse.
    Give(ListenerSlot),
}

#[inline(always)]
pub fn steer(ctx: *mut bpf_sk_lookup) -> u32 {
    // SAFETY: the context pointer of an sk_lookup program.
    if unsafe { (*ctx).protocol } != u32::from(TCP) {
        return SK_PASS;
    }
    let (tuple, family) = tuple(ctx);
    match decide(ctx, &tuple) {
        Decision::Pass => SK_PASS,
        Decision::PassAs(counter) => {
            maps::count(counter, family);
            SK_PASS
        }
        Decision::Give(slot) => give(ctx, slot, family),
    }
}

/// The connection as its first packet shows it: the source is the remote side.
#[inline(always)]
fn tuple(ctx: *mut bpf_sk_lookup) -> (Tuple, Family) {
    /// One word at a time: an array copy becomes pointer arithmetic on the context, which the verifier refuses.
    macro_rules! words {
        ($field:ident) => {
            Addr([
                core::ptr::read_volatile(&raw const (*ctx).$field[0]),
                core::ptr::read_volatile(&raw const (*ctx).$field[1]),
                core::ptr::read_volatile(&raw const (*ctx).$field[2]),
                core::ptr::read_volatile(&raw const (*ctx).$field[3]),
            ])
        };
    }
    // SAFETY: the context pointer of an sk_lookup program; every access is a whole field.
    unsafe {
        let (source, destination, family) = if (*ctx).family == AF_INET {
            (Addr::v4((*ctx).remote_ip4), Addr::v4((*ctx).local_ip4), Family::V4)
        } else {
            (words!(remote_ip6), words!(local_ip6), Family::V6)
        };
        let source_port = (*ctx).remote_port;
        let destination_port = ((*ctx).local_port as u16).to_be();
        (Tuple { source, destination, source_port, destination_port }, family)
    }
}

/// The rules, in the order of the design.
#[inline(always)]
fn decide(ctx: *mut bpf_sk_lookup, tuple: &Tuple) -> Decision {
    if tuple.destination.is_loopback() {
        return Decision::Pass;
    }
    if tuple.source == tuple.destination {
        return Decision::PassAs(Counter::SelfCall);
    }
    // SAFETY: the context pointer of an sk_lookup program.
    let ifindex = unsafe { (*ctx).ingress_ifindex };
    if maps::inside_has(tuple) {
        // By `lo` it is a question of `local`: the pod's addresses are seen on the interface that has them.
        let asked = ifindex == LOOPBACK_IFINDEX;
        return if asked { Decision::Pass } else { Decision::PassAs(Counter::Inside) };
    }
    if PROBES.get_ptr(tuple).is_some() {
        return Decision::PassAs(Counter::Probe);
    }
    let from_own = maps::is_own(&tuple.source);
    if from_own && maps::is_own(&tuple.destination) {
        return Decision::PassAs(Counter::SelfCall);
    }
    // Routed by our table, or sent from a socket bound to a device.
    if ifindex == LOOPBACK_IFINDEX || from_own {
        return Decision::Give(ListenerSlot::Outbound);
    }
    let Some(config) = maps::config() else { return Decision::Give(ListenerSlot::Inbound) };
    if is_rerouted(config, ifindex) {
        return Decision::Give(ListenerSlot::Outbound);
    }
    if !config.flags.has(PodFlags::INBOUND) {
        return Decision::PassAs(Counter::BypassInbound);
    }
    if config.flags.has(PodFlags::EXCLUDE_INBOUND) && maps::is_excluded_port(tuple.destination_port, false) {
        return Decision::PassAs(Counter::ExcludedIn);
    }
    // Given, not passed: an app that joined ztunnel's SO_REUSEPORT group must not get a share.
    if tuple.destination_port == HBONE_PORT.to_be() {
        Decision::Give(ListenerSlot::Hbone)
    } else {
        Decision::Give(ListenerSlot::Inbound)
    }
}

/// Whether what arrives on the interface is the pod's own outbound traffic (a virtual machine's, say).
#[inline(always)]
pub fn is_rerouted(config: &PodConfig, ifindex: u32) -> bool {
    for candidate in config.reroute_ifindex {
        if candidate == 0 {
            return false;
        }
        if candidate == ifindex {
            return true;
        }
    }
    false
}

/// Gives the connection to ztunnel. Without a listener it is refused: fail closed.
#[inline(always)]
fn give(ctx: *mut bpf_sk_lookup, slot: ListenerSlot, family: Family) -> u32 {
    let (given, refused) = match slot {
        ListenerSlot::Outbound => (Counter::CapturedOut, Counter::RefusedOut),
        ListenerSlot::Inbound => (Counter::CapturedIn, Counter::RefusedIn),
        ListenerSlot::Hbone => (Counter::Hbone, Counter::RefusedIn),
    };
    let key = slot as u32;
    // SAFETY: a sockmap look-up returns a referenced socket or null; the reference is released on every path.
    let assigned = unsafe {
        let map = core::ptr::addr_of!(LISTENERS).cast_mut().cast();
        let socket = bpf_map_lookup_elem(map, (&raw const key).cast());
        if socket.is_null() {
            false
        } else {
            let error = bpf_sk_assign(ctx.cast(), socket, BPF_SK_LOOKUP_F_NO_REUSEPORT);
            bpf_sk_release(socket);
            error == 0
        }
    };
    maps::count(if assigned { given } else { refused }, family);
    if assigned { SK_PASS } else { SK_DROP }
}
