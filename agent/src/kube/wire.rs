//! A pod as it comes over the wire, reduced to what weir reads while it is being decoded.
//!
//! Decoding less than a whole `Pod` keeps memory low during lists, and a field that this version of weir
//! does not know cannot break the watch.

use std::{borrow::Cow, collections::BTreeMap, net::IpAddr};

use k8s_openapi::{
    NamespaceResourceScope, Resource as _, api::core::v1 as core,
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Resource;
use serde::Deserialize;

use crate::domain::{
    names,
    workload::{Pod, PodUid, Redirection, WorkloadInfo},
};

/// The fields of a pod that are read.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct WirePod {
    /// Metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    spec: Option<WireSpec>,
    status: Option<WireStatus>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireSpec {
    host_network: Option<bool>,
    service_account_name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireStatus {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<WireIp>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct WireIp {
    ip: Option<String>,
}

impl Resource for WirePod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        core::Pod::KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        core::Pod::GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        core::Pod::VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        core::Pod::URL_PATH_SEGMENT.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl WirePod {
    /// The pod as weir keeps it. `None` for an object without UID, name or namespace: the API server does
    /// not send such a thing.
    pub fn into_pod(self) -> Option<Pod> {
        let Self { metadata, spec, status } = self;
        let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
        let version = version(&metadata);
        let annotations = metadata.annotations.unwrap_or_default();
        Some(Pod {
            uid: PodUid::from(metadata.uid?.as_str()),
            info: WorkloadInfo {
                name: metadata.name?,
                namespace: metadata.namespace?,
                service_account: spec
                    .service_account_name
                    .filter(|name| !name.is_empty())
                    .unwrap_or_else(|| "default".into()),
            },
            labels: metadata.labels.unwrap_or_default(),
            redirection: annotations.get(names::REDIRECTION).map(|value| redirection(value)),
            annotations: annotations_read(annotations),
            host_network: spec.host_network.unwrap_or_default(),
            terminal: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            ips: status.ips(),
            version,
        })
    }
}

/// The version as a number, which for the API server's own objects it is. Without one an object is older
/// than any other.
pub(super) fn version(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// Anything but `enabled` counts as `pending`: it is not true, and it has to be replaced or removed.
fn redirection(value: &str) -> Redirection {
    if value == Redirection::Enabled.as_str() { Redirection::Enabled } else { Redirection::Pending }
}

fn annotations_read(mut annotations: BTreeMap<String, String>) -> BTreeMap<String, String> {
    annotations.retain(|key, _| names::ANNOTATIONS_READ.contains(&key.as_str()));
    // Long, and only its presence matters.
    if let Some(status) = annotations.get_mut(names::SIDECAR_STATUS) {
        *status = String::new();
    }
    annotations
}

impl WireStatus {
    /// `podIPs`, or `podIP` where that is all there is. What is no address is no address of the pod.
    fn ips(self) -> Vec<IpAddr> {
        let several = self.pod_ips.unwrap_or_default().into_iter().filter_map(|it| it.ip);
        let mut ips: Vec<IpAddr> = several.filter_map(|ip| read_ip(&ip)).collect();
        if ips.is_empty() {
            ips.extend(self.pod_ip.as_deref().and_then(read_ip));
        }
        ips
    }
}

fn read_ip(text: &str) -> Option<IpAddr> {
    text.parse().map(|ip: IpAddr| ip.to_canonical()).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(spec: Value, status: Value) -> Pod {
        let wire = json!({
            "metadata": {
                "uid": "u", "name": "p", "namespace": "ns", "resourceVersion": "1234",
                "managedFields": [{"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}],
                "labels": {"a": "b"},
                "annotations": {
                    "sidecar.istio.io/status": "{\"initContainers\": []}",
                    "ambient.istio.io/dns-capture": "false",
                    "kubectl.kubernetes.io/last-applied-configuration": "long",
                },
            },
            "spec": spec,
            "status": status,
        });
        serde_json::from_value::<WirePod>(wire).unwrap().into_pod().unwrap()
    }

    #[test]
    fn what_is_not_needed_is_dropped() {
        let pod = read(json!({"containers": [{"name": "c"}]}), json!({}));
        assert_eq!(pod.labels, BTreeMap::from([("a".into(), "b".into())]));
        let kept = [("sidecar.istio.io/status", ""), ("ambient.istio.io/dns-capture", "false")];
        assert_eq!(pod.annotations, kept.map(|(k, v)| (k.into(), v.into())).into());
    }

    #[test]
    fn defaults() {
        let pod = read(Value::Null, Value::Null);
        assert_eq!((pod.info.service_account.as_str(), pod.version), ("default", 1234));
        assert!(pod.ips.is_empty() && !pod.host_network && !pod.terminal && pod.redirection.is_none());
    }

    #[test]
    fn spec_and_phase() {
        let pod = read(json!({"hostNetwork": true, "serviceAccountName": "sa"}), json!({"phase": "Running"}));
        assert_eq!((pod.info.service_account.as_str(), pod.host_network, pod.terminal), ("sa", true, false));
        for (phase, terminal) in
            [("Pending", false), ("Succeeded", true), ("Failed", true), ("Unknown", false), ("", false)]
        {
            assert_eq!(read(json!({}), json!({"phase": phase})).terminal, terminal, "{phase}");
        }
    }

    #[test]
    fn addresses() {
        for (status, expected) in [
            (json!({"podIP": "10.0.0.1"}), &["10.0.0.1"][..]),
            (json!({"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]}), &["10.0.0.1", "fd00::1"]),
            (json!({"podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.1"}]}), &["10.0.0.1"]),
            (json!({"podIP": "", "podIPs": []}), &[]),
            (json!({"podIPs": [{"ip": "::ffff:10.0.0.1"}]}), &["10.0.0.1"]),
            (json!({"podIP": "garbage"}), &[]),
            (json!({"podIPs": [{}, {"ip": "garbage"}, {"ip": "fd00::1"}]}), &["fd00::1"]),
        ] {
            let expected: Vec<IpAddr> = expected.iter().map(|ip| ip.parse().unwrap()).collect();
            assert_eq!(read(json!({}), status.clone()).ips, expected, "{status}");
        }
    }

    #[test]
    fn values_of_the_annotation() {
        for (value, expected) in [
            ("enabled", Redirection::Enabled),
            ("pending", Redirection::Pending),
            ("disabled", Redirection::Pending),
            ("", Redirection::Pending),
        ] {
            assert_eq!(redirection(value), expected, "{value:?}");
        }
    }

    #[test]
    fn an_object_without_identity_is_no_pod() {
        let wire: WirePod = serde_json::from_value(json!({"metadata": {"name": "p"}})).unwrap();
        assert_eq!(wire.into_pod(), None);
    }
}
