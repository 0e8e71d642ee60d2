//! The CNI plugin's language: what a runtime tells a plugin, what the plugin says to the agent, and what it decides
//! alone. Of the specification (1.1 and older) only what weir needs.

mod config;
pub mod conflist;
mod decisions;
mod environment;
mod message;
pub mod ordered;

pub use config::{AgentDown, NetworkConfig};
pub use decisions::{Decisions, PodId, Verdict};
pub use environment::{Environment, PodArgs, Verb};
pub use message::{Answer, Attachment, MAX_MESSAGE, Request, RequestVerb};
use serde::Serialize;

/// Versions of the specification that are understood. Results are passed through, so all there are.
pub const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// What is spoken where the runtime does not say.
pub const LATEST: &str = "1.1.0";

/// A CNI error, as it is printed for the runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{msg}")]
pub struct CniError {
    /// Version the runtime speaks.
    #[serde(rename = "cniVersion")]
    pub cni_version: String,
    /// One of [`code`].
    pub code: u32,
    /// One line; the kubelet shows it with the pod.
    pub msg: String,
    /// What helps further.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub details: String,
}

impl CniError {
    /// An error; the version is [`LATEST`] until the runtime's is known.
    pub fn new(code: u32, msg: impl Into<String>) -> Self {
        Self { cni_version: LATEST.into(), code, msg: msg.into(), details: String::new() }
    }

    /// The same with details.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }
}

/// Error codes: those of the specification, and ours from 100 on.
pub mod code {
    /// The version is not understood.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// An environment variable is missing or makes no sense.
    pub const INVALID_ENVIRONMENT: u32 = 4;
    /// Reading or writing failed.
    pub const IO_FAILURE: u32 = 5;
    /// What came on standard input is no JSON of the expected form.
    pub const DECODING_FAILURE: u32 = 6;
    /// It is, but cannot be used.
    pub const INVALID_CONFIG: u32 = 7;
    /// Passes by itself: the agent is starting, or away.
    pub const TRY_AGAIN: u32 = 11;
    /// STATUS: no pod can be added now.
    pub const NOT_AVAILABLE: u32 = 50;
    /// The agent could not capture the pod.
    pub const NOT_CAPTURED: u32 = 100;
    /// A defect of the plugin.
    pub const INTERNAL: u32 = 101;
}
