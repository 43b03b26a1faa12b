//! Allocates clusters for tables that are written beside the active tables while guests continue.
//!
//! The clusters are allocated as usual, with a refcount of 1, so after a crash they leak at most.
//! Unused clusters are freed at the end; if the change is not made, all clusters are freed. While
//! the tables are frozen nothing can be allocated, so spare clusters for the last changes are
//! reserved before the freeze.

use std::collections::BTreeSet;
use std::ops::Range;

use blockhouse_core::{Error, Result, Storage};

use crate::qcow2::writeback::Metadata;

/// The number of clusters in one allocation.
const BATCH: u64 = 64;
/// Minimum number of spare clusters when the tables are frozen.
pub(super) const MIN_SPARE: u64 = 32;

/// Why copying stopped.
pub(super) enum Halt {
    /// Copying failed.
    Failed(Error),
    /// More clusters are needed, and the tables are frozen.
    NoSpare,
    /// The change is no longer wanted.
    Cancelled,
    /// The tables have references that the refcounts lack.
    Implausible,
}

/// Stops copying if it was cancelled.
pub(super) fn check_wanted(is_cancelled: &dyn Fn() -> bool) -> Result<(), Halt> {
    if is_cancelled() { Err(Halt::Cancelled) } else { Ok(()) }
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A table in adjacent clusters of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    /// The active L1 table.
    L1,
    /// The L1 table of the snapshot.
    SnapshotL1,
    SnapshotTable,
    RefcountTable,
}

const RUNS: usize = 4;

/// The allocated clusters; see the module's documentation. When dropped, `Space` frees all these
/// clusters.
pub(super) struct Space<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    spare: Vec<u64>,
    used: BTreeSet<u64>,
    runs: [Range<u64>; RUNS],
    /// Whether the tables are frozen.
    is_closed: bool,
}

impl<'a, S: Storage> Space<'a, S> {
    pub(super) fn new(metadata: &'a Metadata<S>) -> Self {
        let runs = std::array::from_fn(|_| 0..0);
        Self { metadata, spare: Vec::new(), used: BTreeSet::new(), runs, is_closed: false }
    }

    /// Records whether the tables are frozen.
    pub(super) fn set_closed(&mut self, is_closed: bool) {
        self.is_closed = is_closed;
    }

    /// Fails if the tables are frozen and fewer than `count` clusters are spare.
    pub(super) fn check_room(&self, count: usize) -> Result<(), Halt> {
        if self.is_closed && self.spare.len() < count { Err(Halt::NoSpare) } else { Ok(()) }
    }

    /// Takes a cluster, and returns its offset.
    pub(super) async fn take(&mut self) -> Result<u64, Halt> {
        if self.spare.is_empty() {
            self.check_room(1)?;
            self.allocate_spare(BATCH).await?;
        }
        let cluster = self.spare.pop().ok_or(Halt::NoSpare)?;
        self.used.insert(cluster);
        Ok(self.metadata.geometry().offset_of(cluster))
    }

    /// Makes a cluster spare again. The cluster must not be needed, and no write to it may be in
    /// flight.
    pub(super) fn put_back(&mut self, offset: u64) {
        let cluster = self.metadata.geometry().cluster_of(offset);
        if self.used.remove(&cluster) {
            self.spare.push(cluster);
        }
    }

    /// Makes all taken clusters spare again.
    pub(super) fn put_all_back(&mut self) {
        self.spare.extend(std::mem::take(&mut self.used));
    }

    /// Allocates clusters until at least this many are spare.
    pub(super) async fn fill(&mut self, count: u64) -> Result<()> {
        while (self.spare.len() as u64) < count {
            self.allocate_spare(count - self.spare.len() as u64).await?;
        }
        Ok(())
    }

    /// Reserves exactly this many clusters for a table.
    pub(super) async fn fill_run(&mut self, run: Run, count: u64) -> Result<()> {
        let ready = &mut self.runs[run as usize];
        if ready.end - ready.start == count {
            return Ok(());
        }
        self.spare.extend(std::mem::replace(ready, 0..0));
        if count == 0 {
            return Ok(());
        }
        let found = self.allocate(count).await?;
        if found.end - found.start == count {
            self.runs[run as usize] = found;
            return Ok(());
        }
        self.spare.extend(found);
        let at_end = self.metadata.step(|state| {
            state.tables.freeze.wait_thawed()?;
            state.tables.check_dirty_limit()?;
            state.allocator.allocate_row(&mut state.tables, count)
        });
        self.runs[run as usize] = at_end.await?;
        Ok(())
    }

    /// The clusters that are ready for a table of this many bytes.
    ///
    /// # Errors
    /// `NoSpare` if the table takes another number of clusters.
    pub(super) fn run(&self, run: Run, bytes: u64) -> Result<Range<u64>, Halt> {
        let ready = self.runs[run as usize].clone();
        if self.metadata.geometry().clusters_for(bytes) == ready.end - ready.start {
            Ok(ready)
        } else {
            Err(Halt::NoSpare)
        }
    }

    async fn allocate(&mut self, count: u64) -> Result<Range<u64>> {
        let allocated = self.metadata.step(|state| {
            state.tables.freeze.wait_thawed()?;
            state.tables.check_dirty_limit()?;
            state.allocator.allocate(&mut state.tables, count)
        });
        allocated.await
    }

    async fn allocate_spare(&mut self, count: u64) -> Result<()> {
        // The last spare cluster is used first, so the offsets ascend.
        let found = self.allocate(count).await?;
        self.spare.splice(0..0, found.rev());
        Ok(())
    }

    /// Ends the ownership of the clusters: the tables in them are about to become active, so a drop
    /// must not free them. Returns the unused clusters.
    pub(super) fn leave(&mut self) -> Vec<u64> {
        self.used.clear();
        self.runs = std::array::from_fn(|_| 0..0);
        std::mem::take(&mut self.spare)
    }
}

impl<S: Storage> Drop for Space<'_, S> {
    fn drop(&mut self) {
        let runs = self.runs.iter().cloned().flatten();
        let mut clusters: Vec<u64> =
            self.used.iter().chain(&self.spare).copied().chain(runs).collect();
        clusters.sort_unstable();
        let mut state = self.metadata.lock();
        for run in clusters.chunk_by(|&one, &next| one + 1 == next) {
            state.allocator.frees.abandon(run[0]..run[0] + run.len() as u64);
        }
    }
}
