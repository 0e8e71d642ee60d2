//! The sysctls that a captured namespace needs, and their old values.

use std::{collections::BTreeMap, path::Path};

use super::{RedirectError, Shape};
use crate::netns::sysctl::{SysctlError, Sysctls};

/// Old values by name, for the way back.
pub type Saved = BTreeMap<String, String>;

/// Name, value, and why, for every namespace.
const WANTED: [(&str, &str); 5] = [
    // The accepted socket of a probe inherits the mark of its SYN: its replies leave by the main table.
    ("net.ipv4.tcp_fwmark_accept", "1"),
    // So does what the kernel answers without a socket: a closed port's RST.
    ("net.ipv4.fwmark_reflect", "1"),
    ("net.ipv6.fwmark_reflect", "1"),
    // The reverse-path check looks the mark up too; without it every arriving SYN is a martian.
    ("net.ipv4.conf.all.src_valid_mark", "1"),
    // Connections queued on a listener that closes move to the other one: no loss when ztunnel is replaced.
    ("net.ipv4.tcp_migrate_req", "1"),
];

/// With an IPv6 address. Otherwise the IPv6 route by `lo` cannot be made, and ztunnel cannot listen on ::1.
const WANTED_V6: (&str, &str) = ("net.ipv6.conf.lo.disable_ipv6", "0");

/// Name and value of all that a namespace of this shape needs.
pub(super) fn wanted(shape: &Shape) -> impl Iterator<Item = (&'static str, &'static str)> {
    WANTED.into_iter().chain(shape.source(true).map(|_| WANTED_V6))
}

/// Those in the calling thread's namespace that are not as wanted, with what they are. What a kernel built without
/// IPv6 lacks is left out.
pub fn differing(proc: &Path, shape: &Shape) -> Result<Saved, RedirectError> {
    differing_in(&Sysctls::open(proc)?, shape)
}

fn differing_in(sysctls: &Sysctls, shape: &Shape) -> Result<Saved, RedirectError> {
    let mut differing = Saved::new();
    for (name, value) in wanted(shape) {
        match sysctls.read(name)? {
            Some(now) if now != value => {
                differing.insert(name.to_owned(), now);
            }
            Some(_) => {}
            None if name.starts_with("net.ipv6.") => {}
            None => {
                let source = std::io::Error::from(std::io::ErrorKind::NotFound);
                return Err(SysctlError { name: name.to_owned(), source }.into());
            }
        }
    }
    Ok(differing)
}

/// Sets them in the calling thread's namespace.
pub fn set(proc: &Path, shape: &Shape) -> Result<(), RedirectError> {
    let sysctls = Sysctls::open(proc)?;
    let differing = differing_in(&sysctls, shape)?;
    for (name, value) in wanted(shape).filter(|(name, _)| differing.contains_key(*name)) {
        sysctls.write(name, value)?;
    }
    Ok(())
}

/// Puts the old values back.
pub fn restore(proc: &Path, saved: &Saved) -> Result<(), RedirectError> {
    let sysctls = Sysctls::open(proc)?;
    RedirectError::join(
        saved
            .iter()
            .filter_map(|(name, value)| sysctls.write(name, value).err())
            .map(RedirectError::from)
            .collect(),
    )
}

/// What is not as it must be, in words.
pub fn missing(proc: &Path, shape: &Shape) -> Result<Vec<String>, RedirectError> {
    let (mut missing, sysctls) = (Vec::new(), Sysctls::open(proc)?);
    for (name, value) in wanted(shape) {
        if let Some(now) = sysctls.read(name)?
            && now != value
        {
            missing.push(format!("sysctl {name} is {now}, not {value}"));
        }
    }
    Ok(missing)
}
