//! The listening end of the ZDS socket.

use std::{collections::HashSet, path::PathBuf, sync::Arc, time::Duration};

use tokio::{task::JoinSet, time::sleep};
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener};
use tracing::{info, warn};

use super::{
    counters::Counters,
    session::{self, SessionError, Timeouts},
};
pub use crate::listen::BindError;
use crate::{
    cache::members::{Members, Peer},
    listen::{self, SocketFile},
};

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
        let (listener, socket_file) = listen::bind(&config.path, config.allowed_uid, "--ztunnel-socket")?;
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
