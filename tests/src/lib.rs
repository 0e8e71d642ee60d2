//! Test gear.

pub mod apiserver;
