//! Test gear: a node made of network namespaces, real clients and servers in them.

pub mod world;
