//! The agent's end of the plugin's socket. Every connection is one request, served on its own: one that makes no
//! sense, or never comes, hurts nobody else.

use std::{
    fs,
    io::{self, IoSliceMut},
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use thiserror::Error;
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener, ancillary::OwnedAncillaryMessage};
use tracing::{debug, info, warn};

use super::{find::Lookup, requests::Requests};
use crate::{
    domain::cni::{Answer, MAX_MESSAGE, Request, RequestVerb},
    listen::{self, BindError, SocketFile},
};

const ROOT: u32 = 0;
/// Requests served at once; more wait in the socket's backlog.
const CONCURRENCY: usize = 256;
/// From connecting to the request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(2);
/// Room for more descriptors than are allowed, so that they can be refused.
const CONTROL_BUFFER: usize = 64;
/// Pause after a failed accept: out of descriptors, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound socket. Plugins queue up from here on, and are served by [`Server::run`].
#[derive(Debug)]
pub struct Server {
    listener: UnixSeqpacketListener,
    socket_file: SocketFile,
    path: PathBuf,
}

/// A request that is not even looked at.
#[derive(Debug, Error)]
enum Malformed {
    #[error("not root")]
    NotRoot,
    #[error("no request in time")]
    Silent,
    #[error("longer than {MAX_MESSAGE} bytes")]
    TooLong,
    #[error("{0} descriptors, {1}")]
    Descriptors(usize, &'static str),
    #[error("{0}")]
    Unreadable(#[from] serde_json::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Server {
    /// Binds the socket in a directory that only root can enter. Needs a tokio runtime around it.
    ///
    /// # Errors
    /// When the path is taken or the file system refuses.
    pub fn bind(path: &Path) -> Result<Self, BindError> {
        let (listener, socket_file) = listen::bind(path, None, "--cni-socket")?;
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            let only_root = fs::Permissions::from_mode(0o700);
            fs::set_permissions(dir, only_root).map_err(|source| BindError::Io {
                action: "change the mode of",
                path: dir.to_owned(),
                source,
            })?;
        }
        Ok(Self { listener, socket_file, path: path.to_owned() })
    }

    /// Serves until dropped.
    pub async fn run<L: Lookup>(self, requests: Requests<L>) {
        let Self { mut listener, socket_file: _remove_at_end, path } = self;
        info!(path = %path.display(), "listening for the CNI plugin");
        let (requests, permits) = (Arc::new(requests), Arc::new(Semaphore::new(CONCURRENCY)));
        let _janitor = AbortOnDrop(tokio::spawn(requests.clone().forget_what_is_gone()));
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
            match listener.accept().await {
                Ok(socket) => {
                    let requests = requests.clone();
                    tokio::spawn(async move {
                        if let Err(error) = attend(&socket, &requests).await {
                            warn!(%error, "a request of the CNI plugin was refused");
                        }
                        drop(permit);
                    });
                }
                Err(error) => {
                    warn!(%error, "cannot accept a connection of the CNI plugin");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One connection. A plugin that is gone before it has its answer has its request undone.
async fn attend<L: Lookup>(socket: &UnixSeqpacket, requests: &Requests<L>) -> Result<(), Malformed> {
    let (request, netns) = match receive(socket).await {
        Ok(received) => received,
        Err(error) => {
            let refused = Answer::Refused { detail: error.to_string() };
            // It may not be there to hear it.
            let _ = send(socket, &refused).await;
            return Err(error);
        }
    };
    let answer = tokio::select! {
        answer = requests.serve(&request, netns) => answer,
        () = hung_up(socket) => {
            warn!(verb = ?request.verb, pod = %request.pod, "the CNI plugin left before it was answered");
            return Ok(());
        }
    };
    tell(&request, &answer);
    Ok(send(socket, &answer).await?)
}

fn tell(request: &Request, answer: &Answer) {
    let (verb, pod, container) = (request.verb, &request.pod, &request.attachment.container);
    match answer {
        Answer::Failed { step, reason, detail } => {
            warn!(?verb, %pod, uid = pod.uid, container, step, %reason, "not captured: {detail}");
        }
        Answer::Refused { detail } => warn!(?verb, %pod, uid = pod.uid, container, "refused: {detail}"),
        Answer::Captured => info!(?verb, %pod, uid = pod.uid, container, "captured before its start"),
        other => debug!(?verb, %pod, uid = pod.uid, container, answer = ?other, "CNI"),
    }
}

async fn receive(socket: &UnixSeqpacket) -> Result<(Request, Option<OwnedFd>), Malformed> {
    if socket.peer_cred()?.uid() != ROOT {
        return Err(Malformed::NotRoot);
    }
    let mut buffer = vec![0; MAX_MESSAGE];
    let mut control = [0; CONTROL_BUFFER];
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let received = socket.recv_vectored_with_ancillary(&mut parts, &mut control);
    let (info, ancillary) = timeout(REQUEST_PATIENCE, received).await.map_err(|_| Malformed::Silent)??;
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for message in ancillary.into_messages() {
        if let OwnedAncillaryMessage::FileDescriptors(received) = message {
            descriptors.extend(received);
        }
    }
    if info.truncated() {
        return Err(Malformed::TooLong);
    }
    let request: Request = serde_json::from_slice(&buffer[..info.bytes_read()])?;
    let wrong = |wanted| Err(Malformed::Descriptors(descriptors.len(), wanted));
    match (request.verb, descriptors.len()) {
        _ if info.ancillary_truncated() => wrong("and more than that"),
        (RequestVerb::Add, 1) | (RequestVerb::Del, 0 | 1) => Ok((request, descriptors.pop())),
        (RequestVerb::Add, _) => wrong("where one is needed"),
        (_, 0) => Ok((request, None)),
        _ => wrong("where none is taken"),
    }
}

async fn send(socket: &UnixSeqpacket, answer: &Answer) -> io::Result<()> {
    let message = serde_json::to_vec(answer)?;
    timeout(REQUEST_PATIENCE, socket.send(&message)).await.map_err(io::Error::from)?.map(drop)
}

/// Waits for the other end to go; whatever else it says counts as that.
async fn hung_up(socket: &UnixSeqpacket) {
    let _ = socket.recv(&mut [0]).await;
}
