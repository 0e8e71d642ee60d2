//! The listening end of the ZDS socket.

use std::{
    collections::HashSet,
    fs::{self, DirBuilder, File},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};
use thiserror::Error;
use tokio::{task::JoinSet, time::sleep};
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener};
use tracing::{debug, info, warn};

use super::{
    counters::Counters,
    session::{self, SessionError, Timeouts},
};
use crate::cache::members::{Members, Peer};

const ROOT: u32 = 0;
/// Pause after a failed accept: out of descriptors, most likely, and no better a microsecond later.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Refused peers remembered, so that each is logged once. More start over.
const REFUSED_MAX: usize = 1024;

/// Where to listen, and to whom.
#[derive(Clone, Debug)]
pub struct Config {
    /// The socket. Its directory is made if it is missing.
    pub path: PathBuf,
    /// A user besides root that ztunnel may run as.
    pub allowed_uid: Option<u32>,
    /// How long ztunnel may take.
    pub timeouts: Timeouts,
}

impl Config {
    /// Root only, ztunnel's usual patience.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), allowed_uid: None, timeouts: Timeouts::default() }
    }
}

/// Why the socket cannot be listened on.
#[derive(Debug, Error)]
pub enum BindError {
    /// Somebody answers on it.
    #[error(
        "socket path in use: {0} has a live listener; stop the other node agent (istio-cni or weir) first, \
         or set --ztunnel-socket to another path"
    )]
    InUse(PathBuf),
    /// Something of another kind has its name.
    #[error("{0} exists and is no socket; remove it, or set --ztunnel-socket to another path")]
    NotASocket(PathBuf),
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

/// A bound server. Connections queue up from here on, and are served by [`Server::run`].
#[derive(Debug)]
pub struct Server {
    listener: UnixSeqpacketListener,
    socket_file: SocketFile,
    config: Config,
    members: Members,
    counters: Arc<Counters>,
}

impl Server {
    /// Binds the socket. Needs a tokio runtime around it.
    pub fn bind(config: Config, members: Members) -> Result<Self, BindError> {
        let (listener, socket_file) = bind(&config)?;
        Ok(Self { listener, socket_file, config, members, counters: Arc::default() })
    }

    /// What happens, counted.
    pub fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }

    /// Serves until dropped. Dropping it closes every connection and removes the socket; ztunnels go on
    /// with what they have.
    pub async fn run(self) {
        let Self { mut listener, socket_file: _remove_at_end, config, members, counters } = self;
        info!(path = %config.path.display(), "listening for ztunnel");
        let mut sessions = JoinSet::new();
        let mut refused = HashSet::new();
        loop {
            match listener.accept().await {
                Ok(socket) => match admit(&socket, config.allowed_uid) {
                    Ok(peer) => {
                        counters.accepted.add();
                        sessions.spawn(attend(
                            socket,
                            peer,
                            members.clone(),
                            config.timeouts,
                            counters.clone(),
                        ));
                    }
                    Err(peer) => {
                        counters.refused.add();
                        report_refused(&mut refused, peer);
                    }
                },
                Err(error) => {
                    counters.accept_errors.add();
                    warn!(%error, "cannot accept a ztunnel connection");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
            while sessions.try_join_next().is_some() {}
        }
    }
}

async fn attend(
    socket: UnixSeqpacket,
    peer: Peer,
    members: Members,
    timeouts: Timeouts,
    counters: Arc<Counters>,
) {
    counters.open.add();
    let _open = Open(counters.clone());
    match session::serve(socket, peer, &members, timeouts, &counters).await {
        SessionError::Left => {
            counters.left.add();
            info!(pid = peer.pid, "ztunnel left");
        }
        error => {
            counters.closed.add();
            warn!(pid = peer.pid, %error, "ztunnel connection closed");
        }
    }
}

/// Counts the connection down also when its task is dropped.
struct Open(Arc<Counters>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.sub();
    }
}

fn admit(socket: &UnixSeqpacket, allowed_uid: Option<u32>) -> Result<Peer, Option<Peer>> {
    let credentials = socket.peer_cred().map_err(|_| None)?;
    let peer = Peer { pid: credentials.pid().filter(|&pid| pid != 0), uid: credentials.uid() };
    if peer.uid == ROOT || Some(peer.uid) == allowed_uid { Ok(peer) } else { Err(Some(peer)) }
}

fn report_refused(reported: &mut HashSet<Option<(Option<i32>, u32)>>, peer: Option<Peer>) {
    if reported.len() >= REFUSED_MAX {
        reported.clear();
    }
    if !reported.insert(peer.map(|p| (p.pid, p.uid))) {
        return;
    }
    match peer {
        Some(Peer { pid, uid }) => warn!(pid, uid, "refused a process on the ztunnel socket: wrong user"),
        None => warn!("refused a process on the ztunnel socket: user unknown"),
    }
}

/// Removes the socket when the server goes, unless the name has become somebody else's.
#[derive(Debug)]
struct SocketFile {
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

fn bind(config: &Config) -> Result<(UnixSeqpacketListener, SocketFile), BindError> {
    let path = config.path.as_path();
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
        chown(dir, config.allowed_uid, None).map_err(failed("change the owner of", dir))?;
    }
    // Two agents that start at once must not both find the same file stale.
    let dir_fd = File::open(dir).map_err(failed("open", dir))?;
    let _lock = Flock::lock(dir_fd, FlockArg::LockExclusive)
        .map_err(|(_, e)| failed("lock", dir)(io::Error::from(e)))?;
    remove_stale(path)?;
    let listener = UnixSeqpacketListener::bind(path).map_err(failed("listen on", path))?;
    let inode = inode(path).map_err(failed("look at", path))?;
    let socket_file = SocketFile { path: path.to_owned(), inode };
    let only_owner = fs::Permissions::from_mode(0o600);
    fs::set_permissions(path, only_owner).map_err(failed("change the mode of", path))?;
    chown(path, config.allowed_uid, None).map_err(failed("change the owner of", path))?;
    Ok((listener, socket_file))
}

/// Removes what an earlier agent left at `path`, and nothing else.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let failed = |action| move |source| BindError::Io { action, path: path.to_owned(), source };
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("look at")(e)),
    };
    if !found.file_type().is_socket() {
        return Err(BindError::NotASocket(path.to_owned()));
    }
    match probe(path) {
        // Also one of another type, or one too busy to take us: somebody holds it.
        Ok(()) | Err(Errno::EPROTOTYPE | Errno::EAGAIN) => Err(BindError::InUse(path.to_owned())),
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
