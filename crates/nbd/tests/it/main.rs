//! The server over real sockets, with clients that keep the rules and clients that break them.
#![forbid(unsafe_code)]

mod common;
mod pausing;
mod server;
mod transmission;
