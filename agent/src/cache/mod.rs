//! The one cache: what the API server says of this node's pods, decided about as it comes in.
//!
//! [`index`] is the synchronous core, [`pods`] shares it among tasks, [`dirty`] tells subscribers what to
//! look at again. [`members`] is what every ztunnel shall know.
#![forbid(unsafe_code)]

pub mod dirty;
pub mod index;
pub mod members;
pub mod pods;
