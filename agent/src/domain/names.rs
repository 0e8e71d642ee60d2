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

/// Annotations a pod is stored with. All others are dropped as soon as they are read.
pub const ANNOTATIONS_READ: [&str; 8] = [
    SIDECAR_STATUS,
    "ambient.istio.io/bypass-inbound-capture",
    "ambient.istio.io/dns-capture",
    "istio.io/reroute-virtual-interfaces",
    "weir.dev/exclude-inbound-ports",
    "weir.dev/exclude-outbound-ports",
    "weir.dev/exclude-outbound-cidrs",
    "weir.dev/existing-connections",
];
