//! ublk (layer 4): a disk as a block device of this host's kernel, `/dev/ublkbN`.
//!
//! The kernel's driver (`ublk_drv`) hands requests to this process by completions of io_uring, and
//! copies their data from and to its memory. A [`PreparedDevice`] has been made, or is one whose
//! server was killed or hands it over; a [`Server`] serves it until it is stopped. Each of its
//! queues is served by one loop, whose ring carries the driver's commands and the I/O of the
//! image alike.
//!
//! Nothing here knows an image format or an engine: requests become requests for a
//! [`Disk`](blockhouse_disk::Disk).
//!
//! From the bottom up, each uses only what is above it in this list:
//!
//! - `error`: what fails, and what to do
//! - `parameters`: what the block device is like, for a disk
//! - `request`: from a descriptor to a request
//! - `process_files`: which devices a process serves, and whether that is all
//! - `lifecycle`: which commands follow which, until a device takes requests: a new one, or one
//!   that goes on
//! - `removal`: the end of a device from outside of its server
//! - `gate`: what holds requests back while another process takes the device over
//! - `queue`: the requests of a queue
//! - `unexpected_end`: the call when another process removes the device
//! - `server`: a device from its start to its end
#![forbid(unsafe_code)]

mod error;
mod gate;
mod lifecycle;
mod parameters;
mod process_files;
mod queue;
mod removal;
mod request;
mod server;
mod unexpected_end;

pub use error::Error;
pub use removal::{Detach, detach};
pub use server::{DeviceOptions, HandedOverDevice, PreparedDevice, Server, check_driver};
