//! Every interleaving of the threads that share a primitive, by loom.
//!
//! The files of these primitives are compiled here a second time, with `cfg(loom)`: it replaces the
//! atomics and mutexes by loom's. Each file has its model at its end, in `loom_model`.
#![forbid(unsafe_code)]
#![cfg(test)]
// The models use only a part of each primitive.
#![allow(dead_code, unused_imports)]

#[path = "../../../crates/engine/src/driver/mailbox.rs"]
mod mailbox;
#[path = "../../../crates/engine/src/driver/queued_flag.rs"]
mod queued_flag;
mod sync;
