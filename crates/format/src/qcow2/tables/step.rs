//! Steps: changes and lookups that run under the lock of the image and never wait.
//!
//! 1. The caller takes the lock and runs the step.
//! 2. The step completes, or changes nothing and returns the reason ([`Blocked`]).
//! 3. The caller releases the lock, does or awaits what the step needs (`writeback/steps`), and
//!    runs the step again.

use blockhouse_core::Error;
use event_listener::EventListener;

use super::slice_cache::SliceId;

/// The outcome of a step.
pub(crate) type Step<T> = Result<T, Blocked>;

/// Why a step cannot complete now.
pub(crate) enum Blocked {
    /// A slice is not cached: it has to be read.
    CacheMiss(SliceId),
    /// Another operation must end first; the listener is notified when it ends.
    Wait(EventListener),
    /// Prepared changes take all space of the redo log; the listener is notified when one of the
    /// changes ends.
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

/// The host space that a blocked step needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReserveRequest {
    /// This many clusters at the end of the file, with refcounts of 0.
    AtEnd(u64),
    /// `count` consecutive clusters: either `total` clusters at the end of the file with refcounts
    /// of 0, or `count` clusters elsewhere with refcounts of 1.
    Row {
        /// The number of consecutive clusters.
        count: u64,
        /// The number of these clusters, plus the number of refcount blocks for them if the
        /// clusters are at the end.
        total: u64,
    },
    /// A file with the length of this many clusters, if the storage can be made longer.
    Length(u64),
    /// Clusters at the end of the file that hold written zeros, if the storage can prepare them.
    WrittenZeros,
    /// The clusters of pending frees, because the host may have no space for other clusters.
    Frees,
    /// A cluster with a refcount of one for the L2 table of this L1 entry.
    L2Table(usize),
}
