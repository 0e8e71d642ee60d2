//! Test gear: a node made of network namespaces with real clients and servers in them, a stand-in ztunnel, a
//! Kubernetes API server.

pub mod apiserver;
pub mod app;
pub mod bench;
pub mod cluster;
pub mod cni;
pub mod dns_client;
pub mod istio;
pub mod load;
pub mod mesh_node;
pub mod meshed;
pub mod observer;
pub mod one_pod;
pub mod rapid;
pub mod sockets;
pub mod world;
pub mod ztunnel;
