//! Keeps the sockmap slots filled with ztunnel's live listeners.

use aya_ebpf::{
    bindings::{BPF_F_CURRENT_NETNS, bpf_sock_tuple},
    helpers::{bpf_get_prandom_u32, bpf_map_lookup_elem, bpf_sk_lookup_tcp, bpf_sk_release},
};
use weir_common::{Addr, Counter, Family, ListenerSlot, is_marked};

use crate::maps::{self, LISTENERS};
use crate::packet::Packet;

/// BPF_TCP_LISTEN.
const LISTEN: u32 = 10;
/// Source ports to try: where an app shares ztunnel's port, the kernel picks a listener by hash of the tuple.
const TRIES: u32 = 8;

/// Makes sure the slot holds a live listener of ztunnel; false when there is none.
#[inline(always)]
pub fn ensure(packet: &Packet, slot: ListenerSlot, family: Family) -> bool {
    let key = slot as u32;
    // SAFETY: a sockmap look-up returns a referenced socket or null; the reference is released.
    unsafe {
        let socket =
            bpf_map_lookup_elem(core::ptr::addr_of!(LISTENERS).cast_mut().cast(), (&raw const key).cast());
        if !socket.is_null() {
            bpf_sk_release(socket);
            return true;
        }
    }
    find(packet, slot, family)
}

/// Looks the listener up by 127.0.0.1, which steer lets pass: the look-up runs that program too.
#[inline(always)]
fn find(packet: &Packet, slot: ListenerSlot, family: Family) -> bool {
    // SAFETY: bpf_sock_tuple is a union of plain integers. The look-up returns a full socket with a reference or
    // null; the reference is released on every path before the next look-up.
    unsafe {
        let mut tuple: bpf_sock_tuple = core::mem::zeroed();
        let v4 = &mut tuple.__bindgen_anon_1.ipv4;
        v4.saddr = Addr::LOOPBACK_V4.last_word();
        v4.daddr = Addr::LOOPBACK_V4.last_word();
        v4.dport = slot.port().to_be();
        let random = bpf_get_prandom_u32();
        for try_ in 0..TRIES {
            tuple.__bindgen_anon_1.ipv4.sport = random.wrapping_add(try_ * 257) as u16;
            let netns = i64::from(BPF_F_CURRENT_NETNS) as u64;
            let socket = bpf_sk_lookup_tcp(packet.skb().cast(), &raw mut tuple, 12, netns, 0);
            if socket.is_null() {
                return false;
            }
            if (*socket).state == LISTEN && is_marked((*socket).mark) {
                let stored = maps::listener_store(slot, socket.cast());
                bpf_sk_release(socket.cast());
                return stored;
            }
            bpf_sk_release(socket.cast());
            maps::count(Counter::Impostor, family);
        }
    }
    false
}
