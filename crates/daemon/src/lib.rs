//! What runs while images are served (layer 5): disks, exports, control and hand-over, from the first check to the
//! last flush.
//!
//! [`run()`] takes a [`Setup`], a plain description of what is to run, and returns when that has ended in order. The
//! command line is one way to make a `Setup`; nothing here reads arguments or prints.
//!
//! - [`setup`]: the description; its parts: [`offers`], [`limits`], [`rate_limits`], [`limit_options`], [`tls_options`],
//!   [`socket_options`], [`size`]
//! - [`config`]: a file that describes it
//! - [`run()`]: the process: signals, start, upgrade, stop
//! - [`Service`]: what serves, as a whole
//! - `running`: disks and exports, by name, while they are served; they come and go. `claims`: who changes what;
//!   `blocking`: what may block
//! - [`events`]: what happens meanwhile; `failures`: of it, requests that fail
//! - `jobs`: long work on disks while they are served
//! - [`control`]: what a user may ask of a running server, and the client that asks
//! - `qmp`: the same in the words of QEMU's monitor
//! - [`metrics`]: what is measured of all that runs
//! - `hand_over`: another process goes on
//! - `watchdog`, `pid_file`, `stopping_notice`: what service managers are told
//! - `workers`, `sockets`, `vhost_user`, [`ublk`], `open`: threads, listening sockets, devices, images
#![forbid(unsafe_code)]

mod blocking;
mod claims;
pub mod config;
pub mod control;
pub mod control_socket;
pub mod disk_options;
pub mod events;
mod failures;
mod finishing;
pub mod forks;
mod hand_over;
mod io_poll;
mod jobs;
mod kept_sockets;
pub mod key_memory;
mod launcher;
pub mod limit_options;
pub mod limits;
pub mod metrics;
pub mod offers;
mod open;
mod pid_file;
pub mod qcow2_words;
mod qmp;
pub mod rate_limits;
mod room_watch;
mod run;
mod running;
mod sandbox;
mod scratch;
mod service;
mod service_manager;
pub mod setup;
pub mod size;
pub mod socket_options;
mod sockets;
pub mod stop_request;
mod stopper;
mod stopping_notice;
#[doc(hidden)]
pub mod strangers;
pub mod switch;
mod text_fields;
pub mod threshold;
mod tls;
pub mod tls_options;
pub mod ublk;
pub mod user_options;

mod vhost_user;
mod warnings;
mod watchdog;
mod workers;

pub use launcher::{WORD as LAUNCH_WORD, run as launch};
pub use run::run;
pub use sandbox::SandboxReport;
pub use service::Service;
pub use setup::Setup;
pub use sockets::runtime_folder;
pub use workers::LoopOptions;
