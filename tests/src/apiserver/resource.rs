//! The kinds the server knows, and which kind a URL path speaks of.

/// A kind served, as one API group and version serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// `v1` Pod.
    Pods,
    /// `v1` Namespace.
    Namespaces,
    /// `v1` Node.
    Nodes,
    /// `events.k8s.io/v1` Event: the form events are stored in.
    Events,
    /// `v1` Event: the same objects as [`Resource::Events`], in the older form.
    CoreEvents,
}

/// How many tables the store has: both forms of events share one.
pub(super) const TABLES: usize = 4;

impl Resource {
    /// Name in URLs, in metrics and in error messages.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Namespaces => "namespaces",
            Self::Nodes => "nodes",
            Self::Events | Self::CoreEvents => "events",
        }
    }

    /// `kind` of one object.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Pods => "Pod",
            Self::Namespaces => "Namespace",
            Self::Nodes => "Node",
            Self::Events | Self::CoreEvents => "Event",
        }
    }

    /// `apiVersion` of one object.
    pub fn api_version(self) -> &'static str {
        if self == Self::Events { "events.k8s.io/v1" } else { "v1" }
    }

    /// API group, empty for the core group.
    pub fn group(self) -> &'static str {
        if self == Self::Events { "events.k8s.io" } else { "" }
    }

    /// Do its objects live in namespaces?
    pub fn namespaced(self) -> bool {
        !matches!(self, Self::Namespaces | Self::Nodes)
    }

    /// Does it have `/status`?
    pub fn has_status(self) -> bool {
        !matches!(self, Self::Events | Self::CoreEvents)
    }

    /// The fields a `fieldSelector` may name.
    pub(super) fn selectable(self, field: &str) -> bool {
        match field {
            "metadata.name" => true,
            "metadata.namespace" => self.namespaced(),
            "spec.nodeName" => self == Self::Pods,
            "status.phase" => matches!(self, Self::Pods | Self::Namespaces),
            _ => false,
        }
    }

    pub(super) fn table(self) -> usize {
        match self {
            Self::Pods => 0,
            Self::Namespaces => 1,
            Self::Nodes => 2,
            Self::Events | Self::CoreEvents => 3,
        }
    }
}

/// What a URL path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub resource: Resource,
    /// Of a namespaced kind: absent means all namespaces.
    pub namespace: Option<String>,
    /// Absent for a collection.
    pub name: Option<String>,
    /// The path ends in `/status`.
    pub status: bool,
}

impl Route {
    pub(super) fn parse(path: &str) -> Option<Self> {
        let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
        if segments.iter().any(|segment| segment.is_empty()) {
            return None;
        }
        let (group, rest) = match segments.as_slice() {
            ["api", "v1", rest @ ..] => ("", rest),
            ["apis", "events.k8s.io", "v1", rest @ ..] => ("events.k8s.io", rest),
            _ => return None,
        };
        let kind = |plural: &str| match (group, plural) {
            ("", "pods") => Some(Resource::Pods),
            ("", "namespaces") => Some(Resource::Namespaces),
            ("", "nodes") => Some(Resource::Nodes),
            ("", "events") => Some(Resource::CoreEvents),
            ("events.k8s.io", "events") => Some(Resource::Events),
            _ => None,
        };
        // `namespaces/a/pods` is pods in a, `namespaces/a/status` is a itself.
        let (namespace, rest) = match rest {
            ["namespaces", namespace, plural, ..] if *plural != "status" => (Some(*namespace), &rest[2..]),
            _ => (None, rest),
        };
        let (plural, name, status) = match rest {
            [plural] => (*plural, None, false),
            [plural, name] => (*plural, Some(*name), false),
            [plural, name, "status"] => (*plural, Some(*name), true),
            _ => return None,
        };
        let resource = kind(plural)?;
        let addressed =
            if resource.namespaced() { name.is_none() || namespace.is_some() } else { namespace.is_none() };
        if !addressed || (status && !resource.has_status()) {
            return None;
        }
        Some(Self { resource, namespace: namespace.map(Into::into), name: name.map(Into::into), status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        use Resource::*;
        type Parts = (Resource, Option<&'static str>, Option<&'static str>, bool);
        let table: &[(&str, Option<Parts>)] = &[
            ("/api/v1/pods", Some((Pods, None, None, false))),
            ("/api/v1/namespaces/a/pods", Some((Pods, Some("a"), None, false))),
            ("/api/v1/namespaces/a/pods/b", Some((Pods, Some("a"), Some("b"), false))),
            ("/api/v1/namespaces/a/pods/b/status", Some((Pods, Some("a"), Some("b"), true))),
            ("/api/v1/namespaces", Some((Namespaces, None, None, false))),
            ("/api/v1/namespaces/a", Some((Namespaces, None, Some("a"), false))),
            ("/api/v1/namespaces/a/status", Some((Namespaces, None, Some("a"), true))),
            // A namespace may be called after a kind.
            ("/api/v1/namespaces/pods", Some((Namespaces, None, Some("pods"), false))),
            ("/api/v1/nodes/n", Some((Nodes, None, Some("n"), false))),
            ("/api/v1/namespaces/a/events", Some((CoreEvents, Some("a"), None, false))),
            ("/apis/events.k8s.io/v1/namespaces/a/events/e", Some((Events, Some("a"), Some("e"), false))),
            // Not addressable: a pod outside a namespace, a node inside one.
            ("/api/v1/pods/b", None),
            ("/api/v1/namespaces/a/nodes/n", None),
            ("/apis/events.k8s.io/v1/namespaces/a/events/e/status", None),
            ("/apis/events.k8s.io/v1/pods", None),
            ("/api/v1/services", None),
            ("/api/v1/namespaces/a/pods/b/exec", None),
            ("/api/v1/namespaces//pods", None),
            ("/apis/apps/v1/deployments", None),
            ("/", None),
        ];
        for (path, want) in table {
            let want = want.map(|(resource, namespace, name, status)| Route {
                resource,
                namespace: namespace.map(Into::into),
                name: name.map(Into::into),
                status,
            });
            assert_eq!(Route::parse(path), want, "{path}");
        }
    }
}
