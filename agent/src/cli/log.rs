//! `weir log`: what the running agent logs.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use hyper::Method;

use super::client;

#[derive(Debug, Args)]
pub struct LogArgs {
    /// `error`, `warn`, `info`, `debug`, `trace`, or by module: `info,weir_agent::reconcile=debug`. Shows what holds
    /// when not given.
    filter: Option<String>,
    /// Where the agent answers.
    #[arg(long, env = "WEIR_ADMIN_SOCKET", default_value = super::ADMIN_SOCKET, value_name = "PATH")]
    admin_socket: PathBuf,
}

pub fn run(args: &LogArgs) -> Result<()> {
    let (method, body) = match &args.filter {
        Some(filter) => (Method::PUT, filter.clone()),
        None => (Method::GET, String::new()),
    };
    let answer = client::ask(&args.admin_socket, method, "/log", body)?;
    print!("{}", answer.with_context(|| format!("no agent answers on {}", args.admin_socket.display()))?);
    Ok(())
}
