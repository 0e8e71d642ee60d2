//! `weir top`: the counters of every pod, live, from what is pinned.

use std::{
    collections::HashMap,
    io::{IsTerminal, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use weir_common::{Counter, Counters};

use super::Usage;
use crate::{
    domain::overrides::duration,
    redirect::{Pinned, pinned},
};

#[derive(Debug, Args)]
pub struct TopArgs {
    /// Directory on bpffs for all that is pinned.
    #[arg(long, env = "WEIR_BPFFS", default_value = "/sys/fs/bpf/weir", value_name = "DIR")]
    bpffs: PathBuf,
    /// Time between two looks.
    #[arg(long, default_value = "1s", value_name = "TIME")]
    interval: String,
    /// Ends after so many looks.
    #[arg(long, value_name = "NUMBER")]
    count: Option<u64>,
    /// Machine output: one line per look.
    #[arg(long)]
    json: bool,
}

/// One pod at one look.
#[derive(Debug, Serialize)]
struct Row {
    namespace: String,
    name: String,
    counters: Vec<Rate>,
}

/// One counter that is not zero.
#[derive(Debug, Serialize)]
struct Rate {
    reason: &'static str,
    total: u64,
    per_second: f64,
}

pub fn run(args: &TopArgs) -> Result<()> {
    let wrong = || Usage(format!("--interval: {:?} is no time such as 1s or 500ms", args.interval));
    let interval = duration(&args.interval).filter(|time| !time.is_zero()).ok_or_else(wrong)?;
    let mut before: HashMap<u64, (Counters, Instant)> = HashMap::new();
    for look in 0.. {
        let rows: Vec<Row> = pinned(&args.bpffs).into_iter().map(|pod| row(pod, &mut before)).collect();
        let mut out = std::io::stdout().lock();
        if args.json {
            serde_json::to_writer(&mut out, &rows)?;
            writeln!(out)?;
        } else {
            if out.is_terminal() {
                // Home, and clear what is below.
                write!(out, "\x1b[H\x1b[J")?;
            }
            table(&mut out, &rows)?;
        }
        out.flush()?;
        if args.count.is_some_and(|count| look + 1 >= count) {
            break;
        }
        std::thread::sleep(interval);
    }
    Ok(())
}

fn row(pod: Pinned, before: &mut HashMap<u64, (Counters, Instant)>) -> Row {
    let now = Instant::now();
    let last = before.insert(pod.record.cookie, (pod.counters, now));
    let (then, passed) = last.map_or((pod.counters, Duration::ZERO), |(counters, at)| (counters, now - at));
    let counters = Counter::ALL.iter().filter(|counter| pod.counters.total(**counter) > 0).map(|&counter| {
        let total = pod.counters.total(counter);
        let more = total.saturating_sub(then.total(counter));
        let per_second = if passed.is_zero() { 0.0 } else { more as f64 / passed.as_secs_f64() };
        Rate { reason: counter.name(), total, per_second }
    });
    let counters = counters.collect();
    Row { namespace: pod.record.namespace, name: pod.record.name, counters }
}

fn table(out: &mut impl Write, rows: &[Row]) -> std::io::Result<()> {
    let pod = |row: &Row| format!("{}/{}", row.namespace, row.name);
    let width = rows.iter().map(|row| pod(row).len()).max().unwrap_or(0).max(3);
    writeln!(out, "{:<width$}  {:<18}  {:>12}  {:>10}", "POD", "COUNTER", "TOTAL", "PER SECOND")?;
    for row in rows {
        for (index, rate) in row.counters.iter().enumerate() {
            let name = if index == 0 { pod(row) } else { String::new() };
            writeln!(
                out,
                "{name:<width$}  {:<18}  {:>12}  {:>10.1}",
                rate.reason, rate.total, rate.per_second
            )?;
        }
        if row.counters.is_empty() {
            writeln!(out, "{:<width$}  -", pod(row))?;
        }
    }
    Ok(())
}
