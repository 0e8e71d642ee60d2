//! What leaves over a real interface: nothing that is captured may go without the mark.

use weir_common::{Counter, DNS_PORT, Family, PodFlags};

use crate::{
    maps,
    packet::{DROP, Network, PASS, Packet, TCP, UDP},
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
    let (counter, family) = match packet.network_header() {
        Network::Other => return PASS,
        // Could be TCP: only a raw socket makes such a chain.
        Network::Opaque => (Counter::Guarded, Family::V6),
        Network::Transport(transport) => match transport.protocol {
            TCP => (Counter::Guarded, transport.family),
            UDP if config.flags.has(PodFlags::DNS) => match packet.ports(&transport) {
                Some(tuple) if tuple.destination_port == DNS_PORT.to_be() => {
                    (Counter::GuardedDns, transport.family)
                }
                _ => return PASS,
            },
            _ => return PASS,
        },
    };
    maps::count(counter, family);
    DROP
}
