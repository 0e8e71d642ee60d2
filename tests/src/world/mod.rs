//! A small cluster node made of network namespaces: a node, pods behind it, a host outside.
//!
//! ```text
//!   pod "a" eth0 ── veth ─┐
//!   pod "b" eth0 ── veth ─┤ node (10.88.1.1, fd88:1::1) ── veth ── outside (10.88.2.2, fd88:2::2)
//! ```
//!
//! All of it lives in a mount namespace of the calling thread with a `/run` and a bpffs of its own, so that nothing
//! else on the machine is touched, and all of it is gone with the thread's last descriptor, however the test ends.

mod cgroup;
mod command;
mod host;

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result, bail};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use weir_agent::netns::Netns;

pub use cgroup::{Cgroup, mount_point as cgroup_root};
pub use command::{Child, run, run_in};
pub use host::Host;

/// Root of the pins in a world's private bpffs.
pub const PIN_ROOT: &str = "/sys/fs/bpf/weir";

/// Where a pod's programs and maps are pinned.
pub fn pin_dir(pod: &Host) -> std::path::PathBuf {
    format!("{PIN_ROOT}/v1/pods/{}", pod.netns().cookie()).into()
}

/// How many directories of pods are pinned, whole or not.
pub fn pins() -> usize {
    std::fs::read_dir(format!("{PIN_ROOT}/v1/pods")).map_or(0, Iterator::count)
}

/// Which families a pod has addresses of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    /// IPv4 only.
    V4,
    /// IPv6 only.
    V6,
    /// Both.
    Dual,
}

/// The node, the host outside, and the pods made so far.
pub struct World {
    /// The node's namespace.
    pub node: Host,
    /// A host that is not part of the mesh.
    pub outside: Host,
    pods: AtomicU32,
    id: String,
}

/// Makes worlds of one process distinguishable in cgroup names.
static WORLDS: AtomicU32 = AtomicU32::new(0);

impl World {
    /// Makes a world for the calling thread. Threads and processes it starts afterwards share it.
    ///
    /// # Errors
    /// When the process is not root, or the kernel refuses a namespace or a mount.
    pub fn new() -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            bail!("namespaces need root: run `cargo xtask test` as root");
        }
        private_mounts()?;
        let node = Host::new("node", Some(Ipv4Addr::new(10, 88, 1, 1)), Some("fd88:1::1".parse()?))?;
        let outside = Host::new("outside", Some(Ipv4Addr::new(10, 88, 2, 2)), Some("fd88:2::2".parse()?))?;
        node.configure(&["addr add 10.88.1.1/32 dev lo", "-6 addr add fd88:1::1/128 dev lo nodad"])?;
        for (name, value) in [
            ("net.ipv4.ip_forward", "1"),
            ("net.ipv6.conf.all.forwarding", "1"),
            ("net.ipv4.conf.all.rp_filter", "0"),
            ("net.ipv4.conf.default.rp_filter", "0"),
        ] {
            node.sysctl(name, value)?;
        }
        let world = Self {
            node,
            outside,
            pods: AtomicU32::new(0),
            id: format!("weir-test-{}-{}", std::process::id(), WORLDS.fetch_add(1, Ordering::Relaxed)),
        };
        world.connect(&world.outside, "out")?;
        Ok(world)
    }

    /// A name no other world on the machine has.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Makes a pod's namespace, connected to the node, with one interface `eth0` and strict reverse-path checks.
    ///
    /// # Errors
    /// When the kernel refuses any of it.
    pub fn pod(&self, name: &str, families: Families) -> Result<Host> {
        let number = self.pods.fetch_add(1, Ordering::Relaxed) + 2;
        // The node's addresses and those outside begin behind the first 256.
        let number = if number < 256 { number } else { number + 0x1000 };
        let v4 = (families != Families::V6).then(|| Ipv4Addr::from(0x0a58_0000 + number));
        let v6 =
            (families != Families::V4).then(|| Ipv6Addr::from((0xfd88_u128 << 112) + u128::from(number)));
        let pod = Host::new(name, v4, v6)?;
        for scope in ["all", "default"] {
            pod.sysctl(&format!("net.ipv4.conf.{scope}.rp_filter"), "1")?;
        }
        self.connect(&pod, &format!("v{number}"))?;
        Ok(pod)
    }

    /// Makes a namespace with nothing in it but `lo`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn empty(&self, name: &str) -> Result<Host> {
        Host::new(name, None, None)
    }

    /// The node's end of a host's interface.
    ///
    /// # Panics
    /// When the host is the node.
    pub fn device_of(&self, host: &Host) -> String {
        if host.name() == self.outside.name() {
            return "out".into();
        }
        let last = match (host.v4, host.v6) {
            (Some(v4), _) => u32::from(v4) & 0xffff,
            (_, Some(v6)) => u32::from(v6.segments()[7]),
            _ => panic!("{} has no address", host.name()),
        };
        format!("v{last}")
    }

    /// A veth pair between a host and the node: point to point, with the node as the way to everywhere.
    fn connect(&self, host: &Host, device: &str) -> Result<()> {
        self.node.configure(&[
            &format!("link add {device} type veth peer name eth0 netns {}", host.name()),
            &format!("link set {device} up"),
            &format!("addr add 169.254.1.1/32 dev {device}"),
            &format!("-6 addr add fe80::1/64 dev {device} nodad"),
        ])?;
        host.configure(&["link set eth0 up"])?;
        if let Some(v4) = host.v4 {
            host.configure(&[
                &format!("addr add {v4}/32 dev eth0"),
                "route add 169.254.1.1 dev eth0 scope link",
                "route add default via 169.254.1.1 dev eth0",
            ])?;
            self.node.configure(&[&format!("route add {v4}/32 dev {device} src 10.88.1.1")])?;
        }
        if let Some(v6) = host.v6 {
            host.configure(&[
                &format!("-6 addr add {v6}/128 dev eth0 nodad"),
                "-6 route add default via fe80::1 dev eth0",
            ])?;
            self.node.configure(&[&format!("-6 route add {v6}/128 dev {device} src fd88:1::1")])?;
        }
        Ok(())
    }
}

/// Leaves the machine's mounts alone from here on, and puts an empty `/run` and a bpffs in their place.
fn private_mounts() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace of our own")?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).context("making mounts private")?;
    mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), none).context("a /run of our own")?;
    fs::create_dir_all("/run/netns")?;
    mount(Some("bpf"), "/sys/fs/bpf", Some("bpf"), MsFlags::empty(), none).context("a bpffs of our own")?;
    Ok(())
}

/// Makes an empty network namespace and a file that names it.
fn new_netns(path: &Path) -> Result<Netns> {
    fs::write(path, "")?;
    let target = path.to_owned();
    // On a thread of its own: this one stays where it is.
    std::thread::spawn(move || -> Result<()> {
        unshare(CloneFlags::CLONE_NEWNET).context("a network namespace")?;
        let none = None::<&str>;
        mount(Some("/proc/thread-self/ns/net"), &target, none, MsFlags::MS_BIND, none)
            .context("naming a network namespace")
    })
    .join()
    .expect("the thread does not panic")?;
    Ok(Netns::open(path)?)
}

/// Takes a host's name away, so that another can have it. What holds its namespace still holds it.
///
/// # Errors
/// When there is no such name.
pub fn forget_name(name: &str) -> Result<()> {
    let path = netns_path(name);
    nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH)?;
    Ok(fs::remove_file(path)?)
}

/// Both addresses of a host, in a form that reads well in a table of cases.
pub fn addresses(host: &Host) -> Vec<IpAddr> {
    host.v4.map(IpAddr::V4).into_iter().chain(host.v6.map(IpAddr::V6)).collect()
}

/// Path of a file that names a namespace of this world.
pub fn netns_path(name: &str) -> PathBuf {
    Path::new("/run/netns").join(name)
}

/// A descriptor that is valid for as long as the host is.
pub fn duplicate(host: &Host) -> Result<std::os::fd::OwnedFd> {
    Ok(host.netns().as_fd().try_clone_to_owned()?)
}
