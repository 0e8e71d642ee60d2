//! The command line.

mod client;
mod install;
mod log;
mod redirect;
mod status;
mod top;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};

/// Where a running agent answers.
pub const ADMIN_SOCKET: &str = "/run/weir/admin.sock";

/// Exit status: done.
const DONE: u8 = 0;
/// Exit status: failed.
const FAILED: u8 = 1;
/// Exit status: usage or configuration.
const USAGE: u8 = 2;
/// Exit status: works, but degraded.
const DEGRADED: u8 = 3;

/// Node agent of an Istio ambient mesh with an eBPF data path.
#[derive(Debug, Parser)]
#[command(name = "weir", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Enrols the pods of this node: watches the API server, serves ztunnel.
    Agent(Box<crate::node::AgentArgs>),
    /// The data path of one namespace by hand, without Kubernetes.
    Redirect(redirect::RedirectArgs),
    /// Puts the CNI plugin on this node: the program, and its entry in the network configuration.
    Install(Box<install::InstallArgs>),
    /// Takes it away again.
    Uninstall(install::PlacesArgs),
    /// The pods of this node, from the agent and from what is pinned; needs no agent.
    Status(status::StatusArgs),
    /// The counters of every pod, live; needs no agent.
    Top(top::TopArgs),
    /// Shows or changes what the running agent logs.
    Log(log::LogArgs),
}

/// Where things are on this machine; in a container the host's are mounted elsewhere.
#[derive(Clone, Debug, Args)]
pub struct Paths {
    /// Directory on bpffs for all that is pinned.
    #[arg(long, env = "WEIR_BPFFS", default_value = "/sys/fs/bpf/weir", value_name = "DIR")]
    pub bpffs: PathBuf,
    /// A writable proc mount that shows the host's processes.
    #[arg(long, env = "WEIR_PROC", default_value = "/proc", value_name = "DIR")]
    pub proc: PathBuf,
    /// The host's network namespace [default: that of process 1 of --proc].
    #[arg(long, env = "WEIR_HOST_NETNS", value_name = "PATH")]
    pub host_netns: Option<PathBuf>,
}

impl Paths {
    /// File of the host's network namespace.
    pub fn host_netns(&self) -> PathBuf {
        self.host_netns.clone().unwrap_or_else(|| self.proc.join("1/ns/net"))
    }
}

/// Runs the command that the process was called with.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let (command, result) = match cli.command {
        Command::Agent(args) => ("agent", crate::node::run(*args)),
        Command::Redirect(args) => ("redirect", redirect::run(&args)),
        Command::Install(args) => ("install", install::run(&args)),
        Command::Uninstall(args) => ("uninstall", install::undo(&args)),
        Command::Status(args) => ("status", status::run(&args)),
        Command::Top(args) => ("top", top::run(&args)),
        Command::Log(args) => ("log", log::run(&args)),
    };
    match result {
        Ok(()) => ExitCode::from(DONE),
        Err(error) => {
            eprintln!("weir {command}: {error:#}");
            ExitCode::from(if error.is::<Usage>() {
                USAGE
            } else if error.is::<Degraded>() {
                DEGRADED
            } else {
                FAILED
            })
        }
    }
}

/// The command line or the configuration is wrong.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// The command did its work and found something that is not as it must be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Degraded(pub String);
