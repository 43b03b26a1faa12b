//! The measurement of a disk: cheap enough to be always on.
//!
//! Each thread records into its own blocks ([`blockhouse_core::metrics`]). The counters of an
//! operation are allocated when the thread first carries out this operation, so an idle disk has
//! almost no counters. A reading is a sum over all threads, exact when nothing is in flight.
//!
//! - [`Stats`]: requests by export and by operation, counted at the one point that all requests
//!   pass.
//! - [`HostStats`]: operations at a storage, and the flushes that were not needed, counted by the
//!   flush tracker of each storage.
//! - Clients, see [`ClientGuard`].
//! - [`DiskMetrics`], [`Counters`]: readings.

mod clients;
mod errors;
mod gather;
mod host;
mod labels;
mod reading;
mod requests;

pub use clients::ClientGuard;
pub use labels::{ExportKind, HostOperation, Operation, Stage};
pub use reading::{
    ClientMetrics, Counters, DiskMetrics, ErrorCount, ExportLoad, RequestMetrics, StageMetrics,
};
pub use requests::RequestTimer;

pub(crate) use gather::gather;
pub(crate) use host::{Content, HostStats};
pub(crate) use requests::Stats;
