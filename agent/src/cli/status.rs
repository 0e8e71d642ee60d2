//! `weir status`: the pods of this node, by what the agent knows and by what is pinned. Either is enough.

mod row;
mod table;

use std::{io::Write, path::PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;

use self::row::Row;
use super::{Degraded, Paths, client};
use crate::{
    domain::report::{NodeReport, ZtunnelReport},
    netns::{Netns, discover::Discovery},
    redirect::pinned,
};

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Only this pod.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod: Option<String>,
    /// Looks into every captured pod, and says what is wrong and what to do.
    #[arg(long)]
    why: bool,
    /// Machine output.
    #[arg(long)]
    json: bool,
    /// Where the agent answers.
    #[arg(long, env = "WEIR_ADMIN_SOCKET", default_value = super::ADMIN_SOCKET, value_name = "PATH")]
    admin_socket: PathBuf,
    #[command(flatten)]
    paths: Paths,
}

/// All that is shown.
#[derive(Debug, Serialize)]
struct Status {
    agent: Option<Agent>,
    pods: Vec<Row>,
}

/// The agent that answered.
#[derive(Debug, Serialize)]
struct Agent {
    version: String,
    node: String,
    missing: Vec<String>,
    ztunnels: Vec<ZtunnelReport>,
}

pub fn run(args: &StatusArgs) -> Result<()> {
    let report = client::report(&args.admin_socket)?;
    let mut rows = rows(args, report.as_ref());
    if let Some(pod) = &args.pod {
        rows.retain(|row| row.pod() == *pod);
        if rows.is_empty() {
            let known = if report.is_some() { "is on this node" } else { "is pinned, and no agent answers" };
            bail!("no pod {pod} {known}");
        }
    }
    let agent = report.map(|report| {
        let NodeReport { version, node, missing, ztunnels, .. } = report;
        Agent { version, node, missing, ztunnels }
    });
    let status = Status { agent, pods: rows };
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &status)?;
        writeln!(out)?;
    } else {
        table::write(&mut out, &status)?;
    }
    out.flush()?;
    let broken = status.pods.iter().filter(|row| row.is_broken()).count();
    if args.why && broken > 0 {
        bail!(Degraded(format!("{broken} of {} pods are not as they must be", status.pods.len())));
    }
    Ok(())
}

/// What is pinned and what the agent tells, laid side by side by UID.
fn rows(args: &StatusArgs, report: Option<&NodeReport>) -> Vec<Row> {
    let host = Netns::open(&args.paths.host_netns());
    let discovery = host.ok().map(|host| Discovery::new(args.paths.proc.clone(), host));
    let told = report.map(|report| report.pods.as_slice()).unwrap_or_default();
    let mut rows: Vec<Row> = Vec::new();
    for pod in pinned(&args.paths.bpffs) {
        let told = told.iter().find(|told| told.uid == pod.record.uid);
        let name = format!("{}/{}", pod.record.namespace, pod.record.name);
        // Looking into a namespace costs some milliseconds: only where somebody wants to know.
        let asked = args.why || args.pod.as_ref() == Some(&name);
        let look = asked.then(|| row::look(&args.paths, discovery.as_ref(), &pod));
        rows.push(Row::pinned(pod, told, look));
    }
    for told in told {
        if !rows.iter().any(|row| row.is(&told.uid)) {
            rows.push(Row::told(told));
        }
    }
    rows.sort_by_key(Row::pod);
    rows
}
