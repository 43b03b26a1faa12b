//! Snapshots of a disk whose guests go on: counted and copied while they write, taken in a moment.
//!
//! The life of a prepared snapshot:
//!
//! 1. *Prepare*: guests go on. Everything that the snapshot takes is written to new clusters beside the active
//!    tables: L2 tables without COPIED flags (`l2_copies`), refcount blocks that count the snapshot's references
//!    (`refcount_copies`). The clusters are allocated like any others (`space`).
//! 2. What guests change meanwhile is noted, slice by slice (`tables/change_watch`), and copied again, in passes,
//!    each of which has less to do, until little is left. All of it is flushed.
//! 3. *Take*: no change of the guest's is in flight. The tables are frozen, the rest is copied, L1 tables, snapshot
//!    table and refcount table are written and flushed, and one write of the header makes all of it the active
//!    metadata (`take`). Nothing is allocated then, and nothing takes longer because more is mapped, but for the
//!    L1 table and the refcount table: 16 KiB and 4 KiB for each TiB.
//! 4. What the copies have replaced is freed as everything else is, while guests go on.
//!
//! A crash before the write of the header leaves the old image, and after it the new one, each with leaks at most.
//! Cancelled or dropped at any moment before that write, it gives its clusters back, once writes to them have completed.
//! Where another transaction has replaced the tables, or the disk has another size, all is copied anew.

mod l2_copies;
mod page_check;
mod refcount_copies;
mod reference_counts;
mod space;
mod table_parts;
mod take;

use async_lock::SemaphoreGuard;
use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode};

use crate::qcow2::layout::snapshot_table;

use super::ImageMetadata;
use super::metadata_transaction::{Transactions, check_no_data_file};
use super::snapshots::{NewSnapshot, check_new_name, draft_entry};

use l2_copies::L2Copies;
use refcount_copies::RefcountCopies;
use reference_counts::ReferenceCounts;
use space::{Halt, MIN_SPARE, Run, Space};

/// Where no more slices are left to copy, another pass is not worth it.
const FEW_LEFT: usize = 16;
/// After so many passes it is taken whatever is left: guests change more than can be copied.
const MAX_PASSES: u32 = 24;

/// See the module's page.
pub struct PreparedSnapshot<'a, S: Storage> {
    metadata: &'a ImageMetadata<S>,
    transactions: &'a Transactions,
    counts: ReferenceCounts,
    l2: L2Copies,
    refcounts: RefcountCopies,
    space: Space<'a, S>,
    /// How many clusters are ready for what changes last.
    spare: u64,
    /// One is prepared at a time.
    _alone: SemaphoreGuard<'a>,
}

/// What became of a preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preparation {
    /// The snapshot can be taken.
    Ready,
    /// It cannot be prepared, and has to be created at once, where nothing else can take the space that is left: there
    /// is little of it, another program has left a state of a machine after the disk, or the tables contradict each other.
    AtOnce,
    /// It is not wanted any more.
    Cancelled,
}

/// Begins to prepare a snapshot: nothing is copied yet.
pub(crate) async fn prepare_snapshot<'a, S: Storage>(
    metadata: &'a ImageMetadata<S>,
    transactions: &'a Transactions,
) -> Result<PreparedSnapshot<'a, S>> {
    metadata.check_writable()?;
    check_no_data_file(metadata)?;
    metadata.check_intact()?;
    metadata.begin_changes().await?;
    let alone = transactions.begin_preparation().await;
    let geometry = metadata.geometry();
    Ok(PreparedSnapshot {
        metadata,
        transactions,
        counts: ReferenceCounts::new(geometry),
        l2: L2Copies::new(geometry),
        refcounts: RefcountCopies::new(geometry),
        space: Space::new(metadata),
        spare: MIN_SPARE,
        _alone: alone,
    })
}

impl<S: Storage> PreparedSnapshot<'_, S> {
    /// Copies what changed, until little is left. Stops soon after `is_cancelled` says so.
    ///
    /// # Errors
    /// As [`Snapshots::create`](crate::Snapshots::create), as far as it is known yet.
    pub async fn update(
        &mut self,
        new: &NewSnapshot,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Preparation> {
        self.space.set_closed(false);
        loop {
            if !self.metadata.lock().tables.is_watched() {
                self.begin();
            }
            if self.has_more_than_disk() {
                return Ok(Preparation::AtOnce);
            }
            let outcome = self.run_passes(new, is_cancelled).await;
            let is_watched = self.metadata.lock().tables.is_watched();
            match outcome {
                Err(Halt::Cancelled) => return Ok(Preparation::Cancelled),
                Err(Halt::Implausible) => return Ok(Preparation::AtOnce),
                Err(Halt::Failed(error)) if error.kind() == ErrorKind::NoSpace => {
                    return Ok(Preparation::AtOnce);
                }
                // What was read may have been no table any more.
                _ if !is_watched => self.metadata.writer().check_failure()?,
                Ok(()) => return Ok(Preparation::Ready),
                Err(Halt::Failed(error)) => return Err(error),
                Err(Halt::NoSpare) => unreachable!("the tables are not frozen"),
            }
        }
    }

    /// Begins anew, with the clusters that it has.
    fn begin(&mut self) {
        let geometry = self.metadata.geometry();
        self.counts = ReferenceCounts::new(geometry);
        self.l2 = L2Copies::new(geometry);
        self.refcounts = RefcountCopies::new(geometry);
        self.space.put_all_back();
        self.metadata.lock().tables.begin_watch();
    }

    fn has_more_than_disk(&self) -> bool {
        let state = self.metadata.lock();
        let entries = self.metadata.geometry().l1_entries_for(state.tables.header().size);
        state.tables.l1().iter().skip(entries as usize).any(|&word| word != 0)
    }

    async fn run_passes(
        &mut self,
        new: &NewSnapshot,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Halt> {
        let mut before = usize::MAX;
        for _ in 0..MAX_PASSES {
            self.reserve(new).await?;
            // What could not be encoded is tried again.
            drop(self.copy_changes(is_cancelled).await?);
            self.space.fill(self.spare).await?;
            // So that little is left to write and to flush in the end, too.
            self.metadata.flush(SyncMode::Data).await?;
            let left = self.left();
            if left <= FEW_LEFT || left > before - before / 4 {
                break;
            }
            before = left;
        }
        Ok(())
    }

    /// How many slices have changed since they were copied.
    fn left(&self) -> usize {
        self.metadata.lock().tables.count_changed_slices()
    }

    /// Has clusters ready for all that is written while the tables are frozen.
    async fn reserve(&mut self, new: &NewSnapshot) -> Result<()> {
        let (header, l1, table) = {
            let state = self.metadata.lock();
            let header = state.tables.header().clone();
            (header, state.tables.l1().len() as u64, state.tables.refcount_table_entries())
        };
        let storage = self.metadata.storage();
        let on_disk = self.metadata.lock().tables.headers().disk().clone();
        let mut entries = snapshot_table::read(storage, &on_disk).await?.entries;
        check_new_name(storage.name(), &new.name, &entries)?;
        let in_snapshot = header.geometry.l1_entries_for(header.size);
        entries.push(draft_entry(new, header.size, &entries, in_snapshot as u32));
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

    /// Copies what changed since it was copied; why something of it could not be, as it is now.
    async fn copy_changes(
        &mut self,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Error>, Halt> {
        let Self { metadata, counts, l2, refcounts, space, .. } = self;
        l2.update(metadata, counts, space, is_cancelled).await?;
        refcounts.update(metadata, counts, space, is_cancelled).await
    }
}

impl<S: Storage> Drop for PreparedSnapshot<'_, S> {
    fn drop(&mut self) {
        self.metadata.lock().tables.end_watch();
    }
}
