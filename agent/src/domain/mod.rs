//! The pure core: what pods are, which of them belong to the mesh, and why.
#![forbid(unsafe_code)]

pub mod cni;
pub mod config;
pub mod eligibility;
pub mod enrolment;
pub mod names;
pub mod notice;
pub mod overrides;
pub mod reason;
pub mod record;
pub mod remedy;
pub mod report;
pub mod selector;
pub mod workload;
pub mod yaml;
