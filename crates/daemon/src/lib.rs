//! The running server (layer 6): disks, exports, control and hand-over, from the first check to the
//! last flush.
//!
//! [`run()`] takes a [`Setup`](blockhouse_config::setup::Setup), a plain description of what is to
//! run, and returns when that has ended in order. The command line is one way to make a `Setup`;
//! nothing here reads arguments or prints.
//!
//! - `process`: threads, signals, and what service managers are told
//! - `server`: [`run()`], its start, upgrade and stop; `service`: what serves, as a whole
//! - `running`: disks and exports, by name, while they are served; they come and go
//! - `endpoints`: listening sockets and devices
//! - [`events`]: what happens meanwhile
//! - `jobs`: long work on disks while they are served
//! - [`control`]: what a user may ask of a running server, and the client that asks; [`forks`]: of
//!   forks
//! - `qmp`: the same in the words of QEMU's monitor
//! - [`metrics`]: what is measured of all that runs
//! - `hand_over`: another process goes on; `launcher`: what starts it; `sandbox`: what neither may
//!   do
#![forbid(unsafe_code)]

pub mod control;
mod endpoints;
pub mod events;
pub mod forks;
mod hand_over;
mod jobs;
mod launcher;
pub mod metrics;
mod process;
mod qmp;
mod running;
mod sandbox;
mod server;
mod service;

pub use endpoints::sockets::runtime_folder;
pub use launcher::{WORD as LAUNCH_WORD, run as launch};
pub use process::{key_memory, stop_request};
pub use qmp::qcow2_words;
pub use sandbox::SandboxReport;
pub use server::run::run;
#[doc(hidden)]
pub use server::strangers;
pub use service::Service;
