//! The stand-in ztunnel itself: what other tests rest on has to be right first. As root.
#![cfg(feature = "root")]

mod agent;
mod misbehaviour;
mod net;
mod standalone;
