//! The shared parts of the black-box tests: starting the binary, running foreign tools, and hostile
//! clients.
//!
//! Guarantees: every process that is started here is ended here, also when a test panics; every
//! wait has a limit; a test that this machine cannot run is skipped with a reason on standard
//! error. Of Blockhouse's own crates only a guest's driver and the names of engines are used: the
//! tests see what users see.
#![forbid(unsafe_code)]

mod binary;
pub mod browser;
pub mod ceph;
pub mod control;
mod data;
mod deadline;
pub mod generated;
pub mod guest;
pub mod hostile;
pub mod image_tool;
mod loop_device;
mod matrix;
pub mod metrics;
mod nbd_uri;
pub mod need;
pub mod pki;
mod processor_time;
pub mod qemu_device;
pub mod qmp;
pub mod qmp_schema;
pub mod schema;
mod scratch;
mod server;
pub mod shared_limit;
mod small_host;
pub mod tls12;
mod tool;
mod trace;
pub mod typed;
pub mod upgrade;

pub use binary::{blockhouse, copy_blockhouse};
pub use blockhouse_engine::Engine;
pub use data::{assert_same, model_of_zeros, random_bytes, random_disk, seeded};
pub use deadline::{eventually, seconds_in, wait_for_exit};
pub use lab_nbd as nbd;
pub use loop_device::LoopDevice;
pub use matrix::Cache;
pub use nbd_uri::nbd_uri;
pub use processor_time::processor_time;
pub use scratch::{Image, Scratch};
pub use server::{Refusal, Serve, Server};
pub use small_host::{FileSystem, SmallHost};
pub use tool::{Outcome, run, run_within, tool};
pub use trace::{Call, Trace};
