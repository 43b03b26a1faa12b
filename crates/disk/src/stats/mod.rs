//! The measurement of a disk: cheap enough to be always on.
//!
//! Each thread records into its own blocks ([`blockhouse_core::metrics`]). A block is allocated
//! when the thread first carries out such a request, so an idle disk has almost none. A reading is
//! a sum over all threads, exact when nothing is in flight.
//!
//! - [`Stats`]: requests by export and by operation, counted at the one point that all of them
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
