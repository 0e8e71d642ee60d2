//! A pod's network namespace, as ztunnel uses it: step in, make a socket, step out.

use std::{
    fs::File,
    io,
    marker::PhantomData,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use nix::{
    ifaddrs::getifaddrs,
    sched::{CloneFlags, setns},
    sys::{
        stat::fstat,
        statfs::{NSFS_MAGIC, fstatfs},
    },
};

/// What tells two namespaces apart while both are held open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NetnsId {
    dev: u64,
    ino: u64,
}

/// A namespace sockets are made in. The thread that makes them must be the one that took `home`.
#[derive(Clone, Debug)]
pub struct PodNetns {
    home: Arc<OwnedFd>,
    pod: Arc<OwnedFd>,
    id: NetnsId,
}

/// The namespace of the calling thread, which is not always that of the process.
pub fn current() -> io::Result<OwnedFd> {
    File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
}

/// Identity of the namespace behind `fd`; an error if it is no namespace at all.
pub fn id_of(fd: &impl AsFd) -> io::Result<NetnsId> {
    if fstatfs(fd)?.filesystem_type() != NSFS_MAGIC {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "descriptor is not a namespace"));
    }
    let stat = fstat(fd)?;
    Ok(NetnsId { dev: stat.st_dev, ino: stat.st_ino })
}

impl PodNetns {
    /// Wraps a pod's namespace; `home` is where [`PodNetns::run`] returns to.
    pub fn new(home: Arc<OwnedFd>, pod: OwnedFd) -> io::Result<Self> {
        let id = id_of(&pod)?;
        Ok(Self { home, pod: Arc::new(pod), id })
    }

    /// Identity of the namespace.
    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Runs `f` inside the namespace. `f` is no future on purpose: a thread must never yield in there.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> io::Result<T> {
        setns(&self.pod, CloneFlags::CLONE_NEWNET)?;
        let _inside = Inside { home: &self.home, _not_send: PhantomData };
        Ok(f())
    }

    /// Addresses of the namespace but for those of the loopback network.
    pub fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        let addresses = self.run(getifaddrs)??;
        let ips = addresses.filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::from(a.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::from(a.ip())))
        });
        Ok(ips.filter(|ip| !ip.is_loopback()).collect())
    }

    /// Whether `lo` of the namespace can carry `::1`.
    pub fn has_v6_loopback(&self) -> bool {
        // `/proc/sys/net` shows the namespace of the thread that opens it.
        self.run(|| std::fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6"))
            .is_ok_and(|disabled| disabled.is_ok_and(|v| v.trim() == "0"))
    }
}

struct Inside<'a> {
    home: &'a OwnedFd,
    // A namespace belongs to the thread: a guard that moved to another would strand this one.
    _not_send: PhantomData<*const ()>,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        setns(self.home, CloneFlags::CLONE_NEWNET).expect("a thread can return to its own namespace");
    }
}
