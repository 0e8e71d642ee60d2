//! Pods of a cluster in the mesh of a stand-in ztunnel, as most tests of the agent as a process need them.

use std::{io, path::PathBuf};

use anyhow::Result;

use crate::{
    app::App,
    cluster::{Cluster, Pod, ZDS_SOCKET},
    load::{Load, Outcome},
    world::{Families, Host, addresses, pin_dir},
    ztunnel::{Mesh, Options, Ztunnel},
};

/// Starts a stand-in that connects to the agent's socket.
///
/// # Errors
/// As [`Ztunnel::start`].
pub fn start_ztunnel(mesh: &Mesh) -> io::Result<Ztunnel> {
    Ztunnel::start(Options { mesh: mesh.clone(), zds: Some(ZDS_SOCKET.into()), ..Options::default() })
}

impl Cluster {
    /// A running dual-stack pod that the mesh's ztunnels know.
    ///
    /// # Errors
    /// As [`Cluster::pod`].
    pub fn meshed_pod(&self, mesh: &Mesh, namespace: &str, name: &str) -> Result<Pod> {
        let pod = self.pod(namespace, name, Families::Dual)?;
        mesh.join(&pod.uid, &addresses(&pod.host));
        Ok(pod)
    }

    /// The same with an app on a port.
    ///
    /// # Errors
    /// As [`Cluster::pod`].
    pub fn meshed_app(&self, mesh: &Mesh, namespace: &str, name: &str, port: u16) -> Result<(Pod, App)> {
        let pod = self.meshed_pod(mesh, namespace, name)?;
        let app = App::start(&pod.host, port)?;
        Ok((pod, app))
    }
}

impl Pod {
    /// One of the pod's pins.
    pub fn pin(&self, name: &str) -> PathBuf {
        pin_dir(&self.host).join(name)
    }
}

/// Every host talks to the next, so often a second, over both families in turn.
pub fn talk_in_a_ring(hosts: &[&Host], port: u16, rate: u32) -> Vec<Load> {
    let next = hosts.iter().cycle().skip(1);
    let pairs = hosts.iter().zip(next);
    pairs.map(|(from, to)| Load::start(from, vec![to.addr(false, port), to.addr(true, port)], rate)).collect()
}

/// Ends the loads and says how many connections they made.
///
/// # Panics
/// When one has failed.
pub fn none_failed(loads: Vec<Load>) -> u64 {
    let outcomes: Vec<Outcome> = loads.into_iter().map(Load::stop).collect();
    let failed: Vec<_> = outcomes.iter().filter(|outcome| !outcome.failed.is_empty()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    outcomes.iter().map(|outcome| outcome.ok).sum()
}
