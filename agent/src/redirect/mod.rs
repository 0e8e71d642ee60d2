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

mod claim;
mod connections;
mod error;
mod examine;
mod exclusions;
mod filters;
mod glance;
mod owners;
mod pinned;
mod routing;
mod shape;
mod sysctls;

use std::{
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

pub use claim::claim;
pub use error::RedirectError;
use error::directory;
pub use examine::{Examined, examine};
use exclusions::Exclusions;
pub use glance::Glance;
use owners::Owners;
pub use pinned::{Pinned, pinned};
pub use routing::{RULE_BASE, TABLE};
pub use shape::Shape;
use weir_common::{OLD_MARK, PodConfig, PodFlags, ZTUNNEL_MARK};

use crate::{
    domain::{
        overrides::Overrides,
        reason::{Failure, Reason},
        record::{LAYOUT, Record},
        workload::{PodUid, WorkloadInfo},
    },
    kernel::{Adopted, NodeObjects, Objects, OldConnections, PodDir, PodPrograms},
    netns::{Netns, sockets},
};

/// What the data path of a node needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory on bpffs, such as `/sys/fs/bpf/weir`.
    pub root: PathBuf,
    /// A writable proc mount: the host's in a container.
    pub proc: PathBuf,
}

/// Who a namespace belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Pod UID.
    pub uid: PodUid,
    /// Name, namespace, service account.
    pub info: WorkloadInfo,
}

/// What a look at everything found.
pub enum Verified {
    /// All is right; how it can be seen cheaply that it still is.
    Right(Glance),
    /// What is not as it must be.
    Lacking(Vec<Failure>),
}

impl Verified {
    /// What is not as it must be; empty when all is right.
    pub fn missing(self) -> Vec<String> {
        match self {
            Self::Right(_) => Vec::new(),
            Self::Lacking(missing) => missing.into_iter().map(|lack| lack.detail).collect(),
        }
    }
}

/// The data path of every pod of a node.
pub struct Redirector {
    settings: Settings,
    node: NodeObjects,
    programs: PodPrograms,
    owners: Owners,
}

/// ztunnel's listeners that are missing in a namespace, in words.
pub fn missing_listeners(netns: &Netns) -> Result<Vec<String>, RedirectError> {
    Ok(netns.enter(connections::missing_listeners)??)
}

/// Switches of a pod that is captured.
fn captured(shape: &Shape, overrides: &Overrides) -> PodConfig {
    let mut flags = PodFlags::GUARD;
    for (wanted, flag) in [
        (!overrides.bypass_inbound, PodFlags::INBOUND),
        (overrides.dns, PodFlags::DNS),
        (!overrides.exclude_inbound_ports.is_empty(), PodFlags::EXCLUDE_INBOUND),
        (
            !overrides.exclude_outbound_ports.is_empty() || !overrides.exclude_outbound_cidrs.is_empty(),
            PodFlags::EXCLUDE_OUTBOUND,
        ),
    ] {
        if wanted {
            flags = flags.with(flag);
        }
    }
    PodConfig { flags, arrive_mark: ZTUNNEL_MARK, reroute_ifindex: shape.indices(&overrides.reroute) }
}

/// Switches of a pod that is prepared, and not captured.
const NEUTRAL: PodConfig =
    PodConfig { flags: PodFlags(0), arrive_mark: OLD_MARK, reroute_ifindex: [0; weir_common::MAX_REROUTE] };

/// Looking again after this long for connections whose handshake was not complete.
const SETTLE: Duration = Duration::from_millis(2);

impl Redirector {
    /// Loads the node's programs and makes the pin directories.
    pub fn open(settings: Settings, objects: &Objects) -> Result<Self, RedirectError> {
        let layout = layout_dir(&settings.root);
        fs::create_dir_all(&settings.root).map_err(directory(&settings.root))?;
        if !is_bpffs(&settings.root)? {
            return Err(RedirectError::NotBpffs(settings.root));
        }
        for dir in ["pods", "new", "gone"].map(|name| layout.join(name)) {
            fs::create_dir_all(&dir).map_err(directory(&dir))?;
        }
        claim::refuse_other_layouts(&settings.root)?;
        let node = NodeObjects::load(objects, &layout.join("node"))?;
        let programs = PodPrograms::new(objects, &node.probes());
        Ok(Self { settings, node, programs, owners: Owners::default() })
    }

    /// Exempts the connections of the kubelet: those its cgroup opens from now on in the host's namespace.
    pub fn exempt(&self, cgroup: &Path, host: &Netns) -> Result<(), RedirectError> {
        Ok(self.node.attach_probe(cgroup, host)?)
    }

    /// Exempts nobody any more.
    pub fn exempt_nobody(&self) -> Result<(), RedirectError> {
        Ok(self.node.detach_probe()?)
    }

    fn dir(&self, cookie: u64) -> PodDir {
        self.dir_in("pods", cookie)
    }

    fn dir_in(&self, kind: &str, cookie: u64) -> PodDir {
        PodDir::new(layout_dir(&self.settings.root).join(kind).join(cookie.to_string()))
    }

    /// Loads and attaches everything without changing what happens to traffic. What the app accepts from now on is
    /// marked as older than the enrolment, so that nothing falls between old and captured.
    pub fn prepare(&self, owner: &Owner, netns: &Netns) -> Result<(), RedirectError> {
        let shape = self.shape(netns)?;
        let dir = self.dir(netns.cookie());
        let before = dir.read_record().ok().filter(|record| record.uid == owner.uid.as_str());
        if before.is_some() && dir.has_link() {
            self.upgrade(netns)?;
            return self.mend(netns, &shape, &dir);
        }
        if shape.source(false).is_none() && shape.source(true).is_none() {
            return Err(RedirectError::NoAddress);
        }
        let new = self.dir_in("new", netns.cookie());
        new.remove()?;
        fs::create_dir(new.path()).map_err(directory(new.path()))?;
        // What is captured already stays so.
        let before = before.and_then(|record| Some((dir.config().ok()?, record.sysctls)));
        if let Err(error) = self.build(owner, netns, &shape, &new, before) {
            let _ = new.remove();
            return Err(error);
        }
        self.replace(netns.cookie(), &new)?;
        self.owners.note(netns.cookie(), owner.uid.clone());
        // The record is in its place before the namespace is touched: whatever happens from here on can be undone.
        self.mend(netns, &shape, &dir)
    }

    fn build(
        &self,
        owner: &Owner,
        netns: &Netns,
        shape: &Shape,
        new: &PodDir,
        before: Option<(PodConfig, sysctls::Saved)>,
    ) -> Result<(), RedirectError> {
        let (config, saved) = before.unzip();
        self.programs.load(new, netns.as_fd())?;
        new.set_own(&shape.own())?;
        new.set_config(config.unwrap_or(NEUTRAL))?;
        let differing = netns.enter(|| sysctls::differing(&self.settings.proc, shape))??;
        new.write_record(&Record {
            layout: LAYOUT,
            boot_id: boot_id()?,
            cookie: netns.cookie(),
            uid: owner.uid.to_string(),
            name: owner.info.name.clone(),
            namespace: owner.info.namespace.clone(),
            service_account: owner.info.service_account.clone(),
            sysctls: saved.unwrap_or(differing),
            programs: self.programs.version().to_owned(),
            since: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        })?;
        Ok(())
    }

    /// Puts `new` in the place of what is pinned for a namespace.
    fn replace(&self, cookie: u64, new: &PodDir) -> Result<(), RedirectError> {
        let gone = self.set_aside(cookie)?;
        let dir = self.dir(cookie);
        fs::rename(new.path(), dir.path()).map_err(directory(dir.path()))?;
        Ok(gone.remove()?)
    }

    /// Takes what is pinned for a namespace out of its place as a whole, to be removed pin by pin: nobody must find
    /// half of a pod where pods are. What an agent that was killed has left in `new` and `gone` is cleared by the next.
    fn set_aside(&self, cookie: u64) -> Result<PodDir, RedirectError> {
        let (dir, gone) = (self.dir(cookie), self.dir_in("gone", cookie));
        gone.remove()?;
        match fs::rename(dir.path(), gone.path()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(directory(dir.path())(error)),
            _ => Ok(gone),
        }
    }

    /// Clears what an agent that was killed has half built or half removed.
    pub fn clear_leftovers(&self) -> Result<(), RedirectError> {
        for kind in ["new", "gone"] {
            let path = layout_dir(&self.settings.root).join(kind);
            for entry in fs::read_dir(&path).map_err(directory(&path))?.flatten() {
                PodDir::new(entry.path()).remove()?;
            }
        }
        Ok(())
    }

    /// Puts this build's programs in the place of another's, over the pod's maps, each without a moment in between.
    /// Programs of one layout understand each other: for a moment they are of both builds. Says whether there was
    /// anything to do.
    pub fn upgrade(&self, netns: &Netns) -> Result<bool, RedirectError> {
        let dir = self.dir(netns.cookie());
        let record = dir.read_record()?;
        if record.programs == self.programs.version() {
            return Ok(false);
        }
        self.programs.replace(&dir)?;
        netns.enter(|| filters::attach(&Shape::of_current()?, &dir))??;
        dir.rewrite_record(&Record { programs: self.programs.version().to_owned(), ..record })?;
        Ok(true)
    }

    /// Puts back what can be lost while programs, maps and link are there.
    fn mend(&self, netns: &Netns, shape: &Shape, dir: &PodDir) -> Result<(), RedirectError> {
        dir.set_own(&shape.own())?;
        netns.enter(|| -> Result<(), RedirectError> {
            sysctls::set(&self.settings.proc, shape)?;
            filters::attach(shape, dir)
        })?
    }

    /// Captures new connections, as the overrides say. Those that exist go on as they are. On a pod that is captured
    /// already the overrides are laid over what is there, without a gap.
    pub fn switch_on(&self, netns: &Netns, overrides: &Overrides) -> Result<OldConnections, RedirectError> {
        let dir = self.dir(netns.cookie());
        let shape = self.shape(netns)?;
        let (now, wanted) = (dir.config()?, captured(&shape, overrides));
        let on = now.flags.has(PodFlags::GUARD) && !now.flags.has(PodFlags::DRAINING);
        let exclusions = Exclusions::of(overrides);
        let before = if on { Exclusions::of_pod(&dir)? } else { Exclusions::default() };
        // What is excluded is known to the programs before a rule lets it out.
        exclusions.add_to(&dir)?;
        let adopted = if on {
            self.lay_over(netns, &dir, &shape, overrides, (&before, &exclusions))?
        } else {
            Some(self.take_over(netns, &dir, &shape, overrides)?)
        };
        dir.set_config(wanted)?;
        exclusions.set_in(&dir)?;
        if let Some(adopted) = adopted {
            dir.captured_now(adopted.old)?;
        }
        let left = adopted.map_or(0, |adopted| adopted.old.iter().sum());
        Ok(OldConnections { left, ..dir.old_connections()? })
    }

    /// From one set of overrides to another. Captured connections to what becomes excluded are ended: their next
    /// segment would leave in plaintext. Direct ones to what is excluded no more are adopted, and go on.
    fn lay_over(
        &self,
        netns: &Netns,
        dir: &PodDir,
        shape: &Shape,
        overrides: &Overrides,
        (before, after): (&Exclusions, &Exclusions),
    ) -> Result<Option<Adopted>, RedirectError> {
        let (now, wanted) = (dir.config()?, captured(shape, overrides));
        let mut flags = now.flags.with(wanted.flags);
        let adopts = after.lacks_some_of(before);
        if adopts || flags != wanted.flags {
            flags = flags.with(PodFlags::SWITCHING_ON);
        }
        dir.set_config(PodConfig { flags, ..wanted })?;
        let own = shape.own_ips();
        netns.enter(|| -> Result<(), RedirectError> {
            let mut ended = connections::captured(&own)?;
            ended.retain(|socket| socket.mark == 0 && after.has(socket) && !before.has(socket));
            sockets::destroy(&ended)?;
            routing::apply(shape, overrides)
        })??;
        Ok(if adopts { Some(self.node.adopt_rest(netns)?) } else { None })
    }

    /// From "direct" to "captured" without losing a connection: what exists is adopted, before and after the rules.
    fn take_over(
        &self,
        netns: &Netns,
        dir: &PodDir,
        shape: &Shape,
        overrides: &Overrides,
    ) -> Result<Adopted, RedirectError> {
        if dir.config()? == NEUTRAL {
            // Only then is nothing captured yet.
            self.node.adopt_all(netns)?;
        }
        let flags = captured(shape, overrides).flags.without(PodFlags::INBOUND).without(PodFlags::GUARD);
        let switching = flags.with(PodFlags::SWITCHING_ON);
        dir.set_config(PodConfig { flags: switching, ..NEUTRAL })?;
        netns.enter(|| routing::apply(shape, overrides))??;
        let mut adopted = self.node.adopt_rest(netns)?;
        for _ in 0..2 {
            if adopted.unfinished == 0 {
                break;
            }
            std::thread::sleep(SETTLE);
            adopted = self.node.adopt_rest(netns)?;
        }
        Ok(adopted)
    }

    /// Since when the pod is captured, on CLOCK_BOOTTIME.
    pub fn captured_at(&self, netns: &Netns) -> Result<Duration, RedirectError> {
        Ok(self.dir(netns.cookie()).old_connections()?.captured_at)
    }

    /// Connections that are older than the enrolment: what was counted, and how many are still there.
    pub fn old_connections(&self, netns: &Netns) -> Result<OldConnections, RedirectError> {
        let left = netns.enter(connections::old)??.len() as u64;
        Ok(OldConnections { left, ..self.dir(netns.cookie()).old_connections()? })
    }

    /// Ends the connections that are older than the enrolment, exactly those; returns how many there were.
    pub fn end_old_connections(&self, netns: &Netns) -> Result<usize, RedirectError> {
        let old = netns.enter(|| {
            let old = connections::old()?;
            sockets::destroy(&old).map(|()| old)
        })??;
        self.dir(netns.cookie()).count_expired(connections::by_family(&old))?;
        Ok(old.len())
    }

    /// Looks at everything.
    pub fn verify(&self, netns: &Netns, overrides: &Overrides) -> Result<Verified, RedirectError> {
        let dir = self.dir(netns.cookie());
        // One visit for all.
        netns.enter(|| -> Result<Verified, RedirectError> {
            let shape = Shape::of_current()?;
            let config = captured(&shape, overrides);
            let mut missing = examine::lacking(&dir, &shape, config, overrides, &self.settings.proc)?;
            if dir.read_record()?.programs != self.programs.version() {
                missing.push(Failure::new(Reason::ProgramsOld, "this build's programs"));
            }
            if missing.is_empty() {
                Ok(Verified::Right(Glance::here(dir, config, &self.settings.proc, &shape)?))
            } else {
                Ok(Verified::Lacking(missing))
            }
        })?
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
        while Instant::now() < deadline && !netns.enter(|| connections::captured(&own))??.is_empty() {
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
            errors.extend(
                connections::captured(&own).and_then(|left| sockets::destroy(&left)).err().map(Into::into),
            );
            errors.extend(routing::remove().err());
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
            self.set_aside(netns.cookie())?.remove()?;
        }
        RedirectError::join(errors)
    }

    /// Releases what is pinned for a pod whose namespace is gone or going, but for the namespace it has now.
    pub fn forget(&self, uid: &PodUid, but: Option<u64>) -> Result<(), RedirectError> {
        for cookie in self.owners.namespaces(&layout_dir(&self.settings.root).join("pods"), uid)? {
            if Some(cookie) != but {
                self.set_aside(cookie)?.remove()?;
            }
        }
        Ok(())
    }

    /// Whose namespace this is, as pinned.
    pub fn owner_of(&self, cookie: u64) -> Option<PodUid> {
        self.dir(cookie).read_record().ok().map(|record| record.uid())
    }

    /// Every pod that is pinned.
    pub fn pinned(&self) -> Vec<Pinned> {
        pinned(&self.settings.root)
    }

    fn shape(&self, netns: &Netns) -> Result<Shape, RedirectError> {
        Ok(netns.enter(Shape::of_current)??)
    }
}

fn layout_dir(root: &Path) -> PathBuf {
    root.join(format!("v{LAYOUT}"))
}

fn is_bpffs(path: &Path) -> Result<bool, RedirectError> {
    let stat = nix::sys::statfs::statfs(path).map_err(|errno| directory(path)(errno.into()))?;
    Ok(stat.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC)
}

fn boot_id() -> Result<String, RedirectError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    Ok(fs::read_to_string(path).map_err(directory(path))?.trim().to_owned())
}
