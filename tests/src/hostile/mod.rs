//! Parties that break rules at random: a guest with its front-end, and an NBD client.
//!
//! Each runs from a seed until its time is over. The server may refuse its requests and end its
//! connections, but must serve others meanwhile. They run in separate processes (`hostile`),
//! because what they do to shared memory may kill them, too.

mod client;
mod guest;

pub use client::client;
pub use guest::guest;
