//! What the numbers say: ratios, their bars, the table, the file.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::{Map, Value, json};

use super::{
    path::{Arm, FLOWS, Path},
    stats::{self, Estimate},
};

/// What a ratio must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bar {
    /// Not more than this.
    AtMost(f64),
    /// Not less than this.
    AtLeast(f64),
}

impl Bar {
    /// Whether the value is on the right side.
    pub fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtMost(bar) => value <= bar,
            Self::AtLeast(bar) => value >= bar,
        }
    }

    fn worse(self, a: Estimate, b: Estimate) -> Estimate {
        let first = match self {
            Self::AtMost(_) => a.value >= b.value,
            Self::AtLeast(_) => a.value <= b.value,
        };
        if first { a } else { b }
    }
}

impl std::fmt::Display for Bar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtMost(bar) => write!(f, "≤ {bar}"),
            Self::AtLeast(bar) => write!(f, "≥ {bar}"),
        }
    }
}

/// The two programs that Istio's agent may use; the better one counts.
const IPTABLES: [&str; 2] = ["iptables-legacy", "iptables-nft"];

/// A ratio of the data path: of which measure, to which arms.
struct Ratio {
    name: &'static str,
    measures: &'static [&'static str],
    to: &'static [&'static str],
    of: fn(&Arm) -> &[f64],
    bar: Bar,
}

const RATIOS: [Ratio; 10] = [
    Ratio::time("connect_out_limit", &["connect_out"], &["limit"], 1.06),
    Ratio::time("connect_out_iptables", &["connect_out"], &IPTABLES, 0.80),
    Ratio::time("connect_in_limit", &["connect_in"], &["limit"], 1.06),
    Ratio::time("connect_in_iptables", &["connect_in"], &IPTABLES, 0.80),
    Ratio::time("rtt_limit", &["rtt"], &["limit"], 1.03),
    Ratio::time("rtt_iptables", &["rtt"], &IPTABLES, 0.78),
    Ratio { bar: Bar::AtLeast(0.97), ..Ratio::time("bulk_limit", &["bulk"], &["limit"], 0.0) },
    Ratio { bar: Bar::AtLeast(1.2), ..Ratio::time("bulk_iptables", &["bulk"], &IPTABLES, 0.0) },
    Ratio {
        of: |arm| &arm.cpu_samples,
        ..Ratio::time("cpu_per_connection_iptables", &["connect_out"], &IPTABLES, 0.80)
    },
    Ratio::time("not_captured_clean", &["not_captured_connect", "not_captured_rtt"], &["limit"], 1.03),
];

impl Ratio {
    const fn time(
        name: &'static str,
        measures: &'static [&'static str],
        to: &'static [&'static str],
        most: f64,
    ) -> Self {
        Self { name, measures, to, of: |arm| &arm.samples, bar: Bar::AtMost(most) }
    }

    /// Of one family: of several measures the worse, against several arms the better of them.
    fn of(&self, path: &Path, v6: bool) -> Option<Estimate> {
        let each = self.measures.iter().map(|measure| self.of_measure(path, measure, v6));
        each.collect::<Option<Vec<_>>>()?.into_iter().reduce(|a, b| self.bar.worse(a, b))
    }

    fn of_measure(&self, path: &Path, measure: &str, v6: bool) -> Option<Estimate> {
        let weir = (self.of)(path.arm(measure, v6, "weir")?);
        let others = self.to.iter().filter_map(|to| path.arm(measure, v6, to)).map(self.of);
        let other = others.min_by(|a, b| stats::median(a).total_cmp(&stats::median(b)))?;
        Some(match self.bar {
            Bar::AtMost(_) => stats::ratio(weir, other),
            // Time is the inverse of throughput.
            Bar::AtLeast(_) => stats::ratio(other, weir),
        })
    }
}

/// One ratio of the report.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    /// Its name.
    pub name: &'static str,
    /// IPv4, IPv6.
    pub families: [Estimate; 2],
    /// The worse of them: what counts.
    pub estimate: Estimate,
    /// What it must be.
    pub bar: Bar,
}

/// The data path's ratios.
pub fn judge(path: &Path) -> Vec<Judged> {
    RATIOS
        .iter()
        .filter_map(|ratio| {
            let families = [ratio.of(path, false)?, ratio.of(path, true)?];
            let estimate = ratio.bar.worse(families[0], families[1]);
            Some(Judged { name: ratio.name, families, estimate, bar: ratio.bar })
        })
        .collect()
}

/// The file: flat `ratios`, and beside them all that they were made from.
pub fn ratios_json(judged: &[Judged]) -> Value {
    let flat = |of: &dyn Fn(&Judged) -> f64| -> Map<String, Value> {
        judged.iter().map(|one| (one.name.to_owned(), json!(of(one)))).collect()
    };
    let detail: BTreeMap<&str, Value> = judged
        .iter()
        .map(|one| {
            let bar = match one.bar {
                Bar::AtMost(bar) => json!({ "at_most": bar }),
                Bar::AtLeast(bar) => json!({ "at_least": bar }),
            };
            let met = one.bar.is_met(one.estimate.value);
            (one.name, json!({ "interval": [one.estimate.low, one.estimate.high], "bar": bar, "met": met }))
        })
        .collect();
    json!({
        "ratios": flat(&|one| one.estimate.value),
        "ratios_v4": flat(&|one| one.families[0].value),
        "ratios_v6": flat(&|one| one.families[1].value),
        "bars": detail,
    })
}

/// The data path as a table for a terminal.
pub fn path_table(path: &Path) -> String {
    let mut table = String::new();
    let _ = writeln!(
        table,
        "{:<22}{:<4}{:<17}{:>10} {:>19}{:>10}{:>10}",
        "measure", "", "arm", "µs", "95 % interval", "p99 µs", "cpu µs"
    );
    for arm in &path.arms {
        let us = |ns: f64| format!("{:.2}", ns / 1e3);
        let interval = format!("{} – {}", us(arm.ns.low), us(arm.ns.high));
        let _ = writeln!(
            table,
            "{:<22}{:<4}{:<17}{:>10} {:>19}{:>10}{:>10}",
            arm.measure,
            arm.family,
            arm.arm,
            us(arm.ns.value),
            interval,
            us(arm.p99_ns),
            us(arm.cpu_ns.value)
        );
    }
    for (way, entries) in &path.tracked {
        let _ = writeln!(table, "tracked connections after {FLOWS} flows, {way}: {entries}");
    }
    table
}

/// The ratios as a table for a terminal.
pub fn ratio_table(judged: &[Judged]) -> String {
    let mut table = String::new();
    let _ = writeln!(
        table,
        "{:<30}{:>8} {:>17}{:>8}{:>8}  {:<8}",
        "ratio", "worse", "95 % interval", "v4", "v6", "bar"
    );
    for one in judged {
        let family = |index: usize| format!("{:.3}", one.families[index].value);
        let interval = format!("{:.3} – {:.3}", one.estimate.low, one.estimate.high);
        let met = if one.bar.is_met(one.estimate.value) { "met" } else { "MISSED" };
        let _ = writeln!(
            table,
            "{:<30}{:>8.3} {:>17}{:>8}{:>8}  {:<8} {met}",
            one.name,
            one.estimate.value,
            interval,
            family(0),
            family(1),
            one.bar.to_string()
        );
    }
    table
}
