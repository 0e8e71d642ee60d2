//! What plugin and agent say to each other: one JSON request, with the namespace's descriptor where there is one, and
//! one JSON answer.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::PodId;
use crate::domain::reason::Reason;

/// Longest message: a GC that names a thousand containers, and more than fits into a socket's buffer by default.
pub const MAX_MESSAGE: usize = 128 * 1024;

/// What the plugin asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// What for.
    pub verb: RequestVerb,
    /// Name of the network: a pod may have several.
    #[serde(default)]
    pub network: String,
    /// Container and interface.
    #[serde(default)]
    pub attachment: Attachment,
    /// The pod.
    #[serde(default)]
    pub pod: PodId,
    /// What the plugins before gave it.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// GC: attachments of this network that there are.
    #[serde(default)]
    pub valid: Vec<Attachment>,
}

/// The verbs the agent is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestVerb {
    /// Capture the pod, if it belongs to the mesh.
    Add,
    /// Let go of it.
    Del,
    /// Is it captured, if it has to be?
    Check,
    /// Can pods be enrolled?
    Status,
    /// Let go of all others.
    Gc,
}

/// One interface of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attachment {
    /// The container: a pod's sandbox.
    #[serde(rename = "containerID")]
    pub container: String,
    /// The interface.
    pub ifname: String,
}

/// What the agent answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Answer {
    /// The pod does not belong to the mesh.
    Pass {
        /// Why.
        reason: Reason,
    },
    /// It does, and is captured and acknowledged.
    Captured,
    /// Done; nothing to say.
    Done,
    /// It does, and is not captured.
    Failed {
        /// The step that failed or was not reached.
        step: String,
        /// What kept it.
        reason: Reason,
        /// The particulars.
        detail: String,
    },
    /// The agent cannot decide yet.
    Unready {
        /// What is missing.
        detail: String,
    },
    /// The request makes no sense.
    Refused {
        /// Why.
        detail: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_the_documented_json() {
        let request: Request = serde_json::from_str(
            r#"{"verb":"add","network":"n","attachment":{"containerID":"c","ifname":"eth0"},
                "pod":{"namespace":"shop","name":"a","uid":"u"},"addresses":["10.0.0.1","fd00::1"]}"#,
        )
        .unwrap();
        assert_eq!((request.verb, request.addresses.len()), (RequestVerb::Add, 2));
        let failed =
            Answer::Failed { step: "publish".into(), reason: Reason::NoZtunnel, detail: "none".into() };
        let text = serde_json::to_string(&failed).unwrap();
        assert_eq!(text, r#"{"outcome":"failed","step":"publish","reason":"no_ztunnel","detail":"none"}"#);
        assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), failed);
        for text in ["", "{}", r#"{"verb":"drop"}"#, r#"{"verb":"add","addresses":["x"]}"#, "[]"] {
            assert!(serde_json::from_str::<Request>(text).is_err(), "{text}");
        }
    }
}
