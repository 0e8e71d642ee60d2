//! A world with a data path and a stand-in ztunnel, without an agent: what the data-path tests start from.

use std::{
    net::IpAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use weir_agent::{
    domain::{
        overrides::{Defaults, Overrides},
        workload::{PodUid, WorkloadInfo},
    },
    kernel::{Objects, OldConnections},
    netns::sockets,
    redirect::{Owner, Redirector, Settings},
};
use weir_common::{Counter, Counters, is_marked};

use crate::{
    world::{self, Cgroup, Families, Host, PIN_ROOT, World},
    ztunnel::{Mesh, Options, Ztunnel},
};

/// What short connections get to come to their end at un-enrolment.
const GRACE: Duration = Duration::from_millis(250);

/// The parts.
pub struct MeshNode {
    /// Node, outside, namespaces.
    pub world: World,
    /// The data path.
    pub redirector: Redirector,
    /// Peers that are reached by HBONE.
    pub mesh: Mesh,
    /// The stand-in.
    pub ztunnel: Ztunnel,
    /// What runs in here is the kubelet.
    pub kubelet: Cgroup,
}

impl MeshNode {
    /// Makes all of it.
    ///
    /// # Errors
    /// When the kernel refuses any part.
    pub fn new() -> Result<Self> {
        let world = World::new()?;
        let settings = Settings { root: PathBuf::from(PIN_ROOT), proc: "/proc".into() };
        let redirector = Redirector::open(settings, &Objects::get()?)?;
        let kubelet = Cgroup::new(&format!("{}/kubelet", world.id()))?;
        redirector.exempt(kubelet.path(), world.node.netns())?;
        let mesh = Mesh::default();
        let ztunnel = Self::start_ztunnel(&mesh)?;
        Ok(Self { world, redirector, mesh, ztunnel, kubelet })
    }

    /// Another stand-in of the same mesh.
    ///
    /// # Errors
    /// When its thread cannot be started.
    pub fn start_ztunnel(mesh: &Mesh) -> Result<Ztunnel> {
        Ok(Ztunnel::start(Options { mesh: mesh.clone(), ..Options::default() })?)
    }

    /// A pod that is not captured yet.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn pod(&self, name: &str, families: Families) -> Result<Host> {
        self.world.pod(name, families)
    }

    /// Who a pod is.
    pub fn owner(pod: &Host) -> Owner {
        Owner {
            uid: PodUid::from(format!("uid-of-{}", pod.name()).as_str()),
            info: WorkloadInfo {
                name: pod.name().to_owned(),
                namespace: "default".into(),
                service_account: "default".into(),
            },
        }
    }

    /// Captures a running pod, in the order of an enrolment.
    ///
    /// # Errors
    /// When a step fails, or the path does not verify.
    pub fn capture(&self, pod: &Host) -> Result<OldConnections> {
        self.capture_as(pod, &Overrides::none(Defaults::default()))
    }

    /// The same with overrides; on a captured pod they are laid over what is there.
    ///
    /// # Errors
    /// As [`MeshNode::capture`].
    pub fn capture_as(&self, pod: &Host, overrides: &Overrides) -> Result<OldConnections> {
        self.redirector.prepare(&Self::owner(pod), pod.netns())?;
        self.serve(pod, &self.ztunnel)?;
        let old = self.redirector.switch_on(pod.netns(), overrides)?;
        let missing = self.redirector.verify(pod.netns(), overrides)?.missing();
        anyhow::ensure!(missing.is_empty(), "missing: {}", missing.join(", "));
        Ok(old)
    }

    /// Lets a stand-in serve a pod.
    ///
    /// # Errors
    /// When its listeners cannot be made.
    pub fn serve(&self, pod: &Host, ztunnel: &Ztunnel) -> Result<()> {
        let uid = Self::owner(pod).uid;
        ztunnel.serve_in_netns(world::duplicate(pod)?, uid.as_str()).context("the stand-in's listeners")?;
        let ips: Vec<IpAddr> = world::addresses(pod);
        self.mesh.join(uid.as_str(), &ips);
        Ok(())
    }

    /// Takes ztunnel away from a captured pod. Its listeners are gone when this returns: a program that another thread
    /// is about to start has them for a moment longer than the stand-in.
    ///
    /// # Errors
    /// When they do not go, or cannot be listed.
    pub fn lose_ztunnel(&self, pod: &Host) -> Result<()> {
        self.ztunnel.remove(Self::owner(pod).uid.as_str());
        let deadline = Instant::now() + Duration::from_secs(5);
        while pod.inside(|| sockets::list(1 << sockets::state::LISTEN))?.iter().any(|one| is_marked(one.mark))
        {
            anyhow::ensure!(Instant::now() < deadline, "ztunnel's listeners do not go");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Lets go of a pod, in the order of an un-enrolment.
    ///
    /// # Errors
    /// When a step fails.
    pub fn release(&self, pod: &Host) -> Result<()> {
        let uid = Self::owner(pod).uid;
        self.mesh.leave(uid.as_str());
        self.redirector.drain(pod.netns(), GRACE)?;
        self.ztunnel.remove(uid.as_str());
        self.redirector.switch_off(pod.netns())?;
        Ok(())
    }

    /// A pod's counters.
    ///
    /// # Errors
    /// When it is not captured.
    pub fn counters(&self, pod: &Host) -> Result<Counters> {
        self.redirector
            .pinned()
            .into_iter()
            .find(|pinned| pinned.record.cookie == pod.netns().cookie())
            .map(|pinned| pinned.counters)
            .with_context(|| format!("{} is not captured", pod.name()))
    }
}

/// What was counted between two readings, without what stayed the same.
pub fn difference(before: &Counters, after: &Counters) -> Vec<(&'static str, u64)> {
    Counter::ALL
        .iter()
        .map(|&counter| (counter.name(), after.total(counter) - before.total(counter)))
        .filter(|(_, count)| *count > 0)
        .collect()
}
