//! The socket ztunnel connects to: [`server`] accepts, [`session`] speaks, [`codec`] spells.
//!
//! What is said follows from [`crate::cache::members`] alone; nothing in here remembers anything between
//! two connections.

#![forbid(unsafe_code)]

pub mod codec;
pub mod counters;
pub mod server;
pub mod session;
