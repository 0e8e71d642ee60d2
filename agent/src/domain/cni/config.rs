//! The network configuration that comes on standard input.

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Attachment, CniError, LATEST, PodArgs, VERSIONS, code, ordered::Json};

/// Our entry of the list, as the runtime hands it over. Keys of others are left alone.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// Version the runtime speaks.
    #[serde(default)]
    pub cni_version: String,
    /// Name of the network.
    #[serde(default)]
    pub name: String,
    /// What the plugins before us made.
    pub prev_result: Option<Json>,
    /// GC: all attachments of this network that there are.
    #[serde(rename = "cni.dev/valid-attachments", default)]
    pub valid_attachments: Vec<Attachment>,
    /// Where the agent listens.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// The agent's last table of decisions.
    #[serde(default = "default_decisions")]
    pub decisions: PathBuf,
    /// Where the plugin logs; not at all when empty.
    #[serde(default)]
    pub log_file: PathBuf,
    /// What decides while the agent cannot be asked.
    #[serde(default)]
    pub agent_down: AgentDown,
    /// Namespaces that are never in the mesh.
    #[serde(default)]
    pub exclude_namespaces: BTreeSet<String>,
    /// Where the agent's own pods are.
    #[serde(default)]
    pub own_namespace: String,
    /// What their names begin with.
    #[serde(default = "default_own_pods")]
    pub own_pods: String,
    /// Whether STATUS fails while the agent cannot enrol.
    #[serde(default = "yes")]
    pub status_follows_agent: bool,
}

/// What decides while the agent cannot be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentDown {
    /// Its last table.
    #[default]
    Table,
    /// No pod starts.
    Fail,
    /// Every pod starts; those of the mesh outside of it.
    Pass,
}

fn default_socket() -> PathBuf {
    "/run/weir/cni.sock".into()
}

fn default_decisions() -> PathBuf {
    "/run/weir/decisions.json".into()
}

fn default_own_pods() -> String {
    "weir-".into()
}

fn yes() -> bool {
    true
}

impl NetworkConfig {
    /// Reads it.
    ///
    /// # Errors
    /// When it is not JSON, or not of this form, or of a version that is not known.
    pub fn read(stdin: &str) -> Result<Self, CniError> {
        let mut config: Self = serde_json::from_str(stdin).map_err(|error| {
            CniError::new(code::DECODING_FAILURE, "weir: the network configuration cannot be read")
                .with_details(error.to_string())
        })?;
        if config.cni_version.is_empty() {
            // The specification's word for a configuration without one.
            config.cni_version = "0.1.0".into();
        }
        if !VERSIONS.contains(&config.cni_version.as_str()) {
            let msg = format!("weir: CNI version {:?} is not known, up to {LATEST} is", config.cni_version);
            return Err(CniError::new(code::INCOMPATIBLE_VERSION, msg));
        }
        if config.prev_result.as_ref().is_some_and(|result| !matches!(result, Json::Object(_))) {
            let error = CniError::new(code::INVALID_CONFIG, "weir: prevResult is no object");
            return Err(CniError { cni_version: config.cni_version, ..error });
        }
        Ok(config)
    }

    /// What ADD prints: the result of those before us, unchanged.
    pub fn result(&self) -> Json {
        let empty = || Json::Object(vec![("cniVersion".into(), Json::text(&self.cni_version))]);
        self.prev_result.clone().unwrap_or_else(empty)
    }

    /// Why a pod passes without anybody being asked, if it does.
    pub fn exempt(&self, pod: &PodArgs) -> Option<&'static str> {
        let own = !self.own_namespace.is_empty() && pod.namespace == self.own_namespace;
        if pod.name.is_empty() || pod.namespace.is_empty() {
            Some("not a pod")
        } else if own && !self.own_pods.is_empty() && pod.name.starts_with(&self.own_pods) {
            Some("weir's own pod")
        } else if self.exclude_namespaces.contains(&pod.namespace) {
            Some("excluded namespace")
        } else {
            None
        }
    }

    /// The container's addresses, in every form a result has had. Those of interfaces on the host's side are not.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let Ok(result) = serde_json::to_value(&self.prev_result) else { return Vec::new() };
        let interfaces = result["interfaces"].as_array();
        let inside = |ip: &Value| {
            let index = ip["interface"].as_u64().and_then(|index| usize::try_from(index).ok());
            let interface = index.and_then(|index| interfaces?.get(index));
            interface
                .is_none_or(|interface| interface["sandbox"].as_str().is_some_and(|path| !path.is_empty()))
        };
        let ips = result["ips"].as_array().into_iter().flatten().filter(|ip| inside(ip));
        let new = ips.map(|ip| &ip["address"]);
        // Before 0.3.0.
        let old = ["ip4", "ip6"].into_iter().map(|family| &result[family]["ip"]);
        let parse = |address: &Value| address.as_str()?.split('/').next()?.parse().ok();
        new.chain(old).filter_map(parse).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(config: &Value) -> NetworkConfig {
        NetworkConfig::read(&config.to_string()).unwrap()
    }

    #[test]
    fn defaults_hold_where_nothing_is_said() {
        let it = read(&json!({ "cniVersion": "1.0.0", "name": "n", "type": "weir-cni", "ipam": {} }));
        assert_eq!((it.socket, it.agent_down), (default_socket(), AgentDown::Table));
        assert_eq!(NetworkConfig::read("{}").unwrap().cni_version, "0.1.0");
    }

    #[test]
    fn what_cannot_be_used_has_a_code() {
        for (text, wanted) in [
            ("", code::DECODING_FAILURE),
            ("{", code::DECODING_FAILURE),
            ("[]", code::DECODING_FAILURE),
            ("null", code::DECODING_FAILURE),
            (r#"{"cniVersion": 1}"#, code::DECODING_FAILURE),
            (r#"{"cniVersion": "1.0.0", "agentDown": "maybe"}"#, code::DECODING_FAILURE),
            (r#"{"cniVersion": "2.0.0"}"#, code::INCOMPATIBLE_VERSION),
            (r#"{"cniVersion": "1.0.0", "prevResult": 7}"#, code::INVALID_CONFIG),
        ] {
            assert_eq!(NetworkConfig::read(text).unwrap_err().code, wanted, "{text}");
        }
    }

    #[test]
    fn results_of_every_version_pass_unchanged_and_are_understood() {
        let both: Vec<IpAddr> = ["10.0.0.2", "fd00::2"].map(|ip| ip.parse().unwrap()).to_vec();
        for (result, addresses) in [
            (
                json!({ "cniVersion": "0.2.0", "ip4": { "ip": "10.0.0.2/24" }, "ip6": { "ip": "fd00::2/64" } }),
                both.clone(),
            ),
            (
                json!({ "cniVersion": "0.3.1", "ips": [
                    { "version": "4", "address": "10.0.0.2/24" }, { "version": "6", "address": "fd00::2/64" } ] }),
                both.clone(),
            ),
            (
                json!({ "cniVersion": "1.1.0",
                    "interfaces": [{ "name": "br0" }, { "name": "eth0", "sandbox": "/run/netns/a", "mtu": 1500 }],
                    "ips": [{ "address": "10.9.9.9/24", "interface": 0 }, { "address": "10.0.0.2/24", "interface": 1 },
                            { "address": "fd00::2/64" }, { "address": "nonsense" }, { "address": 4 }, 7],
                    "x": { "y": [1, 2.5, null] } }),
                both,
            ),
            (json!({ "cniVersion": "1.0.0", "ips": 3, "interfaces": "x" }), vec![]),
            (json!({}), vec![]),
        ] {
            let it = read(&json!({ "cniVersion": "1.0.0", "prevResult": result }));
            assert_eq!(it.addresses(), addresses, "{result}");
            assert_eq!(serde_json::to_value(it.result()).unwrap(), result);
        }
        // In the order the keys came in.
        let text = r#"{"z":[],"cniVersion":"1.0.0","a":1}"#;
        let it = NetworkConfig::read(&format!(r#"{{"cniVersion":"1.0.0","prevResult":{text}}}"#)).unwrap();
        assert_eq!(serde_json::to_string(&it.result()).unwrap(), text);
        let none = read(&json!({ "cniVersion": "0.4.0" })).result();
        assert_eq!(serde_json::to_string(&none).unwrap(), r#"{"cniVersion":"0.4.0"}"#);
    }

    #[test]
    fn who_passes_without_asking() {
        let it = read(
            &json!({ "cniVersion": "1.0.0", "ownNamespace": "weir", "excludeNamespaces": ["kube-system"] }),
        );
        let pod = |namespace: &str, name: &str| PodArgs {
            namespace: namespace.into(),
            name: name.into(),
            ..PodArgs::default()
        };
        for (namespace, name, passes) in [
            ("weir", "weir-x7f", true),
            ("weir", "other", false),
            ("shop", "weir-x7f", false),
            ("kube-system", "dns", true),
            ("", "", true),
            ("shop", "a", false),
        ] {
            assert_eq!(it.exempt(&pod(namespace, name)).is_some(), passes, "{namespace}/{name}");
        }
        // Without its own namespace configured nobody is the agent.
        assert!(read(&json!({ "cniVersion": "1.0.0" })).exempt(&pod("", "weir-x")).is_some());
        assert!(read(&json!({ "cniVersion": "1.0.0" })).exempt(&pod("weir", "weir-x")).is_none());
    }
}
