//! One NBD client for tests, proofs and measurements, and image content that identifies itself.
//!
//! It shares no code with the server under test: the bytes are written from the specification
//! alone.
//!
//! - [`Greeted`], [`Client`]: a client that sends any request, right or wrong
//! - [`handshake`], [`wire`]: the bytes, for clients that are made for one thing
//! - [`pattern`]: what an image holds
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
