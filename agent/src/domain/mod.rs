//! The pure core: what pods are, which of them belong to the mesh, and why.

pub mod record;
pub mod workload;
