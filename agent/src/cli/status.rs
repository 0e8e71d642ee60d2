//! `weir status`: the pods of this node, from what is pinned.

use std::{io::Write, path::PathBuf, time::Duration};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use weir_common::{Counter, Family, PodFlags};

use crate::redirect::{Pinned, pinned};

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Directory on bpffs for all that is pinned.
    #[arg(long, env = "WEIR_BPFFS", default_value = "/sys/fs/bpf/weir", value_name = "DIR")]
    bpffs: PathBuf,
    /// Machine output.
    #[arg(long)]
    json: bool,
}

/// One pod.
#[derive(Debug, Serialize)]
struct Row {
    namespace: String,
    name: String,
    uid: String,
    netns_cookie: u64,
    state: &'static str,
    since_seconds: u64,
    counters: Vec<Count>,
}

/// One counter that is not zero.
#[derive(Debug, Serialize)]
struct Count {
    reason: &'static str,
    ipv4: u64,
    ipv6: u64,
}

pub fn run(args: &StatusArgs) -> Result<()> {
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
    let rows: Vec<Row> = pinned(&args.bpffs).into_iter().map(|pod| row(pod, now)).collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &rows)?;
        writeln!(out)?;
    } else {
        table(&mut out, &rows)?;
    }
    Ok(())
}

fn row(pod: Pinned, now: u64) -> Row {
    let state = match pod.config.flags {
        _ if !pod.linked => "broken",
        flags if flags.has(PodFlags::DRAINING) => "draining",
        flags if flags.has(PodFlags::INBOUND) => "captured",
        flags if flags.has(PodFlags::SWITCHING_ON) => "switching_on",
        _ => "prepared",
    };
    let counters = Counter::ALL
        .iter()
        .filter(|counter| pod.counters.total(**counter) > 0)
        .map(|&counter| Count {
            reason: counter.name(),
            ipv4: pod.counters.get(counter, Family::V4),
            ipv6: pod.counters.get(counter, Family::V6),
        })
        .collect::<Vec<_>>();
    let old = [("adopted", pod.old.adopted), ("expired", pod.old.expired)]
        .map(|(reason, [ipv4, ipv6])| Count { reason, ipv4, ipv6 });
    let old = old.into_iter().filter(|count| count.ipv4 + count.ipv6 > 0);
    let counters = counters.into_iter().chain(old).collect();
    Row {
        namespace: pod.record.namespace,
        name: pod.record.name,
        uid: pod.record.uid,
        netns_cookie: pod.record.cookie,
        state,
        since_seconds: now.saturating_sub(pod.record.since),
        counters,
    }
}

fn table(out: &mut impl Write, rows: &[Row]) -> std::io::Result<()> {
    let pod = |row: &Row| format!("{}/{}", row.namespace, row.name);
    let width = rows.iter().map(|row| pod(row).len()).max().unwrap_or(0).max(3);
    writeln!(out, "{:<width$}  {:<12}  {:>8}  {:>8}  COUNTERS", "POD", "STATE", "SINCE", "NETNS")?;
    for row in rows {
        let counters: Vec<String> = row
            .counters
            .iter()
            .map(|count| format!("{}={}", count.reason, count.ipv4 + count.ipv6))
            .collect();
        writeln!(
            out,
            "{:<width$}  {:<12}  {:>8}  {:>8}  {}",
            pod(row),
            row.state,
            format!("{:?}", Duration::from_secs(row.since_seconds)),
            row.netns_cookie,
            counters.join(" ")
        )?;
    }
    Ok(())
}
