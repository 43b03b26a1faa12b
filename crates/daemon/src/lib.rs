//! The running server (layer 5): disks, exports, control and hand-over, from the first check to the
//! last flush.
//!
//! [`run()`] takes a [`Setup`], a plain description of what is to run, and returns when that has
//! ended in order. The command line is one way to make a `Setup`; nothing here reads arguments or
//! prints.
//!
//! - `options`: values as people write them, [`limits`], [`size`] and others; [`setup`]: the
//!   description that they make, with [`offers`] and [`tls_options`]; [`config`]: a file that
//!   describes it
//! - `process`: threads, signals, and what service managers are told
//! - `server`: [`run()`], its start, upgrade and stop; [`Service`]: what serves, as a whole
//! - `running`: disks and exports, by name, while they are served; they come and go
//! - `endpoints`: listening sockets and devices, [`ublk`] among them
//! - [`events`]: what happens meanwhile
//! - `jobs`: long work on disks while they are served
//! - [`control`]: what a user may ask of a running server, and the client that asks; [`forks`]: of
//!   forks
//! - `qmp`: the same in the words of QEMU's monitor
//! - [`metrics`]: what is measured of all that runs
//! - `hand_over`: another process goes on; `launcher`: what starts it; `sandbox`: what neither may
//!   do
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
mod endpoints;
pub mod events;
pub mod forks;
mod hand_over;
mod jobs;
mod launcher;
pub mod metrics;
mod options;
mod process;
mod qmp;
mod running;
mod sandbox;
mod server;
pub mod setup;

pub use endpoints::sockets::runtime_folder;
pub use endpoints::ublk;
pub use launcher::{WORD as LAUNCH_WORD, run as launch};
pub use options::{
    control_socket, limit_options, limits, qcow2_words, rate_limits, size, socket_options, switch,
    threshold, user_options,
};
pub use process::workers::LoopOptions;
pub use process::{key_memory, stop_request};
pub use sandbox::SandboxReport;
pub use server::run::run;
pub use server::service::Service;
#[doc(hidden)]
pub use server::strangers;
pub use setup::Setup;
pub use setup::{disk_options, offers, tls_options};
