//! The vhost-user-blk export: a guest's queues straight into the event loops, floor 3 of the house.
//!
//! A front-end (a virtual machine monitor) connects to a socket and shares the guest's memory; from
//! then on the guest's driver and this crate talk through rings in that memory. Nothing here knows an image
//! format or an engine by name: requests become requests for a [`Disk`](blockhouse_disk::Disk).
#![forbid(unsafe_code)]

mod call;
pub mod chain;
mod config;
mod connection;
mod device;
mod dirty_log;
#[cfg(feature = "driver")]
pub mod driver;
mod frontend;
mod inflight;
pub mod limits;
mod listener;
mod lost_memory;
mod messages;
mod queue;
mod registration;
pub mod request;
pub mod ring;
mod server;
mod vring;

pub use device::{Device, Export};
pub use registration::RegisteredMemory;
pub use server::Server;
