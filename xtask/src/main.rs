//! `cargo xtask`: everything about weir that plain `cargo` cannot do.

mod debian;
mod ebpf;
mod run;
mod tools;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Build, test and demo commands of weir.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the eBPF object `target/bpf/weir.bpf.o`, fetching the tools it takes the first time
    BuildEbpf {
        /// Lint the programs (warnings denied) instead of building them
        #[arg(long)]
        clippy: bool,
    },
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::BuildEbpf { clippy: true } => ebpf::clippy(),
        Command::BuildEbpf { clippy: false } => ebpf::build().map(|object| println!("{}", object.display())),
    };
    // Not `main() -> Result`: with RUST_BACKTRACE set that buries the message under a backtrace.
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
