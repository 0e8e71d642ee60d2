//! `cargo xtask bench` becomes this, after it has built everything.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use weir_tests::bench::{self, Options};

/// Measure weir beside the limit of loopback and beside Istio's rules.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Args {
    /// A few short rounds: for a look, not for a figure.
    #[arg(long)]
    quick: bool,
    /// Write everything that was measured to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Rounds of the data path's arms.
    #[arg(long)]
    rounds: Option<usize>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let mut options = if args.quick { Options::QUICK } else { Options::FULL };
    options.rounds = args.rounds.unwrap_or(options.rounds);
    let results = bench::run(&options)?;
    if let Some(path) = args.json {
        let text = serde_json::to_string_pretty(&results)? + "\n";
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
