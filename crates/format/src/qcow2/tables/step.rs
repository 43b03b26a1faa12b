//! Steps: changes and lookups that run under the image's one lock and never wait.
//!
//! 1. The caller takes the lock and runs the step.
//! 2. The step does all that it is for, or changes nothing and returns what it is [`Blocked`] by.
//! 3. The caller gives the lock back, removes the obstacle (`writeback/steps`) and runs the step
//!    again.

use blockhouse_core::Error;
use event_listener::EventListener;

use super::slice_cache::SliceId;

/// The outcome of a step.
pub(crate) type Step<T> = Result<T, Blocked>;

/// Why a step cannot be made now.
pub(crate) enum Blocked {
    /// A slice is not cached: it has to be read.
    CacheMiss(SliceId),
    /// Another operation is in the way: its end is announced here.
    Wait(EventListener),
    /// Changes that are prepared take all room of the redo log: the end of one is announced here.
    NoRoom(EventListener),
    /// Too many slices are dirty: a writeback has to run first.
    DirtyLimit,
    /// Space has to be allocated on the host first.
    NeedsReserve(ReserveRequest),
    /// The step can never be made.
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
    /// Clusters at the end, as many as this, with refcounts of 0.
    AtEnd(u64),
    /// `count` clusters in a row: `total` at the end as above, or elsewhere with refcounts of one.
    Row {
        /// The clusters to be in a row.
        count: u64,
        /// These clusters and the refcount blocks for them, at the end.
        total: u64,
    },
    /// A file that is this many clusters long, if the storage can be made longer.
    Length(u64),
    /// Clusters at the end that hold written zeros, if the storage can prepare them.
    WrittenZeros,
    /// Clusters that are pending free or freeable: the host may have no others.
    Frees,
    /// A cluster with a refcount of one for the L2 table of this L1 entry.
    L2Table(usize),
}
