//! Interfaces and addresses of a namespace.

use std::{collections::BTreeMap, net::IpAddr};

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{LinkAttribute, LinkMessage},
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::netlink::{Netlink, NetlinkError};

/// Index of `lo`, the same in every namespace.
pub const LOOPBACK: u32 = 1;

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its index in the namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its addresses of both families, link-local ones included.
    pub addresses: Vec<IpAddr>,
}

impl Interface {
    /// Whether it is `lo`.
    pub fn is_loopback(&self) -> bool {
        self.index == LOOPBACK
    }
}

/// All interfaces of the calling thread's namespace, `lo` first.
pub fn list() -> Result<Vec<Interface>, NetlinkError> {
    let mut netlink = Netlink::open(NETLINK_ROUTE)?;
    let mut interfaces = BTreeMap::new();
    let links = netlink.dump("listing interfaces", RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    for message in links {
        let RouteNetlinkMessage::NewLink(link) = message else { continue };
        let index = link.header.index;
        let name = link.attributes.into_iter().find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name),
            _ => None,
        });
        interfaces.insert(index, Interface { index, name: name.unwrap_or_default(), addresses: Vec::new() });
    }
    let mut all = AddressMessage::default();
    all.header.family = AddressFamily::Unspec;
    for message in netlink.dump("listing addresses", RouteNetlinkMessage::GetAddress(all))? {
        let RouteNetlinkMessage::NewAddress(address) = message else { continue };
        let Some(interface) = interfaces.get_mut(&address.header.index) else { continue };
        interface.addresses.extend(own(&address));
    }
    Ok(interfaces.into_values().collect())
}

/// The address itself: `IFA_LOCAL` where there is one (on a point-to-point link `IFA_ADDRESS` is the peer's).
fn own(message: &AddressMessage) -> Option<IpAddr> {
    let mut address = None;
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(local) => return Some(*local),
            AddressAttribute::Address(other) => address = Some(*other),
            _ => {}
        }
    }
    address
}
