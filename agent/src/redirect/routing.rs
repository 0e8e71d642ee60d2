//! Policy routing of a captured namespace: what carries no mark goes to `lo`, where ztunnel's listeners are.
//!
//! | preference | rule |
//! |---|---|
//! | base | `iif X ipproto tcp lookup 15001` for each rerouted interface |
//! | base+1 | `fwmark 0x539/0xfff goto base+9` |
//! | base+2 | `iif lo fwmark 0x20000000/0x20000000 lookup 15001`: the app's replies to ztunnel |
//! | base+3 | `iif lo ipproto tcp dport N goto base+9`, `iif lo to NETWORK goto base+9` (exclusions) |
//! | base+4 | `iif lo ipproto tcp lookup 15001` |
//! | base+5 | `iif lo ipproto udp dport 53 lookup 15001` (DNS capture) |
//! | base+9 | `nop` |
//!
//! Rerouted interfaces come before the mark, which what arrives there has too: its reverse-path check (which looks up
//! with `iif lo`) must find the main table, not a local route. Replies come before the exclusions: what is excluded is
//! what the pod opens, not what it answers.
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
use weir_common::{DNS_PORT, INSIDE_MARK, MARK_MASK, ZTUNNEL_MARK};

use super::{RedirectError, Shape};
use crate::{
    domain::overrides::Overrides,
    netns::{
        interfaces::LOOPBACK,
        netlink::{Netlink, NetlinkError, Request},
    },
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

    fn has(self, address: IpAddr) -> bool {
        address.is_ipv6() == (self == Self::V6)
    }

    fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

/// Makes rules and routes of both families in the calling thread's namespace what they must be: adds what is
/// missing, then removes what is ours and not wanted. Each family is tried, whatever becomes of the other.
pub fn apply(shape: &Shape, overrides: &Overrides) -> Result<(), RedirectError> {
    both(|netlink, family| change(netlink, family, &Wanted::of(shape, overrides, family)))
}

/// Removes everything that is ours.
pub fn remove() -> Result<(), RedirectError> {
    both(|netlink, family| change(netlink, family, &Wanted::default()))
}

/// What is missing or too much, in words.
pub fn missing(shape: &Shape, overrides: &Overrides) -> Result<Vec<String>, RedirectError> {
    let mut missing = Vec::new();
    both(|netlink, family| {
        let wanted = Wanted::of(shape, overrides, family);
        let present = Wanted::present(netlink, family)?;
        let name = family.name();
        for rule in wanted.rules.iter().filter(|rule| !present.has_rule(rule)) {
            missing.push(format!("{name} rule {}", preference(rule)));
        }
        for rule in present.rules.iter().filter(|rule| !wanted.has_rule(rule)) {
            missing.push(format!("{name} rule {} that is not wanted", preference(rule)));
        }
        for route in wanted.routes.iter().filter(|route| !present.has_route(route)) {
            missing.push(format!("{name} route by interface {}", interface(route)));
        }
        Ok(())
    })?;
    Ok(missing)
}

fn change(netlink: &mut Netlink, family: Family, wanted: &Wanted) -> Result<(), NetlinkError> {
    let present = Wanted::present(netlink, family)?;
    let name = family.name();
    let mut requests = Vec::new();
    for route in wanted.routes.iter().filter(|route| !present.has_route(route)) {
        requests.push(Request {
            what: format!("adding the {name} capture route"),
            message: RouteNetlinkMessage::NewRoute(route.clone()),
            flags: NLM_F_CREATE | NLM_F_REPLACE,
            tolerate: Some(EEXIST),
        });
    }
    for rule in wanted.rules.iter().filter(|rule| !present.has_rule(rule)) {
        requests.push(Request {
            what: format!("adding {name} capture rule {}", preference(rule)),
            message: RouteNetlinkMessage::NewRule(rule.clone()),
            flags: NLM_F_CREATE | NLM_F_EXCL,
            tolerate: Some(EEXIST),
        });
    }
    // Those that capture go first, the jump last: ztunnel's sockets never meet the rules behind it.
    let mut unwanted: Vec<_> = present.rules.iter().filter(|rule| !wanted.has_rule(rule)).collect();
    unwanted
        .sort_by_key(|rule| std::cmp::Reverse((rule.header.action == RuleAction::ToTable, preference(rule))));
    for rule in unwanted {
        requests.push(Request {
            what: format!("removing {name} capture rule {}", preference(rule)),
            message: RouteNetlinkMessage::DelRule(rule.clone()),
            flags: 0,
            tolerate: Some(ENOENT),
        });
    }
    for route in present.routes.iter().filter(|route| !wanted.has_route(route)) {
        requests.push(Request {
            what: format!("removing the {name} capture route"),
            message: RouteNetlinkMessage::DelRoute(route.clone()),
            flags: 0,
            tolerate: Some(ESRCH),
        });
    }
    netlink.apply(requests)
}

/// Rules and routes of one family.
#[derive(Default)]
struct Wanted {
    rules: Vec<RuleMessage>,
    routes: Vec<RouteMessage>,
}

impl Wanted {
    fn of(shape: &Shape, overrides: &Overrides, family: Family) -> Self {
        Self { rules: rules(overrides, family), routes: routes(shape, family) }
    }

    /// What is ours in the calling thread's namespace.
    fn present(netlink: &mut Netlink, family: Family) -> Result<Self, NetlinkError> {
        let mut question = RuleMessage::default();
        question.header.family = family.netlink();
        let rules = netlink.dump("listing rules", RouteNetlinkMessage::GetRule(question))?;
        let mut question = RouteMessage::default();
        question.header.address_family = family.netlink();
        let routes = netlink.dump("listing routes", RouteNetlinkMessage::GetRoute(question))?;
        Ok(Self {
            rules: rules
                .into_iter()
                .filter_map(|message| match message {
                    RouteNetlinkMessage::NewRule(rule) if is_ours(&rule) => Some(rule),
                    _ => None,
                })
                .collect(),
            routes: routes
                .into_iter()
                .filter_map(|message| match message {
                    RouteNetlinkMessage::NewRoute(route) if table(&route) == Some(TABLE) => Some(route),
                    _ => None,
                })
                .collect(),
        })
    }

    fn has_rule(&self, wanted: &RuleMessage) -> bool {
        self.rules.iter().any(|rule| same_rule(rule, wanted))
    }

    fn has_route(&self, wanted: &RouteMessage) -> bool {
        let same =
            |route: &RouteMessage| interface(route) == interface(wanted) && source(route) == source(wanted);
        self.routes.iter().any(same)
    }
}

/// Whether two of our rules are the same, by what the kernel's answers say as well.
fn same_rule(a: &RuleMessage, b: &RuleMessage) -> bool {
    fn selector(rule: &RuleMessage) -> impl Iterator<Item = &RuleAttribute> {
        rule.attributes.iter().filter(|attribute| {
            matches!(
                attribute,
                RuleAttribute::Priority(_)
                    | RuleAttribute::FwMark(_)
                    | RuleAttribute::Goto(_)
                    | RuleAttribute::Iifname(_)
                    | RuleAttribute::IpProtocol(_)
                    | RuleAttribute::DestinationPortRange(_)
                    | RuleAttribute::Destination(_)
            )
        })
    }
    a.header.dst_len == b.header.dst_len
        && selector(a).count() == selector(b).count()
        && selector(a).all(|attribute| selector(b).any(|other| other == attribute))
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

fn rules(overrides: &Overrides, family: Family) -> Vec<RuleMessage> {
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
    let tcp = || RuleAttribute::IpProtocol(IpProtocol::Tcp);
    let port = |port: u16| RuleAttribute::DestinationPortRange(RulePortRange { start: port, end: port });
    let out = || RuleAttribute::Goto(RULE_BASE + 9);
    let capture = || RuleAttribute::Table(TABLE);
    let marked = |mark, mask| [RuleAttribute::FwMark(mark), RuleAttribute::FwMask(mask)];
    // The target first: a jump to nowhere would let everything fall through.
    let mut rules = vec![rule(9, RuleAction::Nop, vec![])];
    for interface in &overrides.reroute {
        let arriving = RuleAttribute::Iifname(interface.clone());
        rules.push(rule(0, RuleAction::ToTable, vec![arriving, tcp(), capture()]));
    }
    let [mark, mask] = marked(ZTUNNEL_MARK, MARK_MASK);
    rules.push(rule(1, RuleAction::Goto, vec![mark, mask, out()]));
    let [mark, mask] = marked(INSIDE_MARK, INSIDE_MARK);
    rules.push(rule(2, RuleAction::ToTable, vec![local(), mark, mask, capture()]));
    for &excluded in &overrides.exclude_outbound_ports {
        rules.push(rule(3, RuleAction::Goto, vec![local(), tcp(), port(excluded), out()]));
        if excluded == DNS_PORT {
            let udp = RuleAttribute::IpProtocol(IpProtocol::Udp);
            rules.push(rule(3, RuleAction::Goto, vec![local(), udp, port(excluded), out()]));
        }
    }
    for cidr in overrides.exclude_outbound_cidrs.iter().filter(|cidr| family.has(cidr.address)) {
        let mut direct =
            rule(3, RuleAction::Goto, vec![local(), RuleAttribute::Destination(cidr.address), out()]);
        direct.header.dst_len = cidr.prefix;
        rules.push(direct);
    }
    rules.push(rule(4, RuleAction::ToTable, vec![local(), tcp(), capture()]));
    if overrides.dns {
        let udp = RuleAttribute::IpProtocol(IpProtocol::Udp);
        rules.push(rule(5, RuleAction::ToTable, vec![local(), udp, port(DNS_PORT), capture()]));
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

fn preference(rule: &RuleMessage) -> u32 {
    let preference = rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Priority(preference) => Some(*preference),
        _ => None,
    });
    preference.unwrap_or(0)
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

fn interface(route: &RouteMessage) -> u32 {
    let interface = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(interface) => Some(*interface),
        _ => None,
    });
    interface.unwrap_or(0)
}

fn source(route: &RouteMessage) -> Option<&RouteAttribute> {
    route.attributes.iter().find(|attribute| matches!(attribute, RouteAttribute::PrefSource(_)))
}
