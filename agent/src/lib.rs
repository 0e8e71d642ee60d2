//! weir: the node agent of an Istio ambient mesh, with an eBPF data path.
//!
//! Rooms, from the ground up (arrows point down only, see `docs/architecture.md`):
//!
//! | layer | rooms |
//! |---|---|
//! | entry | `bin/weir.rs`, [`cli`] |
//! | drive | [`reconcile`], [`admin`] |
//! | shells | [`cni`], [`kube`], [`zds`], [`redirect`] |
//! | cache | [`cache`] |
//! | ground | [`kernel`], [`netns`] |
//! | domain | [`domain`]: no I/O, no unsafe, no Kubernetes client |

pub mod admin;
pub mod cache;
pub mod cli;
pub mod cni;
pub mod domain;
pub mod kernel;
pub mod kube;
pub mod listen;
pub mod netns;
pub mod node;
pub mod preflight;
pub mod reconcile;
pub mod redirect;
pub mod work;
pub mod zds;
