//! Network namespaces: entering them, and everything that is done inside. One of the two rooms where `unsafe` may
//! live.

pub mod directories;
pub mod discover;
pub mod interfaces;
pub mod monitor;
pub mod netlink;
pub mod sockets;
pub mod sysctl;

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use nix::{
    libc,
    sched::{CloneFlags, setns},
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

/// A namespace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    /// The file cannot be opened.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Entering failed: the descriptor is no network namespace, or privilege is missing.
    #[error(
        "entering the network namespace: {0} (needs CAP_SYS_ADMIN, and a descriptor of a network namespace)"
    )]
    Enter(io::Error),
    /// Changes cannot be listened to.
    #[error("listening to changes of interfaces: {0}")]
    Monitor(io::Error),
    /// The kernel does not say which namespace it is.
    #[error("SO_NETNS_COOKIE: {0} (needs Linux 5.14)")]
    Cookie(io::Error),
}

/// A network namespace: a descriptor, and the cookie that identifies it for the life of the kernel (unlike its
/// inode number, which is used again at once).
#[derive(Clone, Debug)]
pub struct Netns {
    fd: Arc<OwnedFd>,
    cookie: u64,
}

impl Netns {
    /// Opens a namespace by its file, such as `/var/run/netns/NAME` or `/proc/PID/ns/net`.
    pub fn open(path: &Path) -> Result<Self, NetnsError> {
        let file = File::open(path).map_err(|source| NetnsError::Open { path: path.to_owned(), source })?;
        Self::from_fd(Arc::new(file.into()))
    }

    /// Takes an open namespace.
    pub fn from_fd(fd: Arc<OwnedFd>) -> Result<Self, NetnsError> {
        let cookie = enter(fd.as_fd(), current_cookie)??;
        Ok(Self { fd, cookie })
    }

    /// A namespace of which the cookie is known: nothing is asked, the descriptor need not even be one.
    pub fn known(fd: Arc<OwnedFd>, cookie: u64) -> Self {
        Self { fd, cookie }
    }

    /// SO_NETNS_COOKIE (Linux 5.14).
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// The descriptor, shared.
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Runs `f` inside, on a thread of its own: a thread that failed to come back must serve nothing else.
    pub fn enter<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        enter(self.fd.as_fd(), f)
    }

    /// Moves the calling thread: for one that goes from namespace to namespace and serves nothing else.
    pub fn move_in(&self) -> Result<(), NetnsError> {
        move_into(self.fd.as_fd())
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn enter<T: Send>(fd: BorrowedFd<'_>, f: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
    crate::work::VISITS.add(1);
    thread::scope(|scope| {
        let inside = thread::Builder::new().name("weir-netns".into()).spawn_scoped(scope, || {
            move_into(fd)?;
            Ok(f())
        });
        match inside {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => Err(NetnsError::Enter(error)),
        }
    })
}

fn move_into(fd: BorrowedFd<'_>) -> Result<(), NetnsError> {
    setns(fd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetnsError::Enter(errno.into()))
}

/// Cookie of the calling thread's namespace.
fn current_cookie() -> Result<u64, NetnsError> {
    /// `SO_NETNS_COOKIE` of `asm-generic/socket.h`.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
        .map_err(|errno| NetnsError::Cookie(errno.into()))?;
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into a live u64.
    let status = unsafe {
        libc::getsockopt(
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if status == 0 { Ok(cookie) } else { Err(NetnsError::Cookie(io::Error::last_os_error())) }
}
