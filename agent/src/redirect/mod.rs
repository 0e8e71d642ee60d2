//! One pod's data path as a whole: prepare, switch on, check, drain, switch off.
//!
//! | step | what | what it changes for traffic |
//! |---|---|---|
//! | [`Redirector::prepare`] | sysctls, programs, maps, filters, steer; pins | nothing |
//! | [`Redirector::switch_on`] | adopt, rules, adopt again, inbound, guard | new connections are captured |
//! | [`Redirector::verify`] | looks at everything | nothing |
//! | [`Redirector::drain`] | new connections go direct or wait | no new one is captured |
//! | [`Redirector::switch_off`] | ends captured connections, removes all | as if weir had never been there |
//!
//! Every step can be repeated. All state is in the kernel: pins under the namespace's cookie, and the namespace.

mod filters;
mod routing;
mod shape;
mod sysctls;

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

pub use routing::{RULE_BASE, TABLE};
pub use shape::Shape;
use weir_common::{Counters, OLD_MARK, PodConfig, PodFlags, ZTUNNEL_MARK, is_marked};

use crate::{
    domain::{
        record::{LAYOUT, Record},
        workload::{PodUid, WorkloadInfo},
    },
    kernel::{Adopted, KernelError, NodeObjects, Objects, PodDir, PodPrograms},
    netns::{
        Netns, NetnsError,
        netlink::NetlinkError,
        sockets::{self, TcpSocket, state},
        sysctl::SysctlError,
    },
};

/// A step failed. What was done before stays; the step can be repeated.
#[derive(Debug, thiserror::Error)]
pub enum RedirectError {
    /// Programs, maps, pins.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The namespace.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// Rules, routes, filters, sockets.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Sysctls.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// A pin is missing or broken.
    #[error("pins: {0}")]
    Pin(String),
    /// The directory cannot be used.
    #[error("{}: {source}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The root is on another file system.
    #[error("{} is not on bpffs; mount one: mount -t bpf bpf /sys/fs/bpf", .0.display())]
    NotBpffs(PathBuf),
    /// The namespace has no address of its own that connections could come from.
    #[error("the namespace has no address besides those of lo")]
    NoAddress,
    /// Several of the above: each part is tried whatever becomes of the others.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<Self>),
}

impl RedirectError {
    /// None, one, or several.
    fn join(mut errors: Vec<Self>) -> Result<(), Self> {
        match errors.len() {
            0 => Ok(()),
            1 => Err(errors.remove(0)),
            _ => Err(Self::Several(errors)),
        }
    }
}

/// What the data path of a node needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory on bpffs, such as `/sys/fs/bpf/weir`.
    pub root: PathBuf,
    /// A writable proc mount: the host's in a container.
    pub proc: PathBuf,
    /// Whether DNS is captured.
    pub dns: bool,
}

/// Who a namespace belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Pod UID.
    pub uid: PodUid,
    /// Name, namespace, service account.
    pub info: WorkloadInfo,
}

/// The data path of every pod of a node.
pub struct Redirector {
    settings: Settings,
    node: NodeObjects,
    programs: PodPrograms,
}

/// Looking again after this long for connections whose handshake was not complete.
const SETTLE: Duration = Duration::from_millis(2);

impl Redirector {
    /// Loads the node's programs and makes the pin directories. `host` is the host's network namespace.
    pub fn open(settings: Settings, objects: &Objects, host: &Netns) -> Result<Self, RedirectError> {
        let layout = layout_dir(&settings.root);
        fs::create_dir_all(&settings.root).map_err(directory(&settings.root))?;
        if !is_bpffs(&settings.root)? {
            return Err(RedirectError::NotBpffs(settings.root));
        }
        for dir in [layout.join("pods"), layout.join("new")] {
            fs::create_dir_all(&dir).map_err(directory(&dir))?;
        }
        let node = NodeObjects::load(objects, &layout.join("node"), host)?;
        let programs = PodPrograms::new(objects, &node.probes());
        Ok(Self { settings, node, programs })
    }

    /// Exempts the connections of the kubelet: those its cgroup opens from now on.
    pub fn exempt(&self, cgroup: &Path) -> Result<(), RedirectError> {
        Ok(self.node.attach_probe(cgroup)?)
    }

    fn dir(&self, cookie: u64) -> PodDir {
        PodDir::new(layout_dir(&self.settings.root).join("pods").join(cookie.to_string()))
    }

    /// Loads and attaches everything without changing what happens to traffic. What the app accepts from now on is
    /// marked as older than the enrolment, so that nothing falls between old and captured.
    pub fn prepare(&self, owner: &Owner, netns: &Netns) -> Result<(), RedirectError> {
        if self.dir(netns.cookie()).read_record().is_ok() {
            return Ok(());
        }
        let shape = self.shape(netns)?;
        if shape.source(false).is_none() && shape.source(true).is_none() {
            return Err(RedirectError::NoAddress);
        }
        let new = PodDir::new(layout_dir(&self.settings.root).join("new").join(netns.cookie().to_string()));
        new.remove()?;
        fs::create_dir(new.path()).map_err(directory(new.path()))?;
        let prepared = self.build(owner, netns, &shape, &new);
        if prepared.is_err() {
            // The filters go with their programs' last reference or are replaced by the next try.
            let _ = netns.enter(|| filters::detach(&shape));
            let _ = new.remove();
        }
        prepared
    }

    fn build(&self, owner: &Owner, netns: &Netns, shape: &Shape, new: &PodDir) -> Result<(), RedirectError> {
        self.programs.load(new, std::os::fd::AsFd::as_fd(netns))?;
        new.set_own(&shape.own())?;
        new.set_config(PodConfig { arrive_mark: OLD_MARK, ..PodConfig::default() })?;
        let sysctls = netns.enter(|| sysctls::set(&self.settings.proc, shape))??;
        new.write_record(&Record {
            layout: LAYOUT,
            boot_id: boot_id()?,
            cookie: netns.cookie(),
            uid: owner.uid.to_string(),
            name: owner.info.name.clone(),
            namespace: owner.info.namespace.clone(),
            service_account: owner.info.service_account.clone(),
            sysctls,
            since: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        })?;
        netns.enter(|| filters::attach(shape, new))??;
        let dir = self.dir(netns.cookie());
        fs::rename(new.path(), dir.path()).map_err(directory(dir.path()))
    }

    /// Captures new connections. Those that exist go on as they are: their number is returned.
    pub fn switch_on(&self, netns: &Netns) -> Result<Adopted, RedirectError> {
        let dir = self.dir(netns.cookie());
        let shape = self.shape(netns)?;
        let captured = self.captured();
        if dir.config()? == captured {
            netns.enter(|| routing::install(&shape))??;
            return Ok(Adopted::default());
        }
        let mut sum = self.node.adopt_all(netns)?;
        let switching = PodFlags::SWITCHING_ON.with(if shape.dns { PodFlags::DNS } else { PodFlags(0) });
        dir.set_config(PodConfig { flags: switching, arrive_mark: OLD_MARK, ..PodConfig::default() })?;
        netns.enter(|| routing::install(&shape))??;
        for _ in 0..3 {
            let rest = self.node.adopt_rest(netns)?;
            sum.adopted += rest.adopted;
            sum.failed += rest.failed;
            if rest.unfinished == 0 {
                break;
            }
            std::thread::sleep(SETTLE);
        }
        dir.set_config(captured)?;
        Ok(sum)
    }

    /// Switches of a pod that is captured.
    fn captured(&self) -> PodConfig {
        let dns = if self.settings.dns { PodFlags::DNS } else { PodFlags(0) };
        let flags = PodFlags::INBOUND.with(PodFlags::GUARD).with(dns);
        PodConfig { flags, arrive_mark: ZTUNNEL_MARK, ..PodConfig::default() }
    }

    /// What is not as it must be, in words; empty when all is right.
    pub fn verify(&self, netns: &Netns) -> Result<Vec<String>, RedirectError> {
        let dir = self.dir(netns.cookie());
        let shape = self.shape(netns)?;
        let mut missing = Vec::new();
        if !dir.has_link() {
            missing.push("steer's link".to_owned());
        }
        if dir.config()? != self.captured() {
            missing.push("the pod's switches".to_owned());
        }
        netns.enter(|| -> Result<(), RedirectError> {
            missing.extend(filters::missing(&shape, &dir)?);
            missing.extend(routing::missing(&shape)?);
            missing.extend(sysctls::missing(&self.settings.proc, &shape)?);
            missing.extend(missing_listeners()?);
            Ok(())
        })??;
        Ok(missing)
    }

    /// Lets no new connection be captured: from outside they reach the app, the app's own wait for their retry.
    /// Captured ones go on until ztunnel lets go of the pod; short ones get `grace` to come to their end.
    pub fn drain(&self, netns: &Netns, grace: Duration) -> Result<(), RedirectError> {
        let dir = self.dir(netns.cookie());
        if dir.read_record().is_err() {
            return Ok(());
        }
        let now = dir.config()?;
        let flags = now.flags.without(PodFlags::INBOUND).with(PodFlags::DRAINING);
        dir.set_config(PodConfig { flags, arrive_mark: ZTUNNEL_MARK, ..now })?;
        let own = self.shape(netns)?.own_ips();
        let deadline = Instant::now() + grace;
        while Instant::now() < deadline && !netns.enter(|| captured(&own))??.is_empty() {
            std::thread::sleep(SETTLE);
        }
        Ok(())
    }

    /// Ends what is left of captured connections and removes everything.
    pub fn switch_off(&self, netns: &Netns) -> Result<(), RedirectError> {
        let dir = self.dir(netns.cookie());
        let shape = self.shape(netns)?;
        let record = dir.read_record();
        let own = shape.own_ips();
        let mut errors = Vec::new();
        let mut note = |result: Result<(), RedirectError>| errors.extend(result.err());
        note(netns.enter(|| {
            let mut errors = Vec::new();
            errors
                .extend(captured(&own).and_then(|sockets| sockets::destroy(&sockets)).err().map(Into::into));
            errors.extend(routing::remove(&shape).err());
            // Not before the rules are gone: until then the guard is what keeps captured streams inside.
            errors.extend(filters::detach(&shape).err());
            RedirectError::join(errors)
        })?);
        note(dir.detach_steer().map_err(Into::into));
        if let Ok(record) = record {
            note(netns.enter(|| sysctls::restore(&self.settings.proc, &record.sysctls))?);
        }
        if errors.is_empty() {
            // Only now: the record is what a repetition needs.
            dir.remove()?;
        }
        RedirectError::join(errors)
    }

    /// Releases what is pinned for a namespace that is gone, or going.
    pub fn forget(&self, cookie: u64) -> Result<(), RedirectError> {
        Ok(self.dir(cookie).remove()?)
    }

    /// Every pod that is pinned.
    pub fn pinned(&self) -> Vec<Pinned> {
        pinned(&self.settings.root)
    }

    fn shape(&self, netns: &Netns) -> Result<Shape, RedirectError> {
        Ok(netns.enter(|| Shape::of_current(self.settings.dns))??)
    }
}

/// A pod as its pins tell it.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// Who, and since when.
    pub record: Record,
    /// Its switches.
    pub config: PodConfig,
    /// Its counters.
    pub counters: Counters,
    /// Whether steer's link is there.
    pub linked: bool,
}

/// Every pod that is pinned under `root`; needs no agent. Directories that make no sense are left out.
pub fn pinned(root: &Path) -> Vec<Pinned> {
    let Ok(entries) = fs::read_dir(layout_dir(root).join("pods")) else { return Vec::new() };
    let mut pods: Vec<Pinned> = entries
        .flatten()
        .filter_map(|entry| {
            let dir = PodDir::new(entry.path());
            Some(Pinned {
                record: dir.read_record().ok()?,
                config: dir.config().ok()?,
                counters: dir.counters().ok()?,
                linked: dir.has_link(),
            })
        })
        .collect();
    pods.sort_by(|a, b| (&a.record.namespace, &a.record.name).cmp(&(&b.record.namespace, &b.record.name)));
    pods
}

/// ztunnel's ports on which nobody with its mark listens, in words.
fn missing_listeners() -> Result<Vec<String>, RedirectError> {
    let listening = sockets::list(1 << state::LISTEN)?;
    Ok([weir_common::OUTBOUND_PORT, weir_common::INBOUND_PORT, weir_common::HBONE_PORT]
        .into_iter()
        .filter(|port| !listening.iter().any(|socket| socket.local_port() == *port && is_marked(socket.mark)))
        .map(|port| format!("ztunnel's listener on port {port}"))
        .collect())
}

/// The connections that go through ztunnel: everything without a mark that is neither loopback nor the pod talking
/// to itself. What waits for its retry has not been captured.
fn captured(own: &[IpAddr]) -> Result<Vec<TcpSocket>, NetlinkError> {
    let spared = 1 << state::SYN_SENT | 1 << state::LISTEN | 1 << state::TIME_WAIT;
    let mut captured = sockets::list(!spared)?;
    captured.retain(|socket| {
        let remote = socket.remote();
        !is_marked(socket.mark) && !remote.is_loopback() && !own.contains(&remote)
    });
    Ok(captured)
}

fn layout_dir(root: &Path) -> PathBuf {
    root.join(format!("v{LAYOUT}"))
}

fn directory(path: &Path) -> impl FnOnce(io::Error) -> RedirectError {
    let path = path.to_owned();
    move |source| RedirectError::Directory { path, source }
}

fn is_bpffs(path: &Path) -> Result<bool, RedirectError> {
    let stat = nix::sys::statfs::statfs(path).map_err(|errno| directory(path)(errno.into()))?;
    Ok(stat.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC)
}

fn boot_id() -> Result<String, RedirectError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    Ok(fs::read_to_string(path).map_err(directory(path))?.trim().to_owned())
}
