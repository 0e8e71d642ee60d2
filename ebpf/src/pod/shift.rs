//! Another source port for a connection of ztunnel whose tuple is taken.
//!
//! ztunnel reaches the app with the client's address and a port of its own choice. Nothing is rewritten on the way
//! in, so the client's connection to ztunnel has the pod's address and the app's port as well: when ztunnel chooses
//! the port of a client's connection to the same port of the pod, the two are one tuple, and the kernel would take
//! the new SYN for a segment of the old connection. That is rare, as Linux gives `bind` and `connect` different
//! halves of its ports, but not for clients behind NAT, or with many connections, or with ports of their own choice.
//! Such a connection has another port while it travels over `lo`, in both directions.

use aya_ebpf::{
    bindings::{BPF_F_CURRENT_NETNS, bpf_sock_tuple},
    helpers::{bpf_get_prandom_u32, bpf_sk_lookup_tcp, bpf_sk_release},
};
use weir_common::{Counter, Family, Tuple, is_marked};

use crate::{
    dns::{End, replace_port},
    maps,
    packet::{Packet, Transport},
};

/// First of the other ports: above the ephemeral ones, and above the slots of DNS.
const BASE: u16 = 65_100;
/// How many there are, for each client and port of the pod.
const PORTS: u32 = 400;
/// Ports that are tried.
const TRIES: u32 = 2;

/// Gives a packet of such a connection its other port. `marked`: ztunnel sent it.
#[inline(always)]
pub fn apply(packet: &Packet, transport: &Transport, tuple: &Tuple, marked: bool) {
    let Some(port) = maps::shifted(tuple) else { return };
    if marked {
        replace_port(packet, transport, End::Source, tuple.source_port, port);
    } else {
        replace_port(packet, transport, End::Destination, tuple.destination_port, port);
    }
}

/// Sees to it that a SYN of ztunnel, whose tuple is recorded, meets no other connection; false when it has to be
/// refused.
#[inline(always)]
pub fn make_unique(packet: &Packet, transport: &Transport, tuple: &Tuple) -> bool {
    if !is_taken(packet, transport.family, tuple) {
        if maps::is_shifting() {
            maps::shift_remove(tuple);
        }
        return true;
    }
    // The same SYN, sent again.
    if let Some(port) = maps::shifted(tuple) {
        return use_port(packet, transport, tuple, port);
    }
    // SAFETY: no arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    for try_ in 0..TRIES {
        let port = (BASE + (random.wrapping_add(try_ * 101) % PORTS) as u16).to_be();
        let other = Tuple { source_port: port, ..*tuple };
        let back = Tuple {
            source: tuple.destination,
            destination: tuple.source,
            source_port: tuple.destination_port,
            destination_port: port,
        };
        if maps::shifted(&back).is_none()
            && maps::inside_insert(&other)
            && !is_taken(packet, transport.family, &other)
        {
            return maps::shift_insert(tuple, &back) && use_port(packet, transport, tuple, port);
        }
    }
    false
}

#[inline(always)]
fn use_port(packet: &Packet, transport: &Transport, tuple: &Tuple, port: u16) -> bool {
    let other = Tuple { source_port: port, ..*tuple };
    replace_port(packet, transport, End::Source, tuple.source_port, port);
    maps::count(Counter::TupleTaken, transport.family);
    maps::inside_insert(&other)
}

/// Whether a connection that ztunnel accepted has the tuple. Only what `steer` lets pass uncounted may be asked for.
#[inline(always)]
fn is_taken(packet: &Packet, family: Family, tuple: &Tuple) -> bool {
    /// BPF_TCP_LISTEN.
    const LISTEN: u32 = 10;
    // SAFETY: bpf_sock_tuple is a union of plain integers; the look-up returns a full socket with a reference or
    // null, and the reference is released.
    unsafe {
        let mut key: bpf_sock_tuple = core::mem::zeroed();
        let length = key_of(&mut key, family, tuple);
        let netns = i64::from(BPF_F_CURRENT_NETNS) as u64;
        let socket = bpf_sk_lookup_tcp(packet.skb().cast(), &raw mut key, length, netns, 0);
        if socket.is_null() {
            return false;
        }
        let taken = (*socket).state != LISTEN && is_marked((*socket).mark);
        bpf_sk_release(socket.cast());
        taken
    }
}

/// Fills in the key of a look-up and returns its length.
#[inline(always)]
pub fn key_of(key: &mut bpf_sock_tuple, family: Family, tuple: &Tuple) -> u32 {
    // SAFETY: every field of the union is plain integers.
    unsafe {
        match family {
            Family::V4 => {
                let v4 = &mut key.__bindgen_anon_1.ipv4;
                v4.saddr = tuple.source.last_word();
                v4.daddr = tuple.destination.last_word();
                v4.sport = tuple.source_port;
                v4.dport = tuple.destination_port;
                12
            }
            Family::V6 => {
                let v6 = &mut key.__bindgen_anon_1.ipv6;
                v6.saddr = tuple.source.0;
                v6.daddr = tuple.destination.0;
                v6.sport = tuple.source_port;
                v6.dport = tuple.destination_port;
                36
            }
        }
    }
}
