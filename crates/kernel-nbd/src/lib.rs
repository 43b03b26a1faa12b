//! The kernel as an NBD client (layer 4): attaches an export of this program's server at a Unix
//! socket as a block device of this host, `/dev/nbdN`.
//!
//! This crate replaces ublk on kernels without the ublk driver. A device does not outlive its
//! server: new requests fail after the server's end, and the requests that the server had wait
//! until the device is detached.
//!
//! From the bottom up, each module uses only modules above it in this list:
//!
//! - `error`: errors, with advice
//! - `message`: requests to the driver and its replies, as bytes
//! - `driver`: the driver, by generic netlink
//! - `handshake`: the properties of the export
//! - `server`: the process that listens at a socket, and its end
//! - `device`: attaching and detaching devices
#![forbid(unsafe_code)]

mod device;
mod driver;
mod error;
mod handshake;
mod message;
mod server;

pub use device::{Detach, attach, check_driver, detach};
pub use error::Error;
pub use server::end as end_server;
