//! The CNI plugin, both ends: no pod of the mesh starts outside of it.
//!
//! [`plugin`] is what the runtime starts for every pod. It hands the pod's namespace to [`server`] in the agent, where
//! [`requests`] answers when the pod is captured. [`handed`] is what was handed over and holds; [`decisions`] saves what the plugin
//! goes by while there is no agent, [`install`] puts it on the node.
#![forbid(unsafe_code)]

pub mod decisions;
pub mod find;
pub mod handed;
pub mod install;
pub mod plugin;
pub mod requests;
pub mod server;
