//! What can be lost in a captured namespace without the kernel telling anybody: looked at again and again, so it has
//! to be cheap. Of links, addresses, routes, rules and filters the kernel tells
//! ([`Monitor`](crate::netns::monitor::Monitor)); those are looked at when it does.

use std::path::Path;

use weir_common::PodConfig;

use super::{RedirectError, Shape, connections, sysctls};
use crate::{
    kernel::PodDir,
    netns::{netlink::NetlinkError, sysctl::Sysctls},
};

/// How steer's link, the switches, the sysctls and ztunnel's listeners were when all was right. Holds two descriptors.
pub struct Glance {
    dir: PodDir,
    config: PodConfig,
    sysctls: Sysctls,
    wanted: Vec<(&'static str, &'static str)>,
}

impl Glance {
    /// Of the calling thread's namespace.
    pub(super) fn here(
        dir: PodDir,
        config: PodConfig,
        proc: &Path,
        shape: &Shape,
    ) -> Result<Self, RedirectError> {
        let sysctls = Sysctls::open(proc)?;
        Ok(Self { dir, config, sysctls, wanted: sysctls::wanted(shape).collect() })
    }

    /// Whether all is as it was; by a thread in the namespace. What cannot be looked at is not.
    pub fn is_right(&self) -> bool {
        let as_wanted = |(name, value)| match self.sysctls.read(name) {
            Ok(Some(now)) => now == value,
            Ok(None) => true,
            Err(_) => false,
        };
        self.dir.has_link()
            && self.dir.config().is_ok_and(|config| config == self.config)
            && self.wanted.iter().copied().all(as_wanted)
            && listening().unwrap_or(false)
    }
}

fn listening() -> Result<bool, NetlinkError> {
    Ok(connections::missing_listeners()?.is_empty())
}
