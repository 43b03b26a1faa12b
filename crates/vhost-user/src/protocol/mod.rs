//! The vhost-user protocol as bytes: messages, their numbers and payloads, and the back-end's own
//! channel.
//!
//! All numbers are in the byte order of the host (vhost-user specification, "Message
//! Specification").

mod backend_channel;
mod connection;
mod numbers;
mod payload;
mod refusal;

pub use backend_channel::BackendChannel;
pub use connection::{Arrival, Connection, Message};
pub use numbers::{feature, has_own_reply, request};
pub use payload::{
    InflightDescription, LogDescription, MemoryRegion, Payload, UserAddresses, only_descriptor,
};
pub use refusal::{Result, refused};
