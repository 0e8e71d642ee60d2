//! weir: the node agent of an Istio ambient mesh, with an eBPF data path.
//!
//! Rooms, from the ground up (arrows point down only, see `docs/architecture.md`):
//!
//! | layer | rooms |
//! |---|---|
//! | entry | `bin/weir.rs`, [`cli`] |
//! | drive | [`reconcile`] |
//! | shells | [`kube`], [`zds`], [`redirect`] |
//! | cache | [`cache`] |
//! | ground | [`kernel`], [`netns`] |
//! | domain | [`domain`]: no I/O, no unsafe, no Kubernetes client |

pub mod cache;
pub mod domain;
pub mod zds;
