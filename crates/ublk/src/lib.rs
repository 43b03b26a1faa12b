//! ublk (layer 4): a disk as a block device of this host's kernel, `/dev/ublkbN`.
//!
//! The kernel's driver (`ublk_drv`) hands requests to this process by completions of io_uring, and
//! copies their data from and to its memory. A [`PreparedDevice`] is a new device, or one whose
//! server was killed or hands it over; a [`Server`] serves it until it is stopped. Each of its
//! queues is served by one loop, whose ring carries both the driver's commands and the I/O of the
//! image.
//!
//! Nothing here knows an image format or an engine: requests become requests for a
//! [`Disk`](blockhouse_disk::Disk).
//!
//! The modules; each uses only those above it in this list:
//!
//! - `error`: the errors, with hints
//! - `parameters`: the parameters of the block device for a disk
//! - `request`: decodes a descriptor into a request
//! - `process_files`: which devices a process serves, and whether it serves anything else
//! - `lifecycle`: the sequence of commands until a new or a recovered device takes requests
//! - `removal`: removes a device from outside of its server
//! - `gate`: holds requests back while another process takes the device over
//! - `queue`: the requests of a queue
//! - `unexpected_end`: the callback for when another process removes the device
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
