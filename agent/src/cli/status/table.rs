//! `weir status` for people.

use std::io::{self, Write};

use super::{Status, row::Row};

pub(super) fn write(out: &mut impl Write, status: &Status) -> io::Result<()> {
    match &status.agent {
        None => writeln!(out, "no agent answers: what follows is what is pinned")?,
        Some(agent) => {
            let ztunnels: Vec<String> = agent
                .ztunnels
                .iter()
                .map(|ztunnel| {
                    let pid = ztunnel.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
                    format!("pid {pid} (took {}, refuses {})", ztunnel.acked, ztunnel.refused.len())
                })
                .collect();
            let ztunnels = if ztunnels.is_empty() { "none".to_owned() } else { ztunnels.join(", ") };
            writeln!(out, "agent {} on {}; ztunnel: {ztunnels}", agent.version, agent.node)?;
            for missing in &agent.missing {
                writeln!(out, "not ready: {missing}")?;
            }
        }
    }
    let width = status.pods.iter().map(|row| row.pod().len()).max().unwrap_or(0).max(3);
    writeln!(
        out,
        "{:<width$}  {:<12}  {:<18}  {:<20}  {:>8}  COUNTERS",
        "POD", "STATE", "REASON", "SINCE", "NETNS"
    )?;
    for row in &status.pods {
        writeln!(
            out,
            "{:<width$}  {:<12}  {:<18}  {:<20}  {:>8}  {}",
            row.pod(),
            row.state,
            row.reason.map_or("-", |reason| reason.as_str()),
            row.since,
            row.netns_cookie.map_or_else(|| "-".to_owned(), |cookie| cookie.to_string()),
            counters(row)
        )?;
        if let Some(ztunnel) = &row.acked_by {
            writeln!(out, "{:<width$}  taken by {ztunnel}", "")?;
        }
        for why in &row.why {
            let detail = why.detail.as_ref().map_or_else(String::new, |detail| format!(" ({detail})"));
            writeln!(out, "{:<width$}  {}: {}{detail}", "", why.reason, why.meaning)?;
            if let Some(remedy) = why.remedy {
                writeln!(out, "{:<width$}    {remedy}", "")?;
            }
        }
    }
    Ok(())
}

fn counters(row: &Row) -> String {
    let counted = row.counters.iter().map(|count| (count.reason, count.ipv4 + count.ipv6));
    let old = row.old_connections.iter().flat_map(|old| {
        [("adopted", old.adopted), ("expired", old.expired), ("left", old.left.unwrap_or(0))]
    });
    let all = counted.chain(old.filter(|(_, count)| *count > 0));
    all.map(|(reason, count)| format!("{reason}={count}")).collect::<Vec<_>>().join(" ")
}
