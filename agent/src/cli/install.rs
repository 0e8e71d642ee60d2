//! `weir install`, `weir uninstall`: the CNI plugin on the node.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Value, json};

use crate::{
    cni::install::{
        self, Mode, Places,
        keep::{self, Installation, Status},
    },
    domain::{cni::conflist, config::namespace_list},
};

/// Where the node's runtime looks for plugins and their configuration.
#[derive(Debug, Args)]
pub(super) struct PlacesArgs {
    /// Directory of plugins.
    #[arg(long, env = "WEIR_CNI_BIN_DIR", default_value = "/opt/cni/bin", value_name = "DIR")]
    cni_bin_dir: PathBuf,
    /// Directory of network configurations.
    #[arg(long, env = "WEIR_CNI_CONF_DIR", default_value = "/etc/cni/net.d", value_name = "DIR")]
    cni_conf_dir: PathBuf,
    /// The configuration to be changed [default: the one that runtimes use].
    #[arg(long, env = "CNI_CONF_NAME", value_name = "NAME")]
    cni_conf_name: Option<String>,
    /// Name of a configuration of our own.
    #[arg(long, env = "WEIR_CNI_OWN_NAME", default_value = install::OWN, value_name = "NAME")]
    cni_own_name: String,
}

/// Flags of `weir install`.
#[derive(Debug, Args)]
pub(super) struct InstallArgs {
    #[command(flatten)]
    places: PlacesArgs,
    /// How runtimes come to call the plugin.
    #[arg(long, env = "WEIR_CNI_MODE", value_enum, default_value_t = Mode::Chained)]
    cni_mode: Mode,
    /// Stay, and put right whatever is changed.
    #[arg(long)]
    keep: bool,
    /// The plugin's program [default: weir-cni beside this one].
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Where the agent listens for the plugin, as the runtime sees it.
    #[arg(long, env = "WEIR_CNI_SOCKET", default_value = "/run/weir/cni.sock", value_name = "PATH")]
    cni_socket: PathBuf,
    /// The agent's table of decisions, as the runtime sees it.
    #[arg(long, env = "WEIR_DECISIONS", default_value = "/run/weir/decisions.json", value_name = "FILE")]
    decisions: PathBuf,
    /// Where the plugin logs.
    #[arg(long, default_value = "/var/log/weir-cni.log", value_name = "FILE")]
    log_file: PathBuf,
    /// What becomes of pods while the agent is down: `table`, `fail`, `pass`.
    #[arg(long, default_value = "table", value_parser = ["table", "fail", "pass"])]
    agent_down: String,
    /// Namespaces that are never enrolled, with commas between.
    #[arg(long, env = "EXCLUDE_NAMESPACES", default_value = "kube-system")]
    exclude_namespaces: String,
    /// Namespace of the agent's own pods.
    #[arg(long, env = "POD_NAMESPACE", default_value = "istio-system")]
    pod_namespace: String,
    /// What the names of the agent's own pods begin with.
    #[arg(long, default_value = "weir-")]
    own_pods: String,
    /// Make the node NotReady while the agent cannot enrol. For agents and ztunnels on the host's network only.
    #[arg(long)]
    status_follows_agent: bool,
}

impl From<&PlacesArgs> for Places {
    fn from(args: &PlacesArgs) -> Self {
        Self {
            bin_dir: args.cni_bin_dir.clone(),
            conf_dir: args.cni_conf_dir.clone(),
            primary: args.cni_conf_name.clone().filter(|name| !name.is_empty()),
            own: args.cni_own_name.clone(),
        }
    }
}

impl InstallArgs {
    fn entry(&self) -> Value {
        json!({
            "type": conflist::TYPE,
            "socket": self.cni_socket,
            "decisions": self.decisions,
            "logFile": self.log_file,
            "agentDown": self.agent_down,
            "excludeNamespaces": namespace_list(&self.exclude_namespaces),
            "ownNamespace": self.pod_namespace,
            "ownPods": self.own_pods,
            "statusFollowsAgent": self.status_follows_agent,
        })
    }
}

pub(super) fn run(args: &InstallArgs) -> Result<()> {
    let plugin = match &args.plugin {
        Some(path) => path.clone(),
        None => std::env::current_exe().context("where this program is")?.with_file_name(conflist::TYPE),
    };
    let (places, entry) = (Places::from(&args.places), args.entry().into());
    if args.keep {
        tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).init();
        let wanted = Installation { places, binary: plugin, entry, mode: args.cni_mode };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(keep::keep(wanted, Status::new()));
        return Ok(());
    }
    let (file, written) = install::install(&places, &plugin, &entry, args.cni_mode)?;
    println!("{} {}", if written { "installed in" } else { "already in" }, file.display());
    Ok(())
}

pub(super) fn undo(args: &PlacesArgs) -> Result<()> {
    Ok(install::uninstall(&args.into())?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::domain::cni::NetworkConfig;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: InstallArgs,
    }

    #[test]
    fn the_entry_is_one_the_plugin_reads() {
        let cli = Cli::parse_from(["x", "--agent-down", "fail", "--exclude-namespaces", "a,b"]);
        let mut entry = cli.args.entry();
        entry["cniVersion"] = json!("1.0.0");
        let read = NetworkConfig::read(&entry.to_string()).unwrap();
        assert_eq!(serde_json::to_value(read.agent_down).unwrap(), "fail");
        assert!(read.exclude_namespaces.contains("b") && !read.status_follows_agent);
        assert_eq!((read.own_pods.as_str(), read.own_namespace.as_str()), ("weir-", "istio-system"));
    }
}
