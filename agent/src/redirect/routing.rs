//! Policy routing of a captured namespace: what carries no mark goes to `lo`, where ztunnel's listeners are.
//!
//! | preference | rule |
//! |---|---|
//! | base | `fwmark 0x539/0xfff goto base+9` |
//! | base+1 | `iif lo ipproto tcp lookup 15001` |
//! | base+2 | `iif lo ipproto udp dport 53 lookup 15001` (DNS capture) |
//! | base+9 | `nop` |
//!
//! A mark cannot be negated alone (`not` inverts the whole selector), hence the jump. `iif lo` is what the pod sends
//! itself, as opposed to what it forwards.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, IpProtocol, RouteNetlinkMessage,
    route::{RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType},
    rule::{RuleAction, RuleAttribute, RuleMessage, RulePortRange},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::libc::{EEXIST, ENOENT, ESRCH};
use weir_common::{DNS_PORT, MARK_MASK, ZTUNNEL_MARK};

use super::{RedirectError, Shape};
use crate::netns::{
    interfaces::LOOPBACK,
    netlink::{Netlink, NetlinkError, Request},
};

/// Preference of the first rule: before what secondary-network plugins add by hand, after the local table.
pub const RULE_BASE: u32 = 1500;
/// The table. Not 100, which secondary-network plugins and Istio's own agent use.
pub const TABLE: u32 = 15001;
/// Marks rules and routes as weir's (`proto` in `ip rule`); not one of the numbers that iproute2 names.
const PROTOCOL: RouteProtocol = RouteProtocol::Other(115);
/// Metric of the routes that catch sockets bound to a device: worse than that of `lo`.
const DEVICE_METRIC: u32 = 1024;

/// IP family, as netlink names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

impl Family {
    fn netlink(self) -> AddressFamily {
        match self {
            Self::V4 => AddressFamily::Inet,
            Self::V6 => AddressFamily::Inet6,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

/// Installs rules and routes of both families in the calling thread's namespace. Each family is tried, whatever
/// becomes of the other. What is there already stays.
pub fn install(shape: &Shape) -> Result<(), RedirectError> {
    both(|netlink, family| {
        let mut requests: Vec<_> = routes(shape, family)
            .into_iter()
            .map(|route| Request {
                what: format!("adding the {} capture route", family.name()),
                message: RouteNetlinkMessage::NewRoute(route),
                flags: NLM_F_CREATE | NLM_F_REPLACE,
                tolerate: Some(EEXIST),
            })
            .collect();
        requests.extend(rules(shape, family).into_iter().map(|rule| Request {
            what: format!("adding an {} capture rule", family.name()),
            message: RouteNetlinkMessage::NewRule(rule),
            flags: NLM_F_CREATE | NLM_F_EXCL,
            tolerate: Some(EEXIST),
        }));
        netlink.apply(requests)
    })
}

/// Removes rules and routes. What is gone already is no error.
pub fn remove(shape: &Shape) -> Result<(), RedirectError> {
    both(|netlink, family| {
        // Backwards: the jump goes last, so that ztunnel's sockets never meet the rules behind it.
        let mut requests: Vec<_> = rules(&Shape { dns: true, ..shape.clone() }, family)
            .into_iter()
            .rev()
            .map(|rule| Request {
                what: format!("removing an {} capture rule", family.name()),
                message: RouteNetlinkMessage::DelRule(rule),
                flags: 0,
                tolerate: Some(ENOENT),
            })
            .collect();
        requests.extend(routes(shape, family).into_iter().map(|route| Request {
            what: format!("removing the {} capture route", family.name()),
            message: RouteNetlinkMessage::DelRoute(route),
            flags: 0,
            tolerate: Some(ESRCH),
        }));
        netlink.apply(requests)
    })
}

/// What is missing, in words.
pub fn missing(shape: &Shape) -> Result<Vec<String>, RedirectError> {
    let mut missing = Vec::new();
    both(|netlink, family| {
        let mut question = RuleMessage::default();
        question.header.family = family.netlink();
        let present = netlink.dump("listing rules", RouteNetlinkMessage::GetRule(question))?;
        for rule in rules(shape, family) {
            let wanted = preference(&rule);
            let found = present.iter().any(|message| {
                matches!(message, RouteNetlinkMessage::NewRule(rule) if preference(rule) == wanted && is_ours(rule))
            });
            if !found {
                missing.push(format!("{} rule {}", family.name(), wanted.unwrap_or_default()));
            }
        }
        let mut question = RouteMessage::default();
        question.header.address_family = family.netlink();
        let present = netlink.dump("listing routes", RouteNetlinkMessage::GetRoute(question))?;
        for route in routes(shape, family) {
            let wanted = interface(&route);
            let found = present.iter().any(|message| {
                matches!(message, RouteNetlinkMessage::NewRoute(route)
                    if table(route) == Some(TABLE) && interface(route) == wanted)
            });
            if !found {
                missing.push(format!("{} route by interface {}", family.name(), wanted.unwrap_or_default()));
            }
        }
        Ok(())
    })?;
    Ok(missing)
}

/// Runs `f` for each family and joins the errors.
fn both(mut f: impl FnMut(&mut Netlink, Family) -> Result<(), NetlinkError>) -> Result<(), RedirectError> {
    let mut netlink = Netlink::open(NETLINK_ROUTE)?;
    let mut errors = Vec::new();
    for family in [Family::V4, Family::V6] {
        match f(&mut netlink, family) {
            // A kernel started without IPv6 has no IPv6 to capture.
            Err(error) if family == Family::V6 && error.errno() == Some(nix::libc::EAFNOSUPPORT) => {}
            Err(error) => errors.push(RedirectError::from(error)),
            Ok(()) => {}
        }
    }
    RedirectError::join(errors)
}

fn rules(shape: &Shape, family: Family) -> Vec<RuleMessage> {
    let rule = |offset: u32, action: RuleAction, attributes: Vec<RuleAttribute>| {
        let mut rule = RuleMessage::default();
        rule.header.family = family.netlink();
        rule.header.action = action;
        rule.attributes =
            vec![RuleAttribute::Priority(RULE_BASE + offset), RuleAttribute::Protocol(PROTOCOL)];
        rule.attributes.extend(attributes);
        rule
    };
    let local = || RuleAttribute::Iifname("lo".into());
    let mut rules = vec![
        // The target first: a jump to nowhere would let everything fall through.
        rule(9, RuleAction::Nop, vec![]),
        rule(
            0,
            RuleAction::Goto,
            vec![
                RuleAttribute::FwMark(ZTUNNEL_MARK),
                RuleAttribute::FwMask(MARK_MASK),
                RuleAttribute::Goto(RULE_BASE + 9),
            ],
        ),
        rule(
            1,
            RuleAction::ToTable,
            vec![local(), RuleAttribute::IpProtocol(IpProtocol::Tcp), RuleAttribute::Table(TABLE)],
        ),
    ];
    if shape.dns {
        let port = RulePortRange { start: DNS_PORT, end: DNS_PORT };
        rules.push(rule(
            2,
            RuleAction::ToTable,
            vec![
                local(),
                RuleAttribute::IpProtocol(IpProtocol::Udp),
                RuleAttribute::DestinationPortRange(port),
                RuleAttribute::Table(TABLE),
            ],
        ));
    }
    rules
}

/// `local default dev lo`, and at a worse metric the same by each device for sockets that are bound to it. IPv4
/// needs a source address: without one the app's would be the destination. IPv6 must not have one, or the rules of
/// RFC 6724 are overridden.
fn routes(shape: &Shape, family: Family) -> Vec<RouteMessage> {
    let Some(source) = shape.source(family == Family::V6) else { return Vec::new() };
    let any = match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let route = |interface: u32, metric: u32| {
        let mut route = RouteMessage::default();
        route.header.address_family = family.netlink();
        route.header.protocol = PROTOCOL;
        route.header.kind = RouteType::Local;
        route.header.scope = RouteScope::Host;
        route.attributes = vec![
            RouteAttribute::Table(TABLE),
            RouteAttribute::Oif(interface),
            RouteAttribute::Priority(metric),
            RouteAttribute::Destination(any.into()),
        ];
        if family == Family::V4 {
            route.attributes.push(RouteAttribute::PrefSource(source.into()));
        }
        route
    };
    let lo_metric = if family == Family::V4 { 0 } else { 1 };
    let mut routes = vec![route(LOOPBACK, lo_metric)];
    let devices = shape.interfaces.iter().filter(|interface| !interface.is_loopback());
    // One metric each: two IPv4 routes of equal metric would replace each other.
    routes.extend(devices.map(|interface| route(interface.index, DEVICE_METRIC + interface.index)));
    routes
}

fn preference(rule: &RuleMessage) -> Option<u32> {
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Priority(preference) => Some(*preference),
        _ => None,
    })
}

fn is_ours(rule: &RuleMessage) -> bool {
    rule.attributes.contains(&RuleAttribute::Protocol(PROTOCOL))
}

fn table(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    })
}

fn interface(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(interface) => Some(*interface),
        _ => None,
    })
}
