//! The admin socket: HTTP for root on this node. Read-only but for the log.

use std::{io, path::Path, time::SystemTime};

use anyhow::Result;
use axum::{Json, Router, extract::State, http::StatusCode, routing::get, serve::Listener};
use tokio::net::{UnixListener, UnixStream, unix::SocketAddr};

use super::Sources;
use crate::{
    domain::report::{self, NodeReport, PodReport, ZtunnelReport},
    listen::{self, SocketFile},
    reconcile::view::PodView,
};

/// Longest filter that is taken.
const FILTER: usize = 1024;

/// The bound socket.
pub(super) struct Socket {
    listener: UnixListener,
    _file: SocketFile,
}

impl Socket {
    pub(super) fn bind(path: &Path) -> Result<Self> {
        let (listener, file) =
            listen::bind_with(path, None, "--admin-socket", |path| UnixListener::bind(path))?;
        Ok(Self { listener, _file: file })
    }

    pub(super) async fn run(self, sources: Sources) -> io::Result<()> {
        let routes = Router::new()
            .route("/status", get(status))
            .route("/log", get(level).put(set_level))
            .with_state(sources);
        axum::serve(RootOnly(self.listener), routes).await
    }
}

/// Accepts from root only: the socket's mode says the same, to whoever honours it.
struct RootOnly(UnixListener);

impl Listener for RootOnly {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            let (stream, addr) = Listener::accept(&mut self.0).await;
            if stream.peer_cred().is_ok_and(|peer| peer.uid() == 0) {
                return (stream, addr);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

async fn status(State(sources): State<Sources>) -> Json<NodeReport> {
    let ztunnels = sources.members.sessions().into_iter().map(|session| ZtunnelReport {
        session: session.session,
        pid: session.peer.pid,
        newest: session.newest,
        snapshot_done: session.snapshot_done,
        acked: session.acked,
        refused: session.nacked.into_iter().map(|(uid, words)| (uid.to_string(), words)).collect(),
    });
    Json(NodeReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: sources.node.clone(),
        missing: sources.missing(),
        ztunnels: ztunnels.collect(),
        pods: sources.reconciler.views().list().into_iter().map(pod).collect(),
    })
}

fn pod(view: PodView) -> PodReport {
    let (namespace, name) = view.info.map(|info| (info.namespace, info.name)).unzip();
    PodReport {
        uid: view.uid.to_string(),
        namespace,
        name,
        state: view.state,
        reason: view.reason,
        since: rfc3339(view.since),
        error: view.last_error,
        failed_attempts: view.failed_attempts,
        slow: view.slow.map(|step| step.as_str().to_owned()),
        acked_by: view.acked_by,
    }
}

fn rfc3339(at: SystemTime) -> String {
    let seconds = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    report::rfc3339(seconds)
}

async fn level(State(sources): State<Sources>) -> String {
    sources.log.show() + "\n"
}

async fn set_level(State(sources): State<Sources>, filter: String) -> (StatusCode, String) {
    let filter = filter.trim();
    if filter.len() > FILTER {
        return (StatusCode::PAYLOAD_TOO_LARGE, format!("a filter has at most {FILTER} bytes\n"));
    }
    match sources.log.set(filter) {
        Ok(()) => (StatusCode::OK, String::new()),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{filter:?} is no filter: {error}\n")),
    }
}
