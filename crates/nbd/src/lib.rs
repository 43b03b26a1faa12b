//! The NBD protocol and its server.
//!
//! Bytes first: [`proto`], [`handshake`], [`command`] and [`uri`] do no I/O. On them stand the
//! transmission phase of one connection (`session`) and the [`Server`] with its exports. Neither
//! knows an image format or an engine by name: they turn the protocol into requests for a
//! [`Disk`](blockhouse_disk::Disk).
#![forbid(unsafe_code)]

pub mod command;
pub mod handshake;
pub mod proto;
mod server;
mod session;
pub mod uri;

pub use server::{
    BoundSocket, Export, ExportError, Exports, Limits, Server, SocketFile, bind, bind_private,
};
