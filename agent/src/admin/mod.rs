//! What the agent tells about itself over HTTP: `/metrics`, `/healthz`, `/readyz`; on a socket of its own the pods it
//! knows, and the level of its log.
#![forbid(unsafe_code)]

pub mod log;
mod metrics;
mod socket;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result};
use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;

use crate::{
    cache::{members::Members, pods::Pods},
    reconcile::Handle,
    zds::counters::Counters,
};

/// What is told about.
#[derive(Clone)]
pub struct Sources {
    /// What the API says.
    pub cache: Arc<Pods>,
    /// What ztunnel shall know.
    pub members: Members,
    /// What happened on its socket.
    pub zds: Arc<Counters>,
    /// Where each pod stands.
    pub reconciler: Handle,
    /// Where pods are pinned.
    pub bpffs: PathBuf,
    /// The node.
    pub node: String,
    /// The log.
    pub log: log::Level,
}

impl Sources {
    /// What keeps the agent from being ready.
    fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        let sync = self.cache.sync();
        for (what, listed) in [("pods", sync.pods.listed), ("namespaces", sync.namespaces.listed)] {
            if !listed {
                missing.push(format!("{what} have not been listed yet"));
            }
        }
        if !self.members.is_complete() {
            missing.push("what an earlier agent left has not been taken over yet".to_owned());
        }
        missing
    }
}

/// Three bound sockets. What cannot be had is an error at start, not later.
pub struct Admin {
    metrics: TcpListener,
    health: TcpListener,
    socket: socket::Socket,
}

impl Admin {
    /// Binds all.
    ///
    /// # Errors
    /// When one cannot be had.
    pub async fn bind(metrics: SocketAddr, health: SocketAddr, socket: &Path) -> Result<Self> {
        let bind = async |what, flag, addr| {
            let bound = TcpListener::bind(addr).await;
            bound.with_context(|| format!("{what} on {addr}: choose another with {flag}"))
        };
        let admin = Self {
            metrics: bind("metrics", "--metrics-addr", metrics).await?,
            health: bind("health", "--health-addr", health).await?,
            socket: socket::Socket::bind(socket)?,
        };
        tracing::info!(
            metrics = %admin.metrics.local_addr()?,
            health = %admin.health.local_addr()?,
            "listening for scrapes and checks"
        );
        Ok(admin)
    }

    /// Serves until dropped.
    ///
    /// # Errors
    /// When a socket breaks.
    pub async fn run(self, sources: Sources) -> Result<()> {
        let metrics = Router::new().route("/metrics", get(scrape)).with_state(sources.clone());
        let health = Router::new()
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .with_state(sources.clone());
        tokio::try_join!(
            async { axum::serve(self.metrics, metrics).await },
            async { axum::serve(self.health, health).await },
            self.socket.run(sources),
        )?;
        Ok(())
    }
}

async fn scrape(State(sources): State<Sources>) -> Response {
    const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    // Pins are read, which may block.
    match tokio::task::spawn_blocking(move || metrics::render(&sources)).await {
        Ok(Ok(text)) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Ready is: both watches listed, an earlier agent's pods taken over, a snapshot can be served. Not: a ztunnel is
/// there.
async fn ready(State(sources): State<Sources>) -> impl IntoResponse {
    let missing = sources.missing();
    if missing.is_empty() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n") + "\n")
    }
}
