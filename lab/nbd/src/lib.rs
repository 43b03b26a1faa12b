//! An NBD client for tests, labs and measurements, and image content that identifies itself.
//!
//! It shares no code with the server under test: its messages follow the specification alone.
//!
//! - [`Greeted`], [`Client`]: a client that sends any request, valid or not
//! - [`handshake`], [`wire`]: the messages, for special clients
//! - [`pattern`]: the content of an image
//! - [`VolatileServer`]: a server that loses what was not flushed, for tests of NBD clients
#![forbid(unsafe_code)]

mod client;
mod greeted;
pub mod handshake;
pub mod pattern;
mod protocol;
mod socket;
mod volatile_server;
pub mod wire;

pub use client::{Client, Extent, Reply, Request};
pub use greeted::Greeted;
pub use handshake::{OptionReply, go_data};
pub use protocol::{Framing, command, errno, flag, option, reply, transmission};
pub use socket::{Address, connect, is_closed, reset};
pub use volatile_server::VolatileServer;
