//! What the agent tells about itself over HTTP: `/metrics`, `/healthz`, `/readyz`.
#![forbid(unsafe_code)]

mod metrics;

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

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
}

/// Two bound sockets. A port that cannot be had is an error at start, not later.
pub struct Admin {
    metrics: TcpListener,
    health: TcpListener,
}

impl Admin {
    /// Binds both.
    ///
    /// # Errors
    /// When one cannot be had.
    pub async fn bind(metrics: SocketAddr, health: SocketAddr) -> Result<Self> {
        let bind = async |what, flag, addr| {
            let bound = TcpListener::bind(addr).await;
            bound.with_context(|| format!("{what} on {addr}: choose another with {flag}"))
        };
        let admin = Self {
            metrics: bind("metrics", "--metrics-addr", metrics).await?,
            health: bind("health", "--health-addr", health).await?,
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
            .with_state(sources);
        tokio::try_join!(async { axum::serve(self.metrics, metrics).await }, async {
            axum::serve(self.health, health).await
        },)?;
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
    let mut missing = Vec::new();
    let sync = sources.cache.sync();
    for (what, listed) in [("pods", sync.pods.listed), ("namespaces", sync.namespaces.listed)] {
        if !listed {
            missing.push(format!("{what} have not been listed yet"));
        }
    }
    if !sources.members.is_complete() {
        missing.push("what an earlier agent left has not been taken over yet".to_owned());
    }
    if missing.is_empty() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n") + "\n")
    }
}
