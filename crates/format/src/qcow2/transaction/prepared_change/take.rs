//! Completes a prepared change: copies the remaining changes, and switches the header.

use std::mem;
use std::ops::Range;
use std::time::Duration;

use blockhouse_core::{Result, Storage, SyncMode};

use crate::qcow2::allocator::{DeferredFree, Punch, Users};
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::snapshot_table::{self, Snapshot, SnapshotEntry, Table};
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::layout::words;

use super::super::freeze::FreezeGuard;
use super::super::snapshots::check_table;
use super::PreparedChange;
use super::plan::{Purpose, SnapshotPlan};
use super::reference_counts::ReferenceCounts;
use super::space::{Halt, Run};
use super::table_parts::write;
use super::unreferenced::Unreferenced;

/// The metadata that becomes active.
struct NewMetadata {
    header: Header,
    l1: Vec<u64>,
    refcount_table: Vec<u64>,
    /// The snapshot that is taken or deleted.
    snapshot: Snapshot,
    /// Clusters that lose one reference by the switch.
    replaced: Vec<DeferredFree>,
}

impl<S: Storage> PreparedChange<'_, S> {
    /// Makes the change durably. No change of the guest's data may be in flight. Returns the
    /// snapshot that is taken or deleted. Returns `None` without any change if guests changed too
    /// much since the last [update](Self::update), or the copies are invalid; the caller must then
    /// update again. `now` is the time of a new snapshot, since 1970-01-01 UTC.
    ///
    /// # Errors
    /// As [`Snapshots::create`](crate::Snapshots::create) and
    /// [`Snapshots::delete`](crate::Snapshots::delete).
    pub async fn take(&mut self, now: Duration) -> Result<Option<Snapshot>> {
        let metadata = self.metadata;
        metadata.check_writable()?;
        metadata.check_intact()?;
        metadata.autoclear().begin_changes().await?;
        let _alone = self.transactions.begin().await;
        let mut freeze = FreezeGuard::freeze(metadata).await?;
        if !metadata.lock().tables.watch.is_active() {
            return Ok(None);
        }
        self.space.set_closed(true);
        if let SnapshotPlan::Create(new) = &mut self.plan {
            new.created = now;
        }
        let made = match self.finish().await {
            Ok(made) => made,
            Err(Halt::Failed(error)) => return Err(error),
            Err(Halt::Implausible) => {
                // The copies are incomplete.
                metadata.lock().tables.watch.end();
                return Ok(None);
            }
            Err(Halt::NoSpare | Halt::Cancelled) => {
                self.spare = self.spare.saturating_mul(4);
                return Ok(None);
            }
        };
        metadata.sync(SyncMode::Data).await?;
        let left = self.space.leave();
        freeze.begin_switch();
        metadata.switch_header(made.header.clone()).await?;
        let switched = {
            let mut state = metadata.lock();
            let switched = state.tables.switch(made.header, made.l1, made.refcount_table);
            made.replaced.into_iter().for_each(|free| state.allocator.frees.defer(free));
            state.allocator.frees.join_pending();
            let left = left.into_iter().map(|cluster| cluster..cluster + 1);
            left.for_each(|cluster| state.allocator.frees.defer_unlinked(cluster));
            switched
        };
        if self.purpose() == Purpose::Delete {
            let counts = mem::replace(&mut self.counts, ReferenceCounts::new(metadata.geometry()));
            self.unreferenced = Some(Unreferenced::new(metadata, counts));
        }
        switched.inspect_err(|error| metadata.writer().record(error))?;
        freeze.end_switch();
        Ok(Some(made.snapshot))
    }

    /// Copies the remaining changes, and writes the tables that the new header refers to.
    async fn finish(&mut self) -> Result<NewMetadata, Halt> {
        if let Some(error) = self.copy_changes(&|| false).await? {
            return Err(error.into());
        }
        let (mut header, refcount_table) = {
            let state = self.metadata.lock();
            (state.tables.headers.disk().clone(), state.tables.refcount_table().to_vec())
        };
        let storage = self.metadata.storage();
        let Table { mut entries, length } = snapshot_table::read(storage, &header).await?;
        let mut replaced = self.replaced(&header, &refcount_table, length);
        let l1 = self.l2.l1(&self.counts);
        let of_disk = (header.geometry.l1_entries_for(header.size) as usize).min(l1.len());
        let changed = self.plan.change(storage.name(), header.size, of_disk, &mut entries)?;
        let refcount_table = self.refcounts.table(refcount_table);
        let mut writes = Vec::new();
        header.l1_offset = self.place(Run::L1, words::bytes_of(&l1), &mut writes)?;
        match self.purpose() {
            Purpose::Create => {
                let of_snapshot = words::bytes_of(&l1[..of_disk]);
                let place = self.place(Run::SnapshotL1, of_snapshot, &mut writes)?;
                // The last entry is the new snapshot.
                entries.last_mut().into_iter().for_each(|entry| entry.l1_offset = place);
            }
            Purpose::Delete => replaced.extend(self.l1_of(&changed)),
        }
        check_table(storage.name(), &entries)?;
        header.snapshots = entries.len() as u32;
        let table = snapshot_table::to_bytes(&entries);
        header.snapshots_offset = self.place(Run::SnapshotTable, table, &mut writes)?;
        let table = words::bytes_of(&refcount_table);
        header.refcount_table_offset = self.place(Run::RefcountTable, table, &mut writes)?;
        write(self.metadata, &writes).await?;
        let snapshot = changed.described(header.size);
        Ok(NewMetadata { header, l1, refcount_table, snapshot, replaced })
    }

    /// The deferred free of a snapshot's L1 table; `None` if the table is empty.
    fn l1_of(&self, entry: &SnapshotEntry) -> Option<DeferredFree> {
        let free = self.free(entry.l1_offset, u64::from(entry.l1_entries) * 8);
        (!free.clusters.is_empty()).then_some(free)
    }

    /// The deferred free of a table of this many bytes.
    fn free(&self, offset: u64, bytes: u64) -> DeferredFree {
        let geometry = self.metadata.geometry();
        let first = geometry.cluster_of(offset);
        let clusters: Range<u64> = first..first + geometry.clusters_for(bytes);
        DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) }
    }

    /// Adds the write of a table to `writes`. Returns the table's offset: 0 for an empty table.
    fn place(&self, run: Run, bytes: Vec<u8>, writes: &mut Vec<TableWrite>) -> Result<u64, Halt> {
        let clusters = self.space.run(run, bytes.len() as u64)?;
        if bytes.is_empty() {
            return Ok(0);
        }
        let offset = self.metadata.geometry().offset_of(clusters.start);
        writes.push(TableWrite { offset, bytes });
        Ok(offset)
    }

    /// The clusters of the tables that the new tables replace.
    fn replaced(&self, header: &Header, blocks: &[u64], snapshots: u64) -> Vec<DeferredFree> {
        let geometry = self.metadata.geometry();
        let mut replaced = vec![self.free(header.l1_offset, u64::from(header.l1_entries) * 8)];
        if header.snapshots > 0 {
            replaced.push(self.free(header.snapshots_offset, snapshots));
        }
        let table = u64::from(header.refcount_table_clusters) << geometry.cluster_bits;
        replaced.push(self.free(header.refcount_table_offset, table));
        let whole = |offset| self.free(offset, geometry.cluster_size());
        let block = |index: u64| blocks.get(index as usize).copied();
        replaced.extend(self.refcounts.replaced().filter_map(block).map(whole));
        replaced.extend(self.l2.replaced().map(|table| {
            if table.is_copied() {
                whole(table.offset)
            } else {
                let clusters = whole(table.offset).clusters;
                DeferredFree { users: Users::Others, ..DeferredFree::of(clusters) }
            }
        }));
        replaced.retain(|free| !free.clusters.is_empty());
        replaced
    }
}
