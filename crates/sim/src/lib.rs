//! A simulated disk and the executor that runs on its virtual time (layer 1).
//!
//! A [`SimDisk`] implements [`Storage`](blockhouse_core::Storage) in place of a host file. It has a
//! volatile cache, takes virtual time, completes operations in any order, fails as planned, and
//! shows what a crash would leave. [`explore()`] runs random requests against a [`SystemUnderTest`]
//! that is built on it, and checks every possible crash. A seed decides everything, so a seed
//! replays a failure.
//!
//! ```
//! use blockhouse_core::{Buffer, Durability, Storage};
//! use blockhouse_sim::{Config, Sim, SimDisk};
//!
//! let sim = Sim::new(42);
//! let disk = SimDisk::new(&sim, Config::default(), vec![0; 1 << 20]);
//! sim.block_on(async move {
//!     let mut buffer = Buffer::new(4096);
//!     disk.write(0, buffer.lend(), Durability::Data).await?;
//!     disk.read(4096, buffer.lend()).await
//! })?;
//! # Ok::<(), blockhouse_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod capabilities;
mod clock;
mod config;
mod disk;
mod executor;
mod explore;
mod faults;
mod forward;
mod guests;
mod history;
mod media;
mod memory;
mod model;
mod operation;
mod process;
mod report;
mod restarts;
mod seeds;
mod state;
mod system;
mod workload;
mod wrapped;

pub use capabilities::PLAIN_CAPABILITIES;
pub use clock::Clock;
pub use config::{Config, Latency, Size, Support};
pub use disk::SimDisk;
pub use executor::{Sim, Task};
pub use explore::{explore, explore_image};
pub use fastrand::Rng;
pub use faults::Fault;
pub use memory::SimMemory;
pub use operation::{Operation, OperationKind};
pub use report::Report;
pub use restarts::{Host, Service, explore_restarts};
pub use seeds::{SeedSelection, for_seeds, is_looked_at};
pub use system::{ImageState, SystemUnderTest};
pub use workload::{Cancellation, Devices, Faults, Growth, Workload, add_late_operations};
