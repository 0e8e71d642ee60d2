//! The tc filters: clsact with one filter per hook, attached by netlink.
//!
//! Not as tcx links: attaching one of those waits for RCU under the rtnl lock (20 ms against 0.12 ms), and a filter
//! lives with the interface, so it stays when the agent dies. A filter is replaced atomically by its handle.

use netlink_packet_core::NLM_F_CREATE;
use netlink_packet_core::NLM_F_EXCL;
use netlink_packet_core::NLM_F_REPLACE;
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcBpfFlags, TcFilterBpfOption, TcHandle, TcHeader, TcMessage, TcOption},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::libc::{EEXIST, EINVAL, ENOENT};

use super::{RedirectError, Shape};
use crate::{
    kernel::{Hook, PodDir},
    netns::{
        interfaces::Interface,
        netlink::{Netlink, Request},
    },
};

/// First of its interface and hook.
const PREFERENCE: u32 = 1;
/// The mark, so that a reader of `tc filter show` knows whose it is.
const HANDLE: u16 = 0x539;
const ETH_P_ALL: u16 = 0x0003;

fn name(hook: Hook) -> String {
    format!("weir_{}", hook.name())
}

/// Hooks of an interface.
fn hooks(interface: &Interface) -> &'static [Hook] {
    if interface.is_loopback() { &[Hook::Local] } else { &[Hook::Arrive, Hook::Guard] }
}

fn parent(hook: Hook) -> TcHandle {
    let minor = match hook {
        Hook::Arrive | Hook::Local => TcHandle::MIN_INGRESS,
        Hook::Guard => TcHandle::MIN_EGRESS,
    };
    TcHandle { major: u16::MAX, minor }
}

fn header(interface: &Interface, parent: TcHandle) -> TcHeader {
    let mut message = TcMessage::default();
    message.header.index = interface.index.cast_signed();
    message.header.parent = parent;
    message.header
}

/// Attaches the pod's programs to every interface of the calling thread's namespace; those attached before are
/// replaced.
pub fn attach(shape: &Shape, dir: &PodDir) -> Result<(), RedirectError> {
    // Held until the kernel has its own reference.
    let programs = Hook::ALL.map(|hook| dir.program(hook));
    let mut requests = Vec::new();
    for interface in &shape.interfaces {
        let mut qdisc = TcMessage::default();
        qdisc.header = header(interface, TcHandle::CLSACT);
        qdisc.header.handle = TcHandle { major: u16::MAX, minor: 0 };
        qdisc.attributes = vec![TcAttribute::Kind("clsact".into())];
        requests.push(Request {
            what: format!("adding clsact to {}", interface.name),
            message: RouteNetlinkMessage::NewQueueDiscipline(qdisc),
            flags: NLM_F_CREATE | NLM_F_EXCL,
            tolerate: Some(EEXIST),
        });
        for &hook in hooks(interface) {
            let program = match &programs[hook as usize] {
                Ok(program) => crate::kernel::raw_fd(program),
                Err(error) => return Err(RedirectError::Pin(error.to_string())),
            };
            let mut filter = TcMessage::default();
            filter.header = header(interface, parent(hook));
            filter.header.handle = TcHandle { major: 0, minor: HANDLE };
            filter.header.info = PREFERENCE << 16 | u32::from(ETH_P_ALL.to_be());
            filter.attributes = vec![
                TcAttribute::Kind("bpf".into()),
                TcAttribute::Options(vec![
                    TcOption::Bpf(TcFilterBpfOption::ProgFd(program)),
                    TcOption::Bpf(TcFilterBpfOption::ProgName(name(hook))),
                    TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
                ]),
            ];
            requests.push(Request {
                what: format!("attaching {} to {}", hook.name(), interface.name),
                message: RouteNetlinkMessage::NewTrafficFilter(filter),
                flags: NLM_F_CREATE | NLM_F_REPLACE,
                tolerate: None,
            });
        }
    }
    Netlink::open(NETLINK_ROUTE)?.apply(requests)?;
    Ok(())
}

/// Detaches the programs; a clsact that has no other filter left goes as well. What is gone already is no error.
pub fn detach(shape: &Shape) -> Result<(), RedirectError> {
    let mut netlink = Netlink::open(NETLINK_ROUTE)?;
    let mut errors = Vec::new();
    for interface in &shape.interfaces {
        for &hook in hooks(interface) {
            let mut filter = TcMessage::default();
            filter.header = header(interface, parent(hook));
            filter.header.handle = TcHandle { major: 0, minor: HANDLE };
            filter.header.info = PREFERENCE << 16 | u32::from(ETH_P_ALL.to_be());
            filter.attributes = vec![TcAttribute::Kind("bpf".into())];
            let detached = netlink.apply(vec![Request {
                what: format!("detaching {} from {}", hook.name(), interface.name),
                message: RouteNetlinkMessage::DelTrafficFilter(filter),
                flags: 0,
                tolerate: Some(ENOENT),
            }]);
            match detached {
                // EINVAL: there is no clsact, hence no filter.
                Err(error) if error.errno() != Some(EINVAL) => errors.push(error.into()),
                _ => {}
            }
        }
        match is_bare(&mut netlink, interface) {
            Ok(true) => errors.extend(remove_qdisc(&mut netlink, interface).err()),
            Ok(false) => {}
            Err(error) => errors.push(error),
        }
    }
    RedirectError::join(errors)
}

/// What is missing or not the pod's program, in words.
pub fn missing(shape: &Shape, dir: &PodDir) -> Result<Vec<String>, RedirectError> {
    let mut netlink = Netlink::open(NETLINK_ROUTE)?;
    let mut missing = Vec::new();
    for interface in &shape.interfaces {
        for &hook in hooks(interface) {
            let wanted = dir.program_id(hook)?;
            let present = filters(&mut netlink, interface, parent(hook))?;
            let found = present.iter().any(|filter| program_id(filter) == Some(wanted));
            if !found {
                missing.push(format!("filter {} on {}", hook.name(), interface.name));
            }
        }
    }
    Ok(missing)
}

/// Filters of others on the hooks that are ours, in words. Those in front of ours may decide before it; those behind
/// it see what it lets through.
pub fn foreign(shape: &Shape, dir: &PodDir) -> Result<Vec<String>, RedirectError> {
    let mut netlink = Netlink::open(NETLINK_ROUTE)?;
    let mut foreign = Vec::new();
    for interface in &shape.interfaces {
        for &hook in hooks(interface) {
            let ours = dir.program_id(hook)?;
            for filter in filters(&mut netlink, interface, parent(hook))? {
                let kind = filter.attributes.iter().find_map(|attribute| match attribute {
                    TcAttribute::Kind(kind) => Some(kind.as_str()),
                    _ => None,
                });
                // The head of a list of filters has no handle: the filters follow.
                if filter.header.handle == TcHandle::default() || program_id(&filter) == Some(ours) {
                    continue;
                }
                foreign.push(format!(
                    "filter of kind {} with preference {} on {}, beside {}",
                    kind.unwrap_or("?"),
                    filter.header.info >> 16,
                    interface.name,
                    hook.name()
                ));
            }
        }
    }
    Ok(foreign)
}

fn filters(
    netlink: &mut Netlink,
    interface: &Interface,
    parent: TcHandle,
) -> Result<Vec<TcMessage>, RedirectError> {
    let mut question = TcMessage::default();
    question.header = header(interface, parent);
    let answers = netlink.dump("listing filters", RouteNetlinkMessage::GetTrafficFilter(question))?;
    Ok(answers
        .into_iter()
        .filter_map(|answer| match answer {
            RouteNetlinkMessage::NewTrafficFilter(filter) => Some(filter),
            _ => None,
        })
        .collect())
}

fn program_id(filter: &TcMessage) -> Option<u32> {
    filter.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => options.iter().find_map(|option| match option {
            TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
            _ => None,
        }),
        _ => None,
    })
}

/// Whether neither direction has a filter.
fn is_bare(netlink: &mut Netlink, interface: &Interface) -> Result<bool, RedirectError> {
    for hook in [Hook::Arrive, Hook::Guard] {
        if !filters(netlink, interface, parent(hook))?.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn remove_qdisc(netlink: &mut Netlink, interface: &Interface) -> Result<(), RedirectError> {
    let mut qdisc = TcMessage::default();
    qdisc.header = header(interface, TcHandle::CLSACT);
    qdisc.attributes = vec![TcAttribute::Kind("clsact".into())];
    let removed = netlink.apply(vec![Request {
        what: format!("removing clsact from {}", interface.name),
        message: RouteNetlinkMessage::DelQueueDiscipline(qdisc),
        flags: 0,
        tolerate: Some(ENOENT),
    }]);
    match removed {
        Err(error) if error.errno() != Some(EINVAL) => Err(error.into()),
        _ => Ok(()),
    }
}
