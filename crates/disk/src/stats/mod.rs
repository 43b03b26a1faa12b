//! The measurement of a disk: cheap enough to be always on.
//!
//! Each thread records into blocks of its own ([`blockhouse_core::metrics`]), which are made when
//! the thread first carries out such a request, so that a disk at rest has next to none. A reading
//! is a sum over all threads, exact when nothing is in flight.
//!
//! - [`Stats`]: requests, at the one choke point of all of them: by the export that they come from
//!   and by operation.
//! - [`HostStats`]: operations at a storage, and which flushes were spared, in the tracker around
//!   each storage.
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
