//! What comes in over `lo`: the app's captured connections on their way to ztunnel, ztunnel's on their way to the
//! app, and the pod talking to itself.

use aya_ebpf::{
    bindings::{BPF_F_CURRENT_NETNS, bpf_sock_tuple},
    helpers::{bpf_sk_release, bpf_skc_lookup_tcp},
};
use weir_common::{Counter, Family, INSIDE_MARK, ListenerSlot, PodFlags, Tuple};

use crate::{
    dns, listener, maps,
    packet::{DROP, Network, PASS, Packet, TCP, Transport, UDP},
    shift,
};

/// BPF_TCP_LISTEN.
const LISTEN: u32 = 10;

#[inline(always)]
pub fn local(packet: Packet) -> i32 {
    let marked = packet.is_marked();
    if marked {
        // What the app's accepted socket inherits must bring its replies back to ztunnel.
        packet.set_mark(INSIDE_MARK);
    }
    let flags = maps::config().map_or(PodFlags::default(), |config| config.flags);
    let switching_on = flags.has(PodFlags::SWITCHING_ON);
    let shifting = maps::is_shifting();
    if packet.is_plain_segment(true) && (marked || !switching_on) && !shifting {
        return PASS;
    }
    let Network::Transport(transport) = packet.network_header() else { return PASS };
    if !matches!(transport.protocol, TCP | UDP) || transport.fragment {
        return PASS;
    }
    let Some(tuple) = packet.ports(&transport) else { return PASS };
    if flags.has(PodFlags::DNS)
        && let Some(verdict) = dns::rewrite(&packet, &transport, &tuple, marked)
    {
        return verdict;
    }
    if transport.protocol != TCP {
        return PASS;
    }
    let syn = packet.is_syn(&transport);
    if shifting && !(syn && marked) {
        shift::apply(&packet, &transport, &tuple, marked);
    }
    match (syn, marked) {
        (true, true) => from_ztunnel(&packet, &transport, &tuple),
        (true, false) => from_app(&packet, &transport, &tuple, flags),
        (false, false) if switching_on => not_adopted_yet(&packet, &transport, &tuple),
        (false, _) => PASS,
    }
}

/// A connection of ztunnel to the app, with the client's address: steer must let it through.
#[inline(always)]
fn from_ztunnel(packet: &Packet, transport: &Transport, tuple: &Tuple) -> i32 {
    if tuple.destination.is_loopback() {
        return PASS;
    }
    if !maps::inside_insert(tuple) {
        maps::count(Counter::InsideFull, transport.family);
        return DROP;
    }
    if !shift::make_unique(packet, transport, tuple) {
        maps::count(Counter::RefusedIn, transport.family);
        answer_with_reset(packet, transport, tuple);
    }
    PASS
}

/// A connection of the app.
#[inline(always)]
fn from_app(packet: &Packet, transport: &Transport, tuple: &Tuple, flags: PodFlags) -> i32 {
    if tuple.destination.is_loopback()
        || tuple.source == tuple.destination
        || maps::is_own(&tuple.destination)
    {
        return PASS;
    }
    if flags.has(PodFlags::DRAINING) {
        maps::count(Counter::Drained, transport.family);
        return DROP;
    }
    if !listener::ensure(packet, ListenerSlot::Outbound, transport.family) {
        maps::count(Counter::RefusedOut, transport.family);
        answer_with_reset(packet, transport, tuple);
    }
    PASS
}

/// Turns the SYN into the RST that answers it: the kernel cannot send one from a foreign address, the app would
/// wait for its timeout. The sum of the pseudo header stays as it is, and the rest of the checksum is filled in
/// later, as for all that is sent over `lo`.
#[inline(always)]
fn answer_with_reset(packet: &Packet, transport: &Transport, tuple: &Tuple) {
    let rst_ack = 0x14_u8;
    let Some(sequence) = packet.load::<u32>(transport.offset + 4) else { return };
    let swapped = match transport.family {
        Family::V4 => {
            packet.store(packet.network() + 12, &[tuple.destination.last_word(), tuple.source.last_word()])
        }
        Family::V6 => packet.store(packet.network() + 8, &[tuple.destination, tuple.source]),
    };
    if swapped {
        packet.store(transport.offset, &[tuple.destination_port, tuple.source_port]);
        packet.store(transport.offset + 4, &[0, u32::from_be(sequence).wrapping_add(1).to_be()]);
        packet.store(transport.offset + 13, &rst_ack);
    }
}

/// While switching on: a segment of a connection that is not adopted yet would meet ztunnel's listener and draw a
/// RST. Dropped, it is sent again, by its adopted socket.
#[inline(always)]
fn not_adopted_yet(packet: &Packet, transport: &Transport, tuple: &Tuple) -> i32 {
    if tuple.destination.is_loopback() || has_connection(packet, transport.family, tuple) {
        return PASS;
    }
    maps::count(Counter::SwitchingDropped, transport.family);
    DROP
}

/// Whether a socket other than a listener takes the segment.
#[inline(always)]
fn has_connection(packet: &Packet, family: Family, tuple: &Tuple) -> bool {
    // SAFETY: bpf_sock_tuple is a union of plain integers; the reference is released.
    unsafe {
        let mut key: bpf_sock_tuple = core::mem::zeroed();
        let length = shift::key_of(&mut key, family, tuple);
        let netns = i64::from(BPF_F_CURRENT_NETNS) as u64;
        let socket = bpf_skc_lookup_tcp(packet.skb().cast(), &raw mut key, length, netns, 0);
        if socket.is_null() {
            return false;
        }
        let state = (*socket).state;
        bpf_sk_release(socket.cast());
        state != LISTEN
    }
}
