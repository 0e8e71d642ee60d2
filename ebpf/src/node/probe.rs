//! Which connections are the kubelet's: those its cgroup opens from the host's network namespace.

use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_TCP_ESTABLISHED,
        BPF_TCP_SYN_SENT, bpf_sock_ops,
    },
    helpers::{bpf_get_netns_cookie, bpf_sock_ops_cb_flags_set},
};
use weir_common::{Addr, Tuple};

use crate::{host_cookie, probes::PROBES};

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;

#[inline(always)]
pub fn probe(ctx: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the context pointer of a sock_ops program.
    let (op, new_state) = unsafe { ((*ctx).op, (*ctx).__bindgen_anon_1.args[1]) };
    match op {
        // Before the SYN leaves, with the local port known.
        BPF_SOCK_OPS_TCP_CONNECT_CB => opened(ctx),
        BPF_SOCK_OPS_STATE_CB if !matches!(new_state, BPF_TCP_ESTABLISHED | BPF_TCP_SYN_SENT) => closed(ctx),
        _ => {}
    }
    1
}

#[inline(always)]
fn opened(ctx: *mut bpf_sock_ops) {
    // SAFETY: the context pointer of a sock_ops program.
    if unsafe { bpf_get_netns_cookie(ctx.cast()) } != host_cookie() {
        return;
    }
    let Some(tuple) = tuple(ctx) else { return };
    // Asked for first: a tuple that could not be forgotten must not be recorded.
    // SAFETY: as above.
    let told = unsafe {
        let flags = (*ctx).bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG;
        bpf_sock_ops_cb_flags_set(ctx, flags as i32) == 0
    };
    if told {
        let _ = PROBES.insert(tuple, 1, 0);
    }
}

#[inline(always)]
fn closed(ctx: *mut bpf_sock_ops) {
    if let Some(tuple) = tuple(ctx) {
        let _ = PROBES.remove(tuple);
    }
}

/// The connection as the pod sees it: the source is the host.
#[inline(always)]
fn tuple(ctx: *mut bpf_sock_ops) -> Option<Tuple> {
    /// One word at a time: an array copy becomes pointer arithmetic on the context, which the verifier refuses.
    macro_rules! word {
        ($($field:ident)+ . $index:literal) => {
            core::ptr::read_volatile(&raw const (*ctx).$($field)+[$index])
        };
    }
    // SAFETY: the context pointer of a sock_ops program; every access is a whole field. All fields are read whatever
    // the family is (the kernel allows it): two branches that read would be merged into one that reads at a computed
    // offset, which the verifier refuses as well.
    unsafe {
        let local4 = core::ptr::read_volatile(&raw const (*ctx).local_ip4);
        let remote4 = core::ptr::read_volatile(&raw const (*ctx).remote_ip4);
        let local6 = [word!(local_ip6.0), word!(local_ip6.1), word!(local_ip6.2), word!(local_ip6.3)];
        let remote6 = [word!(remote_ip6.0), word!(remote_ip6.1), word!(remote_ip6.2), word!(remote_ip6.3)];
        let (source, destination) = match (*ctx).family {
            AF_INET => (Addr::v4(local4), Addr::v4(remote4)),
            AF_INET6 => (Addr(local6), Addr(remote6)),
            _ => return None,
        };
        Some(Tuple {
            source,
            destination,
            source_port: ((*ctx).local_port as u16).to_be(),
            // The remote port is in network order, in the upper half of the word.
            destination_port: ((*ctx).remote_port >> 16) as u16,
        })
    }
}
