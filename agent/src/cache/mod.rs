//! What the agent holds true, shared by everything that acts on it. No I/O, and no lock held across any.

#![forbid(unsafe_code)]

pub mod members;
