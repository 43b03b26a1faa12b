//! QMP (layer 9), the protocol of QEMU's monitor, with the commands of qemu-storage-daemon that
//! have a meaning here. [`blockhouse_daemon::run`] serves it by [`Qmp`].
//!
//! A thin layer: a command translates its arguments into calls of the control socket's methods
//! ([`call`](blockhouse_daemon::control::call)), and their results and errors into QEMU's replies.
//! There is no second implementation. A disk is a node with the disk's name; the file below it is
//! listed as another node, which cannot be used alone. docs/qmp.md lists the differences from QEMU.
//! The socket has the options and permissions of a control socket: a command exists if the socket
//! allows all methods that it calls.
//!
//! - `server`: the socket; `session`: a client; `tokens`, `reader`: its messages; `errors`,
//!   `arguments`
//! - `commands`: their list; `schema`: their arguments and results; `query`, `node_list`,
//!   `nodes`, `blockdev` (with `opening` and `filters`), `reopening`, `creation`, `objects`,
//!   `exports`, `bitmaps`, `snapshots`, `overlays`, `backups`, `jobs` (with `starting` and
//!   `job_list`), `transaction`: their implementations
//! - `context`, `state`: their shared state; `events`, `broadcast`: the events for clients
#![forbid(unsafe_code)]

mod activity;
mod arguments;
mod backups;
mod bitmaps;
mod blockdev;
mod broadcast;
mod commands;
mod context;
mod creation;
mod errors;
mod events;
mod exports;
mod filters;
mod job_list;
mod jobs;
mod node_list;
mod nodes;
mod objects;
mod opening;
mod overlays;
pub mod qcow2_words;
mod query;
mod reader;
mod reopening;
mod schema;
mod server;
mod session;
mod snapshots;
mod starting;
mod state;
mod tokens;
mod transaction;

#[doc(hidden)]
pub use reader::read_all;
pub use server::Qmp;
