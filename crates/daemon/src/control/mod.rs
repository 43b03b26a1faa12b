//! The control socket, by which users control a running server.
//!
//! A Unix stream socket that its owner alone may connect to. Each line is a message of JSON-RPC 2.0
//! (docs/control.md; `cargo xtask options` makes its schema). A connection's requests are carried
//! out one after the other, those of several side by side.
//!
//! - [`methods`]: the methods, their parameters and results; `dispatch`: what each does;
//!   `job_methods` and `jobs`: those of jobs; `bitmap_methods` and `bitmaps`: those of bitmaps;
//!   `backup_methods` and `backups`: those of backups; `fork_methods` and `forks`: that of forks;
//!   `transaction_methods` and `transactions`: that of transactions; `image_methods` and `images`:
//!   that of new images
//! - `snapshots`: those of snapshots
//! - `rpc`: messages of JSON-RPC; `outcome`: parameters and results
//! - `server`, `line_stream`, `gate`: connections; `client`: the other end
//! - `upgrades`: those that are asked for, until the main thread carries them out

mod backup_methods;
mod backups;
mod bitmap_methods;
mod bitmaps;
mod client;
mod dispatch;
mod fork_methods;
mod forks;
mod gate;
mod image_methods;
mod images;
mod job_methods;
mod jobs;
mod line_stream;
mod listed;
pub mod methods;
mod outcome;
mod pause_log;
mod rpc;
mod server;
mod snapshots;
mod transaction_methods;
mod transactions;
pub(crate) mod upgrades;

pub use client::{Connection, RpcError};
pub(crate) use dispatch::call;
pub(crate) use gate::{Closed, Gate};
pub(crate) use jobs::listed as listed_jobs;
pub(crate) use line_stream::LineWriter;
pub use listed::Listed;
pub use methods::{UpgradeReply, schema};
pub(crate) use rpc::Failure;
pub use rpc::LACKS_CHANGES;
pub(crate) use server::{Control, accept_clients};

/// The most bytes of a message that is sent to a server, its end of line not counted.
pub const MAX_LINE: usize = 64 << 10;
