//! What leaves over a real interface: nothing that is captured may go without the mark.

use weir_common::{Counter, DNS_PORT, Family, PodFlags, Tuple};

use crate::{
    maps,
    packet::{DROP, Network, PASS, Packet, TCP, Transport, UDP},
};

#[inline(always)]
pub fn guard(packet: Packet) -> i32 {
    if packet.is_marked() {
        return PASS;
    }
    let Some(config) = maps::config() else { return DROP };
    if !config.flags.has(PodFlags::GUARD) {
        return PASS;
    }
    let transport = match packet.network_header() {
        Network::Other => return PASS,
        // Could be TCP: only a raw socket makes such a chain.
        Network::Opaque => {
            maps::count(Counter::Guarded, Family::V6);
            return DROP;
        }
        Network::Transport(transport) => transport,
    };
    // While capture of DNS is being switched off its rule goes first: what then leaves may leave.
    let captured = config.flags.has(PodFlags::DNS) && !config.flags.has(PodFlags::SWITCHING_ON);
    let dns = transport.protocol == UDP && captured;
    if transport.protocol != TCP && !dns {
        return PASS;
    }
    let tuple = packet.ports(&transport);
    if dns && tuple.is_none_or(|tuple| tuple.destination_port != DNS_PORT.to_be()) {
        return PASS;
    }
    if config.flags.has(PodFlags::EXCLUDE_OUTBOUND) && is_excluded(&packet, &transport, tuple) {
        return PASS;
    }
    maps::count(if dns { Counter::GuardedDns } else { Counter::Guarded }, transport.family);
    DROP
}

/// Whether the packet goes where the pod may go directly; its first is counted.
#[inline(always)]
fn is_excluded(packet: &Packet, transport: &Transport, tuple: Option<Tuple>) -> bool {
    // A fragment without ports belongs to a packet whose first was judged.
    let excluded = maps::is_excluded_address(&transport.tuple.destination)
        || tuple.is_none_or(|tuple| maps::is_excluded_port(tuple.destination_port, true));
    if excluded && transport.protocol == TCP && !transport.headless && packet.is_syn(transport) {
        maps::count(Counter::ExcludedOut, transport.family);
    }
    excluded
}
