//! The Kubernetes API: what weir reads from it, and the little it writes.
//!
//! [`run`] keeps the cache filled. [`annotate`] and [`events`] write. [`client`] connects. Nothing here
//! decides anything.
#![forbid(unsafe_code)]

pub mod annotate;
pub mod client;
pub mod events;
pub mod lookup;
mod rate;
pub mod watch;
pub mod wire;

pub use watch::run;
