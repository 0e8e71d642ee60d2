//! Labels and annotations weir reads or writes, each spelled once.

/// Written by the agent: see [`super::workload::Redirection`].
pub const REDIRECTION: &str = "ambient.istio.io/redirection";

/// `ambient` or `none`, on pods and namespaces. Named here for the default selectors only.
pub const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

/// Present, whatever its value, on a pod that has a sidecar.
pub const SIDECAR_STATUS: &str = "sidecar.istio.io/status";

/// What tells ztunnel's pods from the others of the system namespace.
pub const ZTUNNEL_APP: (&str, &str) = ("app", "ztunnel");

/// What tells weir's pods from the others of its namespace.
pub const OWN_APP: (&str, &str) = ("app.kubernetes.io/name", "weir");

/// Istio's: connections from outside reach the app directly.
pub const BYPASS_INBOUND: &str = "ambient.istio.io/bypass-inbound-capture";
/// Istio's: DNS goes to ztunnel.
pub const DNS_CAPTURE: &str = "ambient.istio.io/dns-capture";
/// Istio's: interfaces whose arriving TCP is the pod's own outbound traffic.
pub const REROUTE: &str = "istio.io/reroute-virtual-interfaces";
/// Ours: ports of the pod that are reached directly.
pub const EXCLUDE_INBOUND_PORTS: &str = "weir.dev/exclude-inbound-ports";
/// Ours: remote ports that are reached directly.
pub const EXCLUDE_OUTBOUND_PORTS: &str = "weir.dev/exclude-outbound-ports";
/// Ours: remote networks that are reached directly.
pub const EXCLUDE_OUTBOUND_CIDRS: &str = "weir.dev/exclude-outbound-cidrs";
/// Ours: what becomes of connections older than the enrolment.
pub const EXISTING_CONNECTIONS: &str = "weir.dev/existing-connections";

/// Annotations a pod is stored with. All others are dropped as soon as they are read.
pub const ANNOTATIONS_READ: [&str; 8] = [
    SIDECAR_STATUS,
    BYPASS_INBOUND,
    DNS_CAPTURE,
    REROUTE,
    EXCLUDE_INBOUND_PORTS,
    EXCLUDE_OUTBOUND_PORTS,
    EXCLUDE_OUTBOUND_CIDRS,
    EXISTING_CONNECTIONS,
];
