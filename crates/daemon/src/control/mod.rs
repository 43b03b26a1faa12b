//! The control socket, by which users control a running server.
//!
//! A Unix stream socket that its owner alone may connect to. Each line is a message of JSON-RPC 2.0
//! (docs/control.md; `cargo xtask options` makes its schema). The requests of one connection are
//! executed one after the other, the requests of different connections concurrently.
//!
//! - [`methods`]: the methods, their parameters and results; `dispatch`: their implementations;
//!   `job_methods` and `jobs`: methods of jobs; likewise for bitmaps, backups, forks, transactions
//!   and new images
//! - `snapshots`: taking and deleting snapshots
//! - `rpc`: messages of JSON-RPC; `outcome`: parameters and results
//! - `server`, `line_stream`, `gate`: connections; `client`: the client's end of a connection
//! - [`Monitor`]: the place of another protocol, which `blockhouse-qmp` implements
//! - `upgrades`: the upgrades requested, until the main thread executes them

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
mod monitor;
mod outcome;
mod pause_log;
mod rpc;
mod server;
mod snapshots;
mod transaction_methods;
mod transactions;
pub(crate) mod upgrades;

pub use client::{Connection, RpcError};
pub use dispatch::call;
pub(crate) use gate::Closed;
pub use gate::Gate;
pub(crate) use jobs::listed as listed_jobs;
pub use line_stream::LineWriter;
pub use listed::Listed;
pub use methods::{UpgradeReply, schema};
pub use monitor::{Monitor, MonitorProtocol};
pub use rpc::{Failure, LACKS_CHANGES};
pub(crate) use server::Control;
pub use server::accept_clients;

/// The maximum number of bytes in a message to a server, without the end of line.
pub const MAX_LINE: usize = 64 << 10;
