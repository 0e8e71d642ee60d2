//! Listening sockets of the agent: for root or one user, in a directory of their own.
#![forbid(unsafe_code)]

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};
use thiserror::Error;
use tokio_seqpacket::UnixSeqpacketListener;
use tracing::debug;

/// Why the socket cannot be listened on.
#[derive(Debug, Error)]
pub enum BindError {
    /// Somebody answers on it.
    #[error(
        "socket path in use: {path} has a live listener; stop the other node agent (istio-cni or weir) first, \
         or set {flag} to another path"
    )]
    InUse {
        /// The path.
        path: PathBuf,
        /// The flag that sets it.
        flag: &'static str,
    },
    /// Something of another kind has its name.
    #[error("{path} exists and is no socket; remove it, or set {flag} to another path")]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// The flag that sets it.
        flag: &'static str,
    },
    /// The file system or the kernel refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What came of it.
        source: io::Error,
    },
}

/// Removes the socket when the server goes, unless the name has become somebody else's.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // Left behind it would be found stale by the next agent; nothing else depends on it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|m| (m.dev(), m.ino()))
}

/// Binds a SOCK_SEQPACKET socket: see [`bind_with`].
///
/// # Errors
/// See [`BindError`].
pub fn bind(
    path: &Path,
    owner: Option<u32>,
    flag: &'static str,
) -> Result<(UnixSeqpacketListener, SocketFile), BindError> {
    bind_with(path, owner, flag, |path| UnixSeqpacketListener::bind(path))
}

/// Binds a socket that only `owner` (root when not given) can reach, and makes its directory when there is none.
/// `flag` is what sets the path on the command line. Needs a tokio runtime around it.
///
/// # Errors
/// See [`BindError`].
pub fn bind_with<L>(
    path: &Path,
    owner: Option<u32>,
    flag: &'static str,
    listen: impl FnOnce(&Path) -> io::Result<L>,
) -> Result<(L, SocketFile), BindError> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| BindError::Io { action, path, source }
    };
    if !dir.exists() {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed("create", dir))?;
        chown(dir, owner, None).map_err(failed("change the owner of", dir))?;
    }
    // Two agents that start at once must not both find the same file stale.
    let dir_fd = File::open(dir).map_err(failed("open", dir))?;
    let _lock = Flock::lock(dir_fd, FlockArg::LockExclusive)
        .map_err(|(_, e)| failed("lock", dir)(io::Error::from(e)))?;
    remove_stale(path, flag)?;
    let listener = listen(path).map_err(failed("listen on", path))?;
    let inode = inode(path).map_err(failed("look at", path))?;
    let socket_file = SocketFile { path: path.to_owned(), inode };
    let only_owner = fs::Permissions::from_mode(0o600);
    fs::set_permissions(path, only_owner).map_err(failed("change the mode of", path))?;
    chown(path, owner, None).map_err(failed("change the owner of", path))?;
    Ok((listener, socket_file))
}

/// Removes what an earlier agent left at `path`, and nothing else.
fn remove_stale(path: &Path, flag: &'static str) -> Result<(), BindError> {
    let failed = |action| move |source| BindError::Io { action, path: path.to_owned(), source };
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("look at")(e)),
    };
    if !found.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.to_owned(), flag });
    }
    match probe(path) {
        // Also one of another type, or one too busy to take us: somebody holds it.
        Ok(()) | Err(Errno::EPROTOTYPE | Errno::EAGAIN) => {
            Err(BindError::InUse { path: path.to_owned(), flag })
        }
        Err(Errno::ECONNREFUSED) => {
            debug!(path = %path.display(), "removing a socket nobody listens on");
            fs::remove_file(path).map_err(failed("remove"))
        }
        Err(e) => Err(failed("connect to")(e.into())),
    }
}

/// Connects, to see whether anybody listens.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)
}
