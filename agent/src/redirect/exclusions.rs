//! What a pod may reach, and be reached by, without ztunnel: as sets that the programs look up.

use weir_common::{Addr, ExcludedPort};

use crate::{
    domain::overrides::{Cidr, Overrides},
    kernel::{KernelError, PodDir},
    netns::sockets::TcpSocket,
};

/// Excluded ports and networks. Prefixes count in mapped addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Exclusions {
    ports: Vec<ExcludedPort>,
    networks: Vec<(Addr, u32)>,
}

impl Exclusions {
    /// What a pod's annotations ask for.
    pub(super) fn of(overrides: &Overrides) -> Self {
        let port = |outbound| move |port: &u16| ExcludedPort { port: port.to_be(), outbound };
        let inbound = overrides.exclude_inbound_ports.iter().map(port(0));
        let network = |cidr: &Cidr| {
            let before = if cidr.address.is_ipv4() { 96 } else { 0 };
            (Addr::from(cidr.address), before + u32::from(cidr.prefix))
        };
        Self {
            ports: inbound.chain(overrides.exclude_outbound_ports.iter().map(port(1))).collect(),
            networks: overrides.exclude_outbound_cidrs.iter().map(network).collect(),
        }
    }

    /// What a pod's programs look up now.
    pub(super) fn of_pod(dir: &PodDir) -> Result<Self, KernelError> {
        Ok(Self { ports: dir.excluded_ports()?, networks: dir.excluded_networks()? })
    }

    /// Adds these to what the programs look up.
    pub(super) fn add_to(&self, dir: &PodDir) -> Result<(), KernelError> {
        let mut both = Self::of_pod(dir)?;
        both.ports.extend(&self.ports);
        both.networks.extend(&self.networks);
        both.set_in(dir)
    }

    /// Makes the programs look up exactly these.
    pub(super) fn set_in(&self, dir: &PodDir) -> Result<(), KernelError> {
        dir.set_excluded_ports(&self.ports)?;
        dir.set_excluded_networks(&self.networks)
    }

    /// The ports again, in host order.
    pub(super) fn ports(&self, outbound: bool) -> Vec<u16> {
        let of = self.ports.iter().filter(|port| (port.outbound == 1) == outbound);
        of.map(|port| u16::from_be(port.port)).collect()
    }

    /// The networks again, each in its own family.
    pub(super) fn cidrs(&self) -> Vec<Cidr> {
        let cidr = |(address, prefix): &(Addr, u32)| {
            let address = std::net::IpAddr::from(*address);
            let before = if address.is_ipv4() { 96 } else { 0 };
            Cidr { address, prefix: u8::try_from(prefix.saturating_sub(before)).unwrap_or(u8::MAX) }
        };
        self.networks.iter().map(cidr).collect()
    }

    /// Whether something the pod may reach in `other` is missing here.
    pub(super) fn lacks_some_of(&self, other: &Self) -> bool {
        other.ports.iter().any(|port| port.outbound == 1 && !self.ports.contains(port))
            || other.networks.iter().any(|network| !self.networks.contains(network))
    }

    /// Whether the socket's other end may be reached directly.
    pub(super) fn has(&self, socket: &TcpSocket) -> bool {
        let port = ExcludedPort { port: socket.remote_port().to_be(), outbound: 1 };
        let remote = u128::from_be_bytes(bytes(Addr::from(socket.remote())));
        let inside = |(network, prefix): &(Addr, u32)| {
            let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
            (remote ^ u128::from_be_bytes(bytes(*network))) & mask == 0
        };
        self.ports.contains(&port) || self.networks.iter().any(inside)
    }
}

/// The sixteen bytes as they lie in memory.
fn bytes(addr: Addr) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (chunk, word) in bytes.chunks_exact_mut(4).zip(addr.0) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}
