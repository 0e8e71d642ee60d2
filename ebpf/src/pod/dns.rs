//! DNS capture: a query is sent to ztunnel's DNS listener on loopback, its answer is given back as if it came from
//! the server that was asked.
//!
//! On its way the query has a source port of its own, its *slot*, that stands for client address, client port and
//! server: queries from one port to several servers stay apart, whatever their ids. A slot is found by hashing, so
//! that every packet of a flow gets the same one without a second map.
//!
//! A slot goes over to another flow when no answer to it is on its way any more: for UDP when every query has been
//! answered, else when it was not used for longer than anybody waits. When all candidates are waited for, the query
//! is dropped and the client asks again: an answer never goes to a flow that did not ask for it.

use aya_ebpf::{
    bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR},
    helpers::{bpf_csum_diff, bpf_l3_csum_replace, bpf_l4_csum_replace},
};
use weir_common::{Addr, Counter, DNS_PORT, DNS_PROXY_PORT, DnsSlot, DnsSlotKey, Family, Tuple};

use crate::{
    maps::{self, DNS_SLOTS},
    packet::{DROP, PASS, Packet, TCP, Transport, UDP},
};

/// First slot port: above the ephemeral ports, so that no socket of the app is met by what has lost its slot.
const SLOT_BASE: u16 = 61000;
/// Slot ports for UDP. Slots are kept for the next flow, so each protocol needs its own share of the map: one could
/// fill it for ever.
const UDP_SLOTS: u32 = 3072;
/// Slot ports for TCP; with [`UDP_SLOTS`] as many as the map has room for.
const TCP_SLOTS: u32 = 1024;
/// Slots that are tried for one flow.
const WAYS: u32 = 8;
/// A slot that was not used for this long is free, answered or not: resolvers give up after 5 s.
const IDLE_NS: u64 = 10_000_000_000;

/// Which end of the packet is rewritten.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Where it comes from.
    Source,
    /// Where it goes.
    Destination,
}

/// Rewrites a DNS packet; none for everything else.
#[inline(always)]
pub fn rewrite(packet: &Packet, transport: &Transport, tuple: &Tuple, marked: bool) -> Option<i32> {
    if !marked && tuple.destination_port == DNS_PORT.to_be() {
        if tuple.destination.is_loopback() || maps::is_own(&tuple.destination) {
            return None;
        }
        return Some(query(packet, transport, tuple));
    }
    if tuple.source_port != DNS_PROXY_PORT.to_be() || !tuple.source.is_loopback() {
        return None;
    }
    // Only ztunnel's answers count, not those of an app that took its port; without a listener it is the kernel that
    // resets the connection, with the mark of the app's SYN, which is none.
    if marked || (transport.protocol == TCP && packet.is_reset(transport)) {
        return answer(packet, transport, tuple);
    }
    None
}

#[inline(always)]
fn query(packet: &Packet, transport: &Transport, tuple: &Tuple) -> i32 {
    let Some(slot) = slot(transport.protocol, tuple) else {
        maps::count(Counter::DnsFull, transport.family);
        return DROP;
    };
    // Word by word: as two constants they would become a read-only section, hence one more map per pod.
    let (v4, v6) = (Addr::LOOPBACK_V4.0, Addr::LOOPBACK_V6.0);
    let to = match transport.family {
        Family::V4 => Addr([v4[0], v4[1], v4[2], v4[3]]),
        Family::V6 => Addr([v6[0], v6[1], v6[2], v6[3]]),
    };
    replace_port(packet, transport, End::Source, tuple.source_port, slot);
    replace_port(packet, transport, End::Destination, tuple.destination_port, DNS_PROXY_PORT.to_be());
    replace_address(packet, transport, End::Destination, &tuple.destination, &to);
    maps::count(Counter::Dns, transport.family);
    PASS
}

#[inline(always)]
fn answer(packet: &Packet, transport: &Transport, tuple: &Tuple) -> Option<i32> {
    let key = DnsSlotKey { port: tuple.destination_port, protocol: u16::from(transport.protocol) };
    let slot = DNS_SLOTS.get_ptr_mut(key)?;
    // SAFETY: a live map value. It is not given away before this answer has been counted below.
    let (server, client_port) = unsafe {
        if (*slot).client != tuple.destination {
            // Asked for by hand, from a port that happens to be a slot's.
            return None;
        }
        ((*slot).server.by_word(), (*slot).client_port)
    };
    if transport.protocol == UDP {
        maps::dns_slot_answered(slot);
    }
    replace_address(packet, transport, End::Source, &tuple.source, &server);
    replace_port(packet, transport, End::Source, tuple.source_port, DNS_PORT.to_be());
    replace_port(packet, transport, End::Destination, tuple.destination_port, client_port);
    maps::count(Counter::DnsAnswer, transport.family);
    Some(PASS)
}

/// The slot port of a flow, network order.
#[inline(always)]
fn slot(protocol: u8, tuple: &Tuple) -> Option<u16> {
    let now = maps::now();
    let mine = DnsSlot {
        server: tuple.destination.by_word(),
        client: tuple.source.by_word(),
        client_port: tuple.source_port,
        pad: 0,
        pending: 1,
        used_at: now,
    };
    let hash = hash(&mine);
    let slots = if protocol == UDP { UDP_SLOTS } else { TCP_SLOTS };
    let key = |way: u32| DnsSlotKey {
        port: (SLOT_BASE + (hash.wrapping_add(way) % slots) as u16).to_be(),
        protocol: u16::from(protocol),
    };
    // Two plain passes, each of which keeps nothing but its index: a search that remembers the best candidate is
    // correct as well, but costs the verifier fifty times as long.
    for way in 0..WAYS {
        let Some(slot) = DNS_SLOTS.get_ptr_mut(key(way)) else { continue };
        // SAFETY: a live map value; the time is one aligned word.
        unsafe {
            if (*slot).client_port == mine.client_port
                && (*slot).server == mine.server
                && (*slot).client == mine.client
                && maps::dns_slot_asked(slot)
            {
                (*slot).used_at = now;
                return Some(key(way).port);
            }
        }
    }
    for way in 0..WAYS {
        if is_free(&key(way), now) && maps::dns_slot_claim(&key(way), &mine) {
            return Some(key(way).port);
        }
    }
    None
}

/// Whether nobody holds the slot, or nobody waits for an answer to it: then it is emptied.
#[inline(always)]
fn is_free(key: &DnsSlotKey, now: u64) -> bool {
    let Some(slot) = DNS_SLOTS.get_ptr_mut(key) else { return true };
    // SAFETY: a live map value; the time is one aligned word.
    let idle = now.wrapping_sub(unsafe { (*slot).used_at });
    maps::dns_slot_take(slot, idle > IDLE_NS) && DNS_SLOTS.remove(key).is_ok()
}

/// FNV-1a over the words of the flow.
#[inline(always)]
fn hash(slot: &DnsSlot) -> u32 {
    // Word by word: iterators over arrays by value are more than the BPF back end takes.
    let (server, client) = (&slot.server.0, &slot.client.0);
    let mut hash = 0x811c_9dc5_u32;
    hash = mix(mix(mix(mix(hash, server[0]), server[1]), server[2]), server[3]);
    hash = mix(mix(mix(mix(hash, client[0]), client[1]), client[2]), client[3]);
    hash = mix(hash, u32::from(slot.client_port));
    hash ^ (hash >> 15)
}

#[inline(always)]
fn mix(hash: u32, word: u32) -> u32 {
    (hash ^ word).wrapping_mul(0x0100_0193)
}

/// Flags of the transport checksum: a UDP packet without one stays so.
#[inline(always)]
fn checksum(transport: &Transport) -> (u32, u64) {
    if transport.protocol == UDP {
        (transport.offset + 6, u64::from(BPF_F_MARK_MANGLED_0))
    } else {
        (transport.offset + 16, 0)
    }
}

/// Rewrites a port and the checksum that covers it.
#[inline(always)]
pub fn replace_port(packet: &Packet, transport: &Transport, end: End, old: u16, new: u16) {
    let (offset, flags) = checksum(transport);
    // SAFETY: the context pointer of a tc program, integer arguments.
    unsafe { bpf_l4_csum_replace(packet.skb(), offset, u64::from(old), u64::from(new), flags | 2) };
    packet.store(transport.offset + if end == End::Source { 0 } else { 2 }, &new);
}

#[inline(always)]
fn replace_address(packet: &Packet, transport: &Transport, end: End, old: &Addr, new: &Addr) {
    let (offset, flags) = checksum(transport);
    let flags = flags | u64::from(BPF_F_PSEUDO_HDR);
    match transport.family {
        Family::V4 => {
            let (old, new) = (old.last_word(), new.last_word());
            // SAFETY: the context pointer of a tc program, integer arguments.
            unsafe {
                bpf_l4_csum_replace(packet.skb(), offset, u64::from(old), u64::from(new), flags | 4);
                bpf_l3_csum_replace(packet.skb(), packet.network() + 10, u64::from(old), u64::from(new), 4);
            }
            packet.store(packet.network() + if end == End::Source { 12 } else { 16 }, &new);
        }
        Family::V6 => {
            // SAFETY: two buffers of 16 bytes; the helper only reads them.
            unsafe {
                let (old, new) = (old.0.as_ptr().cast_mut(), new.0.as_ptr().cast_mut());
                let difference = bpf_csum_diff(old, 16, new, 16, 0);
                bpf_l4_csum_replace(packet.skb(), offset, 0, difference as u64, flags);
            }
            packet.store(packet.network() + if end == End::Source { 8 } else { 24 }, new);
        }
    }
}
