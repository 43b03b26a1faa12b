//! The kernel as an NBD client (layer 4): the export of a server of this program at a Unix socket
//! as a block device of this host, `/dev/nbdN`.
//!
//! It takes the place of ublk where the kernel has no driver for that. A device of it does not
//! outlive its server: requests fail once that has ended, and those that it had wait until the
//! device is detached.
//!
//! From the bottom up, each uses only what is above it in this list:
//!
//! - `error`: what fails, and what to do
//! - `message`: requests to the driver and its replies, as bytes
//! - `driver`: the driver, by generic netlink
//! - `handshake`: what the export is like
//! - `server`: the process that listens at a socket, and its end
//! - `device`: devices that come and go
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
