//! A deterministic storage and the executor that drives it, floor 1 of the house.
//!
//! A [`SimDisk`] stands where a host file does: it has a volatile cache, takes virtual time, ends
//! operations in any order, fails by plan and shows what a crash would leave behind. [`explore()`]
//! runs random requests against whatever is built on it and checks every possible crash. A seed
//! decides everything, and replays it.
#![forbid(unsafe_code)]

mod clock;
mod config;
mod disk;
mod executor;
mod explore;
mod faults;
mod history;
mod media;
mod model;
mod operation;
mod seeds;
mod state;

pub use clock::Clock;
pub use config::{Config, Latency, Size, Support};
pub use disk::SimDisk;
pub use executor::{Sim, Task};
pub use explore::{
    Devices, Faults, Growth, Left, Patience, Report, Subject, Workload, explore, explore_image,
};
pub use fastrand::Rng;
pub use faults::Fault;
pub use operation::{Operation, OperationKind};
pub use seeds::{Effort, for_seeds};
