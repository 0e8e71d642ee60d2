//! What comes in over a real interface.

use weir_common::{Counter, HBONE_PORT, ListenerSlot, ZTUNNEL_MARK};

use crate::{
    listener, maps,
    packet::{Network, PASS, Packet, TCP, Transport},
    steer,
};

#[inline(always)]
pub fn arrive(packet: Packet) -> i32 {
    let config = maps::config();
    let rerouted = config.is_some_and(|config| steer::is_rerouted(config, packet.ifindex()));
    // With the mark the reverse-path check uses the main table, and what answers without a socket of its own (a
    // closed port, a probe's accepted socket) leaves by it.
    packet.set_mark(config.map_or(ZTUNNEL_MARK, |config| config.arrive_mark));
    if packet.is_plain_segment(false) {
        return PASS;
    }
    if let Network::Transport(transport) = packet.network_header()
        && transport.protocol == TCP
    {
        connection(&packet, &transport, rerouted);
    }
    PASS
}

/// Prepares what steer needs for a new connection.
#[inline(always)]
fn connection(packet: &Packet, transport: &Transport, rerouted: bool) {
    // The first fragment of a segment may end before the flags: it counts as a SYN.
    if !transport.fragment && !packet.is_syn(transport) {
        return;
    }
    let Some(tuple) = packet.ports(transport) else { return };
    // A connection from outside must not pass for one that ztunnel made a moment ago.
    if maps::inside_remove(&tuple) {
        maps::count(Counter::InsideReused, transport.family);
    }
    let slot = if tuple.destination_port == HBONE_PORT.to_be() {
        ListenerSlot::Hbone
    } else if rerouted {
        ListenerSlot::Outbound
    } else {
        ListenerSlot::Inbound
    };
    // Without a listener steer refuses, and counts.
    listener::ensure(packet, slot, transport.family);
}
