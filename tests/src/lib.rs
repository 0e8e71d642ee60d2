//! Test gear.

pub mod ztunnel;
