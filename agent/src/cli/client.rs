//! Asks the running agent over its admin socket.

use std::{io, path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use crate::domain::report::NodeReport;

/// An agent that does not answer in this time is as good as none.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the agent knows; none when none runs.
pub(super) fn report(socket: &Path) -> Result<Option<NodeReport>> {
    ask(socket, Method::GET, "/status", String::new())?
        .map(|text| serde_json::from_str(&text).context("the agent's answer"))
        .transpose()
}

/// One request. None when nobody listens.
pub(super) fn ask(socket: &Path, method: Method, path: &str, body: String) -> Result<Option<String>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stream = match UnixStream::connect(socket).await {
            Ok(stream) => stream,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error).with_context(|| socket.display().to_string()),
        };
        let asked = tokio::time::timeout(PATIENCE, exchange(stream, method, path, body)).await;
        asked.with_context(|| format!("{}: the agent does not answer", socket.display()))?.map(Some)
    })
}

async fn exchange(stream: UnixStream, method: Method, path: &str, body: String) -> Result<String> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "weir")
        .body(Full::new(Bytes::from(body)))?;
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let text = String::from_utf8(answer.into_body().collect().await?.to_bytes().to_vec())?;
    drop(sender);
    connection.abort();
    if status != StatusCode::OK {
        bail!("{}", text.trim());
    }
    Ok(text)
}
