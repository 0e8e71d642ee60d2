//! The ZDS server over real sockets, and the set behind it, against peers that act as ztunnel does.

mod members;
mod model;
mod peer;
mod sequences;
mod server;
mod sessions;
