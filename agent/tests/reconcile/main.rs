//! The reconciler over fakes: no kernel, no socket, no API server, and a clock moved by hand.

mod faults;
mod flow;
mod node;
mod property;
mod rig;
mod world;
