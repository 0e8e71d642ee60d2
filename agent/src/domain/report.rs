//! What the agent tells of itself and its pods on its admin socket.

use serde::{Deserialize, Serialize};

use super::{
    enrolment::State,
    reason::{Failure, Reason},
};

/// The node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Version of the agent.
    pub version: String,
    /// The node.
    pub node: String,
    /// What the agent waits for before it is ready; empty when it is.
    pub missing: Vec<String>,
    /// The ztunnels that are connected, the oldest first.
    pub ztunnels: Vec<ZtunnelReport>,
    /// Every pod of the node, also those outside the mesh.
    pub pods: Vec<PodReport>,
}

/// A ztunnel's connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZtunnelReport {
    /// Number of the connection.
    pub session: u64,
    /// Its process, where the agent can see it.
    pub pid: Option<i32>,
    /// New pods are given to this one.
    pub newest: bool,
    /// It has acknowledged its snapshot.
    pub snapshot_done: bool,
    /// Pods it has acknowledged.
    pub acked: usize,
    /// UIDs of the pods it refuses, with its words.
    pub refused: Vec<(String, String)>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodReport {
    /// UID.
    pub uid: String,
    /// Namespace; absent for a pod left by an earlier agent that no longer exists.
    pub namespace: Option<String>,
    /// Name.
    pub name: Option<String>,
    /// Where it stands.
    pub state: State,
    /// Why.
    pub reason: Reason,
    /// In this state since, RFC 3339.
    pub since: String,
    /// What the last attempt failed with.
    pub error: Option<Failure>,
    /// Attempts failed in a row.
    pub failed_attempts: u32,
    /// A step that takes unusually long.
    pub slow: Option<String>,
    /// The ztunnel that took the pod.
    pub acked_by: Option<String>,
}

/// Seconds since the epoch, as RFC 3339.
pub fn rfc3339(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    time.map_or_else(String::new, |time| time.to_string())
}
