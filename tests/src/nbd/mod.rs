//! A small NBD client for what honest clients do not do: it sends what it is told, and takes the
//! answers apart. It knows the three framings of the protocol.

mod handshake;
mod socket;
mod transmission;

pub use handshake::{Greeted, OptionReply, go_data, option, reply};
pub use socket::{Address, connect, reset};
pub use transmission::{Client, Extent, Framing, Reply, Request, command, errno, flag};
