//! The NBD protocol, server and client.
#![forbid(unsafe_code)]

pub mod command;
pub mod handshake;
pub mod proto;
pub mod uri;

/// Whether an export can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It cannot.
    ReadOnly,
    /// It can.
    ReadWrite,
}
