//! What a namespace looks like: its interfaces and addresses.

use std::net::IpAddr;

use weir_common::{Addr, MAX_REROUTE};

use crate::netns::{
    interfaces::{self, Interface},
    netlink::NetlinkError,
};

/// Interfaces and addresses of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// All interfaces, `lo` first.
    pub interfaces: Vec<Interface>,
}

impl Shape {
    /// Of the calling thread's namespace.
    pub fn of_current() -> Result<Self, NetlinkError> {
        Ok(Self { interfaces: interfaces::list()? })
    }

    /// Indices of the named interfaces that exist, with zeros behind.
    pub fn indices(&self, names: &[String]) -> [u32; MAX_REROUTE] {
        let mut indices = [0; MAX_REROUTE];
        let found = self.interfaces.iter().filter(|interface| names.contains(&interface.name));
        indices.iter_mut().zip(found).for_each(|(index, interface)| *index = interface.index);
        indices
    }

    /// The address that captured connections come from: the first global one of the family that is not on `lo`.
    /// Without one the family is not captured: there is nothing it could reach but its own link.
    pub fn source(&self, v6: bool) -> Option<IpAddr> {
        self.interfaces
            .iter()
            .filter(|interface| !interface.is_loopback())
            .flat_map(|interface| &interface.addresses)
            .copied()
            .find(|address| address.is_ipv6() == v6 && !is_link_local(address))
    }

    /// Every address of the namespace but those of loopback.
    pub fn own_ips(&self) -> Vec<IpAddr> {
        self.interfaces
            .iter()
            .flat_map(|interface| &interface.addresses)
            .copied()
            .filter(|address| !address.is_loopback())
            .collect()
    }

    /// The same as map keys.
    pub fn own(&self) -> Vec<Addr> {
        self.own_ips().into_iter().map(Addr::from).collect()
    }
}

/// `fe80::/10`. IPv4 link-local addresses are ordinary pod addresses in some networks.
fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}
