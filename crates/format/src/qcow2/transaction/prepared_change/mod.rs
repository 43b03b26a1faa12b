//! Takes or deletes a snapshot while guests continue. References are counted and tables are copied
//! while guests write; guests wait only for the short switch.
//!
//! The life cycle of a prepared change:
//!
//! 1. *Prepare*: guests continue. The new metadata is written to new clusters beside the active
//!    tables: L2 tables with other COPIED flags (`l2_copies`), and refcount blocks with the
//!    references of the snapshot added or removed (`refcount_copies`). For a new snapshot, these
//!    are the references of the active tables; for a deleted snapshot, the references of the
//!    snapshot's tables (`snapshot_tree`). The new clusters are allocated as usual (`space`).
//! 2. Slices that guests change meanwhile are recorded (`tables/change_watch`) and copied again, in
//!    passes that become shorter, until few slices are left. All copies are flushed.
//! 3. *Take*: no guest write is in flight. The tables are frozen, and the remaining slices are
//!    copied. L1 tables, snapshot table and refcount table are written and flushed, and one write
//!    of the header makes the new metadata active (`take`). Nothing is allocated in this step. Its
//!    duration depends on the amount of mapped data only through the L1 table, 16 KiB for each TiB,
//!    and the refcount table, 4 KiB for each TiB.
//! 4. The tables that the copies have replaced, and the clusters that only a deleted snapshot
//!    referred to (`unreferenced`), are freed as usual while guests continue.
//!
//! A crash before the write of the header leaves the old metadata, a later crash leaves the new
//! metadata. In both cases clusters leak at most. If the change is cancelled or dropped before the
//! write of the header, its clusters are freed once writes to them have completed. If another
//! transaction has replaced the tables, or the size of the disk has changed, all copies are made
//! again.

mod l2_copies;
mod l2_references;
mod page_check;
mod plan;
mod refcount_copies;
mod reference_counts;
mod snapshot_tree;
mod space;
mod table_parts;
mod take;
mod unreferenced;

use async_lock::SemaphoreGuard;
use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode};

use crate::qcow2::Qcow2;
use crate::qcow2::layout::snapshot_table;
use crate::qcow2::writeback::Metadata;

use super::InternalSnapshots;
use super::metadata_transaction::{Transactions, check_no_data_file};

use l2_copies::L2Copies;
use plan::Purpose;
use refcount_copies::RefcountCopies;
use reference_counts::ReferenceCounts;
use snapshot_tree::count_snapshot;
use space::{Halt, MIN_SPARE, Run, Space};
use unreferenced::Unreferenced;

pub use plan::SnapshotPlan;

/// With at most this many slices left to copy, no further pass is made.
const FEW_LEFT: usize = 16;
/// After this many passes the change is taken with any number of slices left: guests change slices
/// faster than the passes copy them.
const MAX_PASSES: u32 = 24;

/// A change of the snapshots that is being prepared; see the module's documentation.
pub struct PreparedChange<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    transactions: &'a Transactions,
    plan: SnapshotPlan,
    counts: ReferenceCounts,
    /// Whether `counts` has the references of the snapshot to be deleted.
    is_counted: bool,
    l2: L2Copies,
    refcounts: RefcountCopies,
    space: Space<'a, S>,
    /// Number of clusters reserved for the last changes.
    spare: u64,
    /// After the change: the clusters to free.
    unreferenced: Option<Unreferenced<'a, S>>,
    /// Only one change is prepared at a time.
    _alone: SemaphoreGuard<'a>,
}

/// The outcome of a preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preparation {
    /// The change can be made.
    Ready,
    /// The change cannot be prepared, and must be made at once while no other task allocates space.
    /// Possible reasons: little space is free, another program has left a VM state after the disk,
    /// or the tables contradict each other.
    AtOnce,
    /// The change was cancelled.
    Cancelled,
}

impl<'a, S: Storage> InternalSnapshots<'a, S> {
    /// Begins to prepare a change while guests continue, so that taking the change is quick for any
    /// number of mappings. Nothing is copied yet. If the prepared change is dropped before it is
    /// taken, the image has not changed; [`give_back`](Self::give_back) frees the space of the
    /// preparation.
    ///
    /// # Errors
    /// `ReadOnly`, `Unsupported`, or storage errors.
    pub async fn prepare(&self, plan: SnapshotPlan) -> Result<PreparedChange<'a, S>> {
        let Qcow2 { metadata, transactions, .. } = self.image;
        metadata.check_writable()?;
        check_no_data_file(metadata)?;
        metadata.check_intact()?;
        metadata.autoclear().begin_changes().await?;
        let alone = transactions.begin_preparation().await;
        let (geometry, purpose) = (metadata.geometry(), plan.purpose());
        Ok(PreparedChange {
            metadata,
            transactions,
            plan,
            counts: ReferenceCounts::new(geometry),
            is_counted: false,
            l2: L2Copies::new(geometry, purpose),
            refcounts: RefcountCopies::new(geometry, purpose),
            space: Space::new(metadata),
            spare: MIN_SPARE,
            unreferenced: None,
            _alone: alone,
        })
    }
}

impl<S: Storage> PreparedChange<'_, S> {
    fn purpose(&self) -> Purpose {
        self.plan.purpose()
    }

    /// Copies the changes of guests, until few slices are left. Stops soon after `is_cancelled`
    /// returns true.
    ///
    /// # Errors
    /// The errors of [`take`](Self::take) that are already known.
    pub async fn update(&mut self, is_cancelled: &dyn Fn() -> bool) -> Result<Preparation> {
        self.space.set_closed(false);
        loop {
            if !self.metadata.lock().tables.watch.is_active() {
                self.begin();
            }
            if self.purpose() == Purpose::Create && self.has_more_than_disk() {
                return Ok(Preparation::AtOnce);
            }
            let outcome = self.run_passes(is_cancelled).await;
            let is_watched = self.metadata.lock().tables.watch.is_active();
            match outcome {
                Err(Halt::Cancelled) => return Ok(Preparation::Cancelled),
                Err(Halt::Implausible) => return Ok(Preparation::AtOnce),
                Err(Halt::Failed(error)) if error.kind() == ErrorKind::NoSpace => {
                    return Ok(Preparation::AtOnce);
                }
                // The outcome is ignored if the watch has ended: the bytes read may not have been a
                // table.
                _ if !is_watched => self.metadata.writer().check_failure()?,
                Ok(()) => return Ok(Preparation::Ready),
                Err(Halt::Failed(error)) => return Err(error),
                // No spare cluster is left, although the tables are not frozen.
                Err(Halt::NoSpare) => return Ok(Preparation::AtOnce),
            }
        }
    }

    /// Restarts the preparation with the clusters that are already allocated.
    fn begin(&mut self) {
        let (geometry, purpose) = (self.metadata.geometry(), self.purpose());
        self.counts = ReferenceCounts::new(geometry);
        self.is_counted = false;
        self.l2 = L2Copies::new(geometry, purpose);
        self.refcounts = RefcountCopies::new(geometry, purpose);
        self.space.put_all_back();
        self.metadata.lock().tables.watch.begin();
    }

    fn has_more_than_disk(&self) -> bool {
        let state = self.metadata.lock();
        let entries = self.metadata.geometry().l1_entries_for(state.tables.header().size);
        state.tables.l1().iter().skip(entries as usize).any(|&word| word != 0)
    }

    async fn run_passes(&mut self, is_cancelled: &dyn Fn() -> bool) -> Result<(), Halt> {
        let mut before = usize::MAX;
        for _ in 0..MAX_PASSES {
            self.reserve().await?;
            // Slices that could not be encoded are retried.
            drop(self.copy_changes(is_cancelled).await?);
            self.space.fill(self.spare).await?;
            // Flushes now, so that the last flush has little to write.
            self.metadata.flush(SyncMode::Data).await?;
            let left = self.left();
            if left <= FEW_LEFT || left > before - before / 4 {
                break;
            }
            before = left;
        }
        Ok(())
    }

    /// Number of slices that have changed since they were copied.
    fn left(&self) -> usize {
        self.metadata.lock().tables.watch.count()
    }

    /// Reserves clusters for all writes while the tables are frozen.
    async fn reserve(&mut self) -> Result<()> {
        let (header, l1, table) = {
            let state = self.metadata.lock();
            let header = state.tables.header().clone();
            (header, state.tables.l1().len() as u64, state.tables.refcount_table().len() as u64)
        };
        let storage = self.metadata.storage();
        let on_disk = self.metadata.lock().tables.headers.disk().clone();
        let mut entries = snapshot_table::read(storage, &on_disk).await?.entries;
        let of_disk = header.geometry.l1_entries_for(header.size);
        self.plan.change(storage.name(), header.size, of_disk as usize, &mut entries)?;
        let in_snapshot = if self.purpose() == Purpose::Create { of_disk } else { 0 };
        let runs = [
            (Run::L1, l1 * 8),
            (Run::SnapshotL1, in_snapshot * 8),
            (Run::SnapshotTable, snapshot_table::to_bytes(&entries).len() as u64),
            (Run::RefcountTable, table * 8),
        ];
        for (run, bytes) in runs {
            self.space.fill_run(run, header.geometry.clusters_for(bytes)).await?;
        }
        self.space.fill(self.spare).await
    }

    /// Copies the changes since the last copy. Returns the reason if some changes cannot be encoded
    /// in their present state.
    async fn copy_changes(
        &mut self,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Error>, Halt> {
        let Self { metadata, plan, counts, l2, refcounts, space, .. } = self;
        // For a new snapshot, refcounts depend on the copies of the L2 tables. For a deletion,
        // COPIED flags depend on the references left.
        let SnapshotPlan::Delete(name) = plan else {
            l2.update(metadata, counts, space, is_cancelled).await?;
            return refcounts.update(metadata, counts, space, is_cancelled).await;
        };
        if !self.is_counted {
            count_snapshot(metadata, name, counts, is_cancelled).await?;
            self.is_counted = true;
        }
        let refused = refcounts.update(metadata, counts, space, is_cancelled).await?;
        l2.update(metadata, counts, space, is_cancelled).await?;
        Ok(refused)
    }

    /// Frees the unreferenced clusters after the change, while guests continue. Without this call,
    /// the next flushes free these clusters.
    pub async fn free_unreferenced(mut self) {
        if let Some(unreferenced) = self.unreferenced.take() {
            unreferenced.free().await;
        }
    }
}

impl<S: Storage> Drop for PreparedChange<'_, S> {
    fn drop(&mut self) {
        self.metadata.lock().tables.watch.end();
    }
}
