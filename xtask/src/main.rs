//! `cargo xtask`: everything about weir that plain `cargo` cannot do.

mod bench;
mod debian;
mod demo;
mod ebpf;
mod packages;
mod run;
mod statics;
mod test;
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
    /// Build the programs as they are shipped, static, and check their size
    BuildStatic,
    /// Check everything: format, lints, unit tests, and as root the integration tests
    Test {
        /// Of the tests, run only those whose names contain one of these
        filter: Vec<String>,
    },
    /// Show weir at work: pods in network namespaces, a stand-in ztunnel, the agent (takes root)
    Demo,
    /// Measure weir beside the limit of loopback and beside Istio's rules (takes root); `--help` tells more
    #[command(disable_help_flag = true)]
    Bench {
        /// Arguments of the measuring program
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::BuildEbpf { clippy: true } => ebpf::clippy(),
        Command::BuildEbpf { clippy: false } => ebpf::build().map(|object| println!("{}", object.display())),
        Command::BuildStatic => statics::build().map(|dir| println!("{}", dir.display())),
        Command::Test { filter } => match test::run(&filter) {
            // What failed has been said, and the summary is to be the last line.
            Ok(false) => return ExitCode::FAILURE,
            result => result.map(|_| ()),
        },
        Command::Demo => demo::run(),
        Command::Bench { args } => bench::run(&args),
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
