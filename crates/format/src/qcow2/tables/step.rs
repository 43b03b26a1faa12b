//! Steps: changes and lookups that run under the image's one lock and never wait.
//!
//! 1. The caller takes the lock and runs the step.
//! 2. The step completes, or changes nothing and returns why it is [`Blocked`].
//! 3. The caller releases the lock, removes the obstacle (`writeback/steps`) and runs the step
//!    again.

use blockhouse_core::Error;
use event_listener::EventListener;

use super::slice_cache::SliceId;

/// The outcome of a step.
pub(crate) type Step<T> = Result<T, Blocked>;

/// Why a step cannot complete now.
pub(crate) enum Blocked {
    /// A slice is not cached: it has to be read.
    CacheMiss(SliceId),
    /// Another operation is in the way: the listener is notified when that ends.
    Wait(EventListener),
    /// Prepared changes take all space of the redo log: the listener is notified when one ends.
    NoRoom(EventListener),
    /// Too many slices are dirty: a writeback has to run first.
    DirtyLimit,
    /// Space has to be allocated on the host first.
    NeedsReserve(ReserveRequest),
    /// The step fails with this error.
    Failed(Error),
}

impl From<Error> for Blocked {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Space that a step lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReserveRequest {
    /// This many clusters at the end, with refcounts of 0.
    AtEnd(u64),
    /// `count` consecutive clusters: `total` at the end as above, or elsewhere with refcounts of
    /// one.
    Row {
        /// The number of consecutive clusters.
        count: u64,
        /// The number of these clusters and of the refcount blocks for them, at the end.
        total: u64,
    },
    /// A file that is this many clusters long, if the storage can be made longer.
    Length(u64),
    /// Clusters at the end that hold written zeros, if the storage can prepare them.
    WrittenZeros,
    /// The clusters of pending frees, because the host may have space for no others.
    Frees,
    /// A cluster with a refcount of one for the L2 table of this L1 entry.
    L2Table(usize),
}
