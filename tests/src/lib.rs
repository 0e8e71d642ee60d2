//! Test gear.
