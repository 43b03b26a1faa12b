//! Parties that break rules at random: a guest with its front-end, and an NBD client.
//!
//! Each runs until its time is over, from a seed, and expects nothing of the server but that others
//! are served meanwhile: refusals and ended connections are what it asks for. They run in processes
//! of their own (`hostile`), because what they do to shared memory may end them, too.

mod client;
mod guest;

pub use client::client;
pub use guest::guest;
