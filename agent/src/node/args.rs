//! What `weir agent` can be told on the command line and by its environment. Both are laid over the file.

use std::{fs, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::Result;
use clap::Args;

use super::kubelet::Exempt;
use crate::{
    cli::{Paths, Usage},
    domain::{
        config::{AgentConfig, namespace_list},
        eligibility::EnablementSelectors,
        overrides::{Existing, duration},
    },
    zds::server,
};

/// Flags and environment of `weir agent`.
#[derive(Clone, Debug, Args)]
pub struct AgentArgs {
    /// Configuration file.
    #[arg(long, env = "WEIR_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The node whose pods are enrolled.
    #[arg(long, env = "NODE_NAME")]
    node_name: Option<String>,
    /// Name of the agent's own pod.
    #[arg(long, env = "POD_NAME")]
    pod_name: Option<String>,
    /// Namespace of the agent's own pod.
    #[arg(long, env = "POD_NAMESPACE")]
    pod_namespace: Option<String>,
    /// Where ztunnel runs.
    #[arg(long, env = "SYSTEM_NAMESPACE")]
    system_namespace: Option<String>,
    /// Namespaces that are never enrolled, with commas between.
    #[arg(long, env = "EXCLUDE_NAMESPACES")]
    exclude_namespaces: Option<String>,
    /// Which pods are in the mesh, as YAML.
    #[arg(long, env = "AMBIENT_ENABLEMENT_SELECTOR", value_name = "YAML", allow_hyphen_values = true)]
    enablement_selectors: Option<String>,
    /// Whether DNS is captured.
    #[arg(long, env = "AMBIENT_DNS_CAPTURE", value_name = "BOOL")]
    dns_capture: Option<bool>,
    /// Access to the API server [default: the pod's service account].
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Where ztunnel connects.
    #[arg(
        long,
        env = "WEIR_ZTUNNEL_SOCKET",
        default_value = "/var/run/ztunnel/ztunnel.sock",
        value_name = "PATH"
    )]
    ztunnel_socket: PathBuf,
    /// Where the CNI plugin connects.
    #[arg(long, env = "WEIR_CNI_SOCKET", default_value = "/run/weir/cni.sock", value_name = "PATH")]
    pub(super) cni_socket: PathBuf,
    /// Where decisions are saved, for the CNI plugin to go by while the agent is down.
    #[arg(long, env = "WEIR_DECISIONS", default_value = "/run/weir/decisions.json", value_name = "FILE")]
    pub(super) decisions: PathBuf,
    /// A user besides root that ztunnel may run as.
    #[arg(long, env = "WEIR_ZTUNNEL_UID", value_name = "UID")]
    ztunnel_uid: Option<u32>,
    /// Whose connections to pods are not captured: `kubelet` for the kubelet's cgroup, `host` for every process in
    /// the host's network namespace, `off`.
    #[arg(long, env = "WEIR_PROBE_EXEMPTION", default_value = "kubelet")]
    probe_exemption: String,
    /// The kubelet's cgroup (v2) [default: looked for].
    #[arg(long, env = "WEIR_KUBELET_CGROUP", value_name = "DIR")]
    kubelet_cgroup: Option<PathBuf>,
    /// What becomes of connections older than the enrolment, where a pod does not say: `keep`, `reset`, or a time.
    #[arg(long, env = "WEIR_EXISTING_CONNECTIONS", default_value = "10m", value_name = "POLICY")]
    existing_connections: String,
    /// How often every enrolled pod is looked at.
    #[arg(long, env = "WEIR_VERIFY_INTERVAL", default_value = "10s", value_name = "TIME")]
    verify_interval: String,
    /// Where metrics are served.
    #[arg(long, env = "WEIR_METRICS_ADDR", default_value = "[::]:15014", value_name = "ADDRESS:PORT")]
    pub(super) metrics_addr: SocketAddr,
    /// Where `/healthz` and `/readyz` are served.
    #[arg(long, env = "WEIR_HEALTH_ADDR", default_value = "[::]:8000", value_name = "ADDRESS:PORT")]
    pub(super) health_addr: SocketAddr,
    /// Where `weir status` and the like ask.
    #[arg(long, env = "WEIR_ADMIN_SOCKET", default_value = crate::cli::ADMIN_SOCKET, value_name = "PATH")]
    pub(super) admin_socket: PathBuf,
    /// Logs as JSON.
    #[arg(long, env = "WEIR_LOG_JSON")]
    pub log_json: bool,
    /// Where things are on this machine.
    #[command(flatten)]
    pub paths: Paths,
}

impl AgentArgs {
    /// File, then environment, then flags.
    ///
    /// # Errors
    /// When the file cannot be read, a value does not parse, or the node's name is missing.
    pub fn config(&self) -> Result<AgentConfig> {
        let usage = |what: String| Usage(what);
        let mut config = match &self.config {
            Some(path) => {
                let text = fs::read_to_string(path)
                    .map_err(|error| usage(format!("{}: {error}", path.display())))?;
                AgentConfig::from_yaml(&text)
                    .map_err(|error| usage(format!("{}: {error}", path.display())))?
            }
            None => AgentConfig::default(),
        };
        if let Some(name) = &self.node_name {
            config.node_name.clone_from(name);
        }
        if let Some(namespace) = &self.system_namespace {
            config.system_namespace.clone_from(namespace);
        }
        if let Some(list) = &self.exclude_namespaces {
            config.exclude_namespaces = namespace_list(list);
        }
        if let Some(yaml) = &self.enablement_selectors {
            config.enablement_selectors = EnablementSelectors::from_yaml(yaml)
                .map_err(|error| usage(format!("--enablement-selectors: {error}")))?;
        }
        if let Some(dns) = self.dns_capture {
            config.dns_capture = dns;
        }
        config.pod_name = self.pod_name.clone().or(config.pod_name);
        config.pod_namespace = self.pod_namespace.clone().or(config.pod_namespace);
        config.check().map_err(|error| usage(error.to_string()))?;
        // Told at once, not when they are first needed.
        self.probes()?;
        self.existing()?;
        self.verify_interval()?;
        Ok(config)
    }

    /// Whose connections are exempt.
    pub(super) fn probes(&self) -> Result<Exempt> {
        match (self.probe_exemption.as_str(), &self.kubelet_cgroup) {
            ("kubelet", Some(cgroup)) => Ok(Exempt::Cgroup(cgroup.clone())),
            ("kubelet", None) => Ok(Exempt::Kubelet),
            ("host", _) => Ok(Exempt::Host),
            ("off", _) => Ok(Exempt::Nobody),
            (other, _) => {
                Err(Usage(format!("--probe-exemption: {other:?} is none of kubelet, host, off")).into())
            }
        }
    }

    /// How often every enrolled pod is looked at.
    pub(super) fn verify_interval(&self) -> Result<Duration> {
        let text = self.verify_interval.as_str();
        let wrong = || Usage(format!("--verify-interval: {text:?} is no time such as 10s or 500ms"));
        Ok(duration(text).filter(|time| !time.is_zero()).ok_or_else(wrong)?)
    }

    /// What becomes of connections older than the enrolment.
    pub(super) fn existing(&self) -> Result<Existing> {
        let wrong = || Usage(format!("--existing-connections: {:?} is no policy", self.existing_connections));
        Ok(Existing::parse(&self.existing_connections).ok_or_else(wrong)?)
    }

    /// Where to listen for ztunnel.
    pub(super) fn zds(&self) -> server::Config {
        server::Config { allowed_uid: self.ztunnel_uid, ..server::Config::new(&self.ztunnel_socket) }
    }

    /// ztunnel tries again by itself in this rhythm, and does not say when it succeeds.
    pub(super) fn nack_backoff(&self) -> Duration {
        Duration::from_secs(5)
    }
}
