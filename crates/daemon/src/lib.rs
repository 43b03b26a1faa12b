//! The running server (layer 8): disks, exports, control and hand-over, from the first check to the
//! last flush.
//!
//! [`run()`] takes a [`Setup`](blockhouse_config::setup::Setup), a description of the server to
//! run, and returns after its orderly end. The command line is one way to make a `Setup`; nothing
//! here reads arguments or prints.
//!
//! - `process`: threads, signals, and messages to the service manager
//! - `server`: start, upgrade and stop ([`run()`]); `service`: everything that serves, as a whole
//! - `running`: disks and exports by name; they are added and removed while the server runs
//! - `endpoints`: listening sockets and devices
//! - [`events`]: events while the server runs
//! - `jobs`: long work on disks while they are served
//! - [`control`]: the methods for users of a running server, and a client; [`forks`]: parameters of
//!   forks
//! - [`metrics`]: measurements of the running server
//! - `hand_over`: the hand-over to another process; `launcher`: starts that process; `sandbox`: the
//!   confinement of the server
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
mod running;
mod sandbox;
mod server;
mod service;

pub use endpoints::sockets::runtime_folder;
pub use launcher::{WORD as LAUNCH_WORD, run as launch};
pub use process::workers::Workers;
pub use process::{kept_sockets, key_memory, passed_sockets, stop_request};
pub use running::claims::Name;
pub use running::{Running, RunningDisk};
pub use sandbox::SandboxReport;
pub use server::run::run;
#[doc(hidden)]
pub use server::strangers;
pub use service::Service;
