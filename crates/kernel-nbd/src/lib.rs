//! The kernel as an NBD client (layer 4): attaches an export of this program's server at a Unix
//! socket as a block device of this host, `/dev/nbdN`.
//!
//! This crate replaces ublk on kernels without the ublk driver. After the end of its server a
//! device is of no use: new requests fail, and requests in flight wait until it is detached.
//!
//! Each module uses only modules earlier in this list:
//!
//! - `error`: errors, with advice
//! - `message`: requests to the driver and its replies, as bytes
//! - `driver`: the driver, by generic netlink
//! - `handshake`: the properties of the export
//! - `server`: finds and terminates the process that listens at a socket
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
