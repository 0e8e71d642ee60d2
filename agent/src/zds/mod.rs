//! The socket ztunnel connects to.

#![forbid(unsafe_code)]

pub mod codec;
