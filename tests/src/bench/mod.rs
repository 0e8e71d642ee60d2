//! The measurements behind docs/benchmarks.md: weir beside the limit of loopback and beside Istio's rules, all arms in
//! one run, round by round in turn.

mod endpoint;
mod machine;
pub mod path;
pub mod report;
pub mod stats;

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use serde_json::{Value, json};

use machine::{Machine, Watch};

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Rounds of the data path's arms.
    pub rounds: usize,
    /// How long an arm works in one round.
    pub slice: Duration,
    /// The short form: its shape counts, not its times.
    pub quick: bool,
}

impl Options {
    /// What docs/benchmarks.md reports.
    pub const FULL: Self = Self { rounds: 20, slice: Duration::from_millis(80), quick: false };
    /// For a look, and for the test of the shape.
    pub const QUICK: Self = Self { rounds: 3, slice: Duration::from_millis(10), quick: true };
}

/// Measures everything, prints tables, and returns what belongs into the file.
///
/// # Errors
/// When the kernel refuses a part, or an operation fails: a measurement of failures is none.
pub fn run(options: &Options) -> Result<Value> {
    let machine = Machine::this()?;
    let watch = Watch::start()?;
    // A world belongs to the thread that makes it.
    let path = std::thread::scope(|scope| scope.spawn(|| path::measure(options)).join())
        .expect("a measurement does not panic")?;
    let noisy = watch.finish()?;
    let judged = report::judge(&path);
    println!("{}", report::path_table(&path));
    println!("{}", report::ratio_table(&judged));
    if let Some(reason) = &noisy {
        println!("noisy: {reason}");
    }
    let mut file = json!({
        "machine": machine,
        "quick": options.quick,
        "rounds": options.rounds,
        "noisy": noisy.is_some(),
        "noisy_reason": noisy,
        "arms": path.arms,
        "tracked": path.tracked.iter().copied().collect::<BTreeMap<_, _>>(),
    });
    if let (Value::Object(file), Value::Object(ratios)) = (&mut file, report::ratios_json(&judged)) {
        file.extend(ratios);
    }
    Ok(file)
}
