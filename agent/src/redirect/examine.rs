//! A look at one pod's data path that changes nothing, and needs neither an agent nor the pod's annotations: what the
//! pod was captured with is in its pins.

use std::path::Path;

use weir_common::{Counter, PodConfig, PodFlags};

use super::{Exclusions, RedirectError, Shape, captured, connections, filters, layout_dir, routing, sysctls};
use crate::{
    domain::{
        overrides::{Defaults, Overrides},
        reason::{Failure, Reason},
    },
    kernel::{Hook, PodDir},
    netns::{Netns, sysctl::Sysctls},
};

/// What was seen in one pod.
#[derive(Clone, Debug)]
pub struct Examined {
    /// What is wrong.
    pub findings: Vec<Failure>,
    /// Connections older than the enrolment that are still there.
    pub old_left: u64,
    /// The tc programs, by hook, with their kernel ids.
    pub programs: Vec<(&'static str, u32)>,
}

/// Looks at everything that makes up capture in a namespace that is pinned under `root`.
pub fn examine(root: &Path, proc: &Path, netns: &Netns) -> Result<Examined, RedirectError> {
    let dir = PodDir::new(layout_dir(root).join("pods").join(netns.cookie().to_string()));
    netns.enter(|| here(&dir, proc))?
}

fn here(dir: &PodDir, proc: &Path) -> Result<Examined, RedirectError> {
    let (shape, config) = (Shape::of_current()?, dir.config()?);
    let overrides = pinned_overrides(dir, &shape, config)?;
    let mut findings = Vec::new();
    if config.flags.has(PodFlags::GUARD) {
        findings.extend(lacking(dir, &shape, captured(&shape, &overrides), &overrides, proc)?);
    } else {
        findings
            .push(Failure::new(Reason::NotCaptured, "the pod's programs are attached, and not switched on"));
    }
    findings.extend(ipv6_gone(dir, &shape, proc)?);
    findings.extend(filters::foreign(&shape, dir)?.into_iter().map(of(Reason::ForeignFilter)));
    for fill in dir.fill()?.into_iter().filter(|fill| fill.used >= fill.room) {
        let what = format!("map {} has {} of {} entries", fill.map, fill.used, fill.room);
        findings.push(Failure::new(Reason::MapFull, what));
    }
    let dropped = dir.counters()?.total(Counter::DnsFull);
    if dropped > 0 {
        let what = format!("{dropped} DNS queries were dropped because all slots were waiting for answers");
        findings.push(Failure::new(Reason::MapFull, what));
    }
    // What is behind others comes after them: without IPv6 the addresses and routes of it are missing as well.
    findings.sort_by_key(|finding| !matches!(finding.reason, Reason::LinkGone | Reason::Ipv6Off));
    let programs = Hook::ALL.into_iter().filter_map(|hook| Some((hook.name(), dir.program_id(hook).ok()?)));
    Ok(Examined { findings, old_left: connections::old()?.len() as u64, programs: programs.collect() })
}

fn of(reason: Reason) -> impl Fn(String) -> Failure {
    move |what| Failure::new(reason, what)
}

/// What is not as it must be, of what is put back when it is lost. By a thread in the namespace.
pub(super) fn lacking(
    dir: &PodDir,
    shape: &Shape,
    config: PodConfig,
    overrides: &Overrides,
    proc: &Path,
) -> Result<Vec<Failure>, RedirectError> {
    let mut lacking = Vec::new();
    if !dir.has_link() {
        lacking.push(Failure::new(Reason::LinkGone, "steer's link"));
    }
    if dir.config()? != config {
        lacking.push(Failure::new(Reason::SwitchesWrong, "the pod's switches"));
    }
    if !dir.has_own(&shape.own())? {
        lacking.push(Failure::new(Reason::AddressesWrong, "the pod's addresses"));
    }
    lacking.extend(filters::missing(shape, dir)?.into_iter().map(of(Reason::FilterGone)));
    lacking.extend(routing::missing(shape, overrides)?.into_iter().map(of(Reason::RuleWrong)));
    lacking.extend(sysctls::missing(proc, shape)?.into_iter().map(|what| {
        let ipv6 = what.contains("disable_ipv6");
        Failure::new(if ipv6 { Reason::Ipv6Off } else { Reason::SysctlWrong }, what)
    }));
    lacking.extend(connections::missing_listeners()?.into_iter().map(of(Reason::NoListener)));
    Ok(lacking)
}

/// IPv6 was switched off as a whole: the addresses the programs know are not there any more.
fn ipv6_gone(dir: &PodDir, shape: &Shape, proc: &Path) -> Result<Option<Failure>, RedirectError> {
    const ALL: &str = "net.ipv6.conf.all.disable_ipv6";
    let had = dir.own()?.into_iter().map(std::net::IpAddr::from).any(|own| own.is_ipv6());
    let off = Sysctls::open(proc)?.read(ALL)?.is_some_and(|value| value == "1");
    let gone = had && off && shape.source(true).is_none();
    Ok(gone.then(|| Failure::new(Reason::Ipv6Off, format!("sysctl {ALL} is 1, and the pod had IPv6"))))
}

/// What the pod's annotations asked for when it was captured, as its pins tell it.
fn pinned_overrides(dir: &PodDir, shape: &Shape, config: PodConfig) -> Result<Overrides, RedirectError> {
    let excluded = Exclusions::of_pod(dir)?;
    let rerouted =
        |interface: &&crate::netns::interfaces::Interface| config.reroute_ifindex.contains(&interface.index);
    Ok(Overrides {
        bypass_inbound: !config.flags.has(PodFlags::INBOUND),
        dns: config.flags.has(PodFlags::DNS),
        reroute: shape.interfaces.iter().filter(rerouted).map(|interface| interface.name.clone()).collect(),
        exclude_inbound_ports: excluded.ports(false),
        exclude_outbound_ports: excluded.ports(true),
        exclude_outbound_cidrs: excluded.cidrs(),
        ..Overrides::none(Defaults::default())
    })
}
