//! Makes what the node does match what the cache says: one state machine per pod, many pods at once.
//!
//! [`ports`] is what it drives, [`queue`] decides whose turn it is, [`worker`] takes one pod as far as it
//! gets, [`view`] shows where each pod stands, [`fault`] makes steps fail for tests. [`driver`] ties them
//! together.
#![forbid(unsafe_code)]

pub mod driver;
pub mod fault;
pub mod ports;
pub mod queue;
pub mod view;
mod worker;

pub use driver::{Handle, Reconciler};
pub use ports::{Annotated, Annotator, DataPath, Netns, Published, Recovered, SwitchedOn, Ztunnel, blocking};
