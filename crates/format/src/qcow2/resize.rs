//! Longer and shorter disks.
//!
//! A longer one gets its L1 entries first and its size last, so that the caller can make what would come
//! to light read as zeros in between. A shorter one loses the clusters beyond its new end first: what a
//! crash leaves has the old size, and nothing can come back when the disk grows again. Its size and the
//! number of L1 entries change with one write of the header.

use std::ops::Range;
use std::sync::atomic::Ordering;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage, SyncMode};

use super::deferred_free::{DeferredFree, Punch, Users};
use super::entry::{Entry, Reference};
use super::slice_cache::{DataStability, SliceId, SliceKind};
use super::state::{Blocked, State, Step};
use super::{Qcow2, table_io};

/// The largest L1 table, in bytes.
const MAX_L1_BYTES: u64 = 32 << 20;
/// After how many clusters they are given back, so that the list of them stays short.
const CLUSTERS_TOGETHER: u64 = 1 << 19;

impl<S: Storage> Qcow2<S> {
    /// As [`Format::prepare_resize`](crate::Format::prepare_resize).
    pub async fn prepare_resize(&self, size: u64) -> Result<()> {
        self.check_resize(size)?;
        self.begin_changes().await?;
        self.grow_data(size).await?;
        let grown = self
            .step(|state| {
                state.check_thawed()?;
                state.grow_l1(size)
            })
            .await;
        self.marking(grown).await
    }

    /// As [`Format::resize`](crate::Format::resize), to a larger size only. What lies beyond the old
    /// end in the last cluster or in the backing file comes to light, unless it was made zeros before.
    pub async fn resize(&self, size: u64) -> Result<()> {
        self.check_resize(size)?;
        if size < self.size() {
            let what = format!("cannot make a disk of {} bytes shorter: {size}", self.size());
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage().name()));
        }
        self.begin_changes().await?;
        self.grow_data(size).await?;
        let grown = self.step(|state| {
            state.check_thawed()?;
            state.grow_l1(size)?;
            state.header.size = size;
            state.version += 1;
            Ok(())
        });
        self.marking(grown.await).await?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    /// As [`Format::shrink`](crate::Format::shrink).
    pub async fn shrink(&self, size: u64) -> Result<()> {
        self.check_resize(size)?;
        if size > self.size() {
            let what = format!("cannot shrink a disk of {} bytes to {size}", self.size());
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage().name()));
        }
        self.begin_changes().await?;
        let emptied = self.empty_last_table(size).await;
        self.marking(emptied).await?;
        let kept = self.geometry.l1_entries_for(size) as usize;
        let tables = self.state.lock().l1.len();
        self.drop_l2_tables(kept..tables).await?;
        self.step(|state| {
            state.check_thawed()?;
            state.cut(size)
        })
        .await?;
        if let Some(data) = &self.data {
            // The data is not cut off before the disk is known to be shorter.
            self.flush(SyncMode::Data).await?;
            data.resize(size).await?;
        }
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    /// As [`Format::make_empty`](crate::Format::make_empty).
    pub async fn make_empty(&self) -> Result<()> {
        self.check_writable()?;
        self.check_intact()?;
        self.begin_changes().await?;
        let tables = self.geometry.l1_entries_for(self.size()) as usize;
        self.drop_l2_tables(0..tables).await?;
        if let Some(data) = &self.data {
            // Nothing refers to it any more. Only a hint, as everywhere.
            let all = ByteRange::between(0, self.end());
            if let Some(range) = table_io::whole_blocks(data, all) {
                let _ = data.discard(range).await;
            }
        }
        Ok(())
    }

    /// Takes these L2 tables out of the L1 table and gives all they refer to back, durably.
    async fn drop_l2_tables(&self, indexes: Range<usize>) -> Result<()> {
        // Tables that are going to be free must not be written any more.
        self.flush(SyncMode::Data).await?;
        let together = (CLUSTERS_TOGETHER / self.geometry.l2_entries()).max(1) as usize;
        for (count, index) in indexes.enumerate() {
            let dropped = self
                .step(|state| {
                    state.check_thawed()?;
                    state.drop_l2_table(index)
                })
                .await;
            self.marking(dropped).await?;
            if count % together == together - 1 {
                self.state.lock().frees.join_pending();
                self.flush(SyncMode::Data).await?;
            }
        }
        self.state.lock().frees.join_pending();
        self.flush(SyncMode::Data).await
    }

    /// Takes the clusters beyond `size` out of the L2 table that is kept in part.
    async fn empty_last_table(&self, size: u64) -> Result<()> {
        let geometry = self.geometry;
        let first = geometry.clusters_for(size);
        let end = geometry.l1_entries_for(size) * geometry.l2_entries();
        let mut cluster = first;
        while cluster < end {
            cluster = self
                .step(|state| {
                    state.check_thawed()?;
                    state.empty_slice(cluster)
                })
                .await?;
        }
        Ok(())
    }

    fn check_resize(&self, size: u64) -> Result<()> {
        self.check_writable()?;
        self.check_intact()?;
        let invalid =
            |what: String| Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage().name()));
        if !size.is_multiple_of(512) {
            return invalid(format!("a disk of {size} bytes is no multiple of 512"));
        }
        if self.geometry.l1_entries_for(size) * 8 > MAX_L1_BYTES {
            return invalid(format!("a disk of {size} bytes is too large for its cluster size"));
        }
        if self.state.lock().header.snapshots > 0 && self.geometry.version < 3 {
            return invalid("version 2 snapshots do not say how large the disk was".into());
        }
        Ok(())
    }
}

impl State {
    /// Makes the L1 table reach as far as a disk of `size` bytes.
    fn grow_l1(&mut self, size: u64) -> Step<()> {
        let geometry = self.geometry;
        let entries = geometry.l1_entries_for(size);
        if entries <= self.l1.len() as u64 {
            return Ok(());
        }
        let old = geometry.cluster_of(self.header.l1_offset);
        let old_count = geometry.clusters_for(self.l1.len() as u64 * 8);
        let new = self.carve(geometry.clusters_for(entries * 8))?;
        if old_count > 0 {
            self.defer_free(DeferredFree::of(old..old + old_count));
        }
        self.metadata.extend(new.clone());
        self.l1.resize(entries as usize, 0);
        self.header.l1_offset = geometry.offset_of(new.start);
        self.header.l1_entries = entries as u32;
        self.version += 1;
        Ok(())
    }

    /// Empties the L2 entries from that of `cluster` to the end of its slice. Answers the cluster after
    /// them.
    fn empty_slice(&mut self, cluster: u64) -> Step<u64> {
        let geometry = self.geometry;
        let place = geometry.l2_place(cluster);
        let next = cluster + geometry.slice_l2_entries() - place.index as u64;
        self.wait_for_changes(cluster, next)?;
        if self.l2_table(place.l1_index)?.is_none() {
            return Ok(next);
        }
        let slice = self.own_l2_slice(cluster)?;
        let indexes = place.index..geometry.slice_l2_entries() as usize;
        let entries: Vec<Entry> =
            indexes.clone().map(|index| self.entry(slice, index)).collect::<Step<_>>()?;
        // Where there is a backing file, a longer disk must not show it here again.
        let is_hidden = geometry.version >= 3 && self.header.backing.is_some();
        let new = if is_hidden { Entry::ZERO } else { Entry::UNALLOCATED };
        for (index, old) in indexes.zip(entries).filter(|&(_, old)| old != Entry::UNALLOCATED) {
            self.defer_free_of(old, new, Punch::Yes);
            let bytes = self.cache.change(slice.offset, index, DataStability::Stable);
            new.write(bytes, index, geometry);
        }
        self.version += 1;
        Ok(next)
    }

    /// Takes an L2 table and all that it refers to out of the L1 table.
    fn drop_l2_table(&mut self, l1_index: usize) -> Step<()> {
        let geometry = self.geometry;
        let first = l1_index as u64 * geometry.l2_entries();
        self.wait_for_changes(first, first + geometry.l2_entries())?;
        let Some(table) = self.l2_table(l1_index)? else { return Ok(()) };
        // What a snapshot refers to as well is not the host's to take.
        let punch = if table.is_sole() { Punch::Yes } else { Punch::No };
        for entry in self.entries_of(table)? {
            self.defer_free_of(entry, Entry::UNALLOCATED, punch);
        }
        self.l1[l1_index] = 0;
        self.l1_changed.insert(l1_index);
        let cluster = geometry.cluster_of(table.offset);
        let users = if table.is_sole() { Users::None } else { Users::Others };
        self.defer_free(DeferredFree { clusters: cluster..cluster + 1, punch, users });
        self.version += 1;
        Ok(())
    }

    /// All entries of an L2 table.
    fn entries_of(&mut self, table: Reference) -> Step<Vec<Entry>> {
        let geometry = self.geometry;
        let offsets = (0..geometry.cluster_size()).step_by(geometry.slice_size() as usize);
        let slices = offsets.map(|offset| table.offset + offset);
        let slices = slices.map(|offset| SliceId { offset, kind: SliceKind::L2 });
        // All slices first: the step begins anew for each that is missing.
        for slice in slices.clone() {
            self.ensure(slice)?;
        }
        let mut entries = Vec::with_capacity(geometry.l2_entries() as usize);
        for slice in slices {
            for index in 0..geometry.slice_l2_entries() as usize {
                entries.push(self.entry(slice, index)?);
            }
        }
        Ok(entries)
    }

    fn wait_for_changes(&mut self, first: u64, end: u64) -> Step<()> {
        if self.cache.is_crowded() {
            return Err(Blocked::Crowded);
        }
        if self.pending.free_from(first, end).map_err(Blocked::Wait)? < end {
            // Whom to wait for is known at its first cluster only.
            for cluster in first..end {
                self.pending.free_from(cluster, cluster + 1).map_err(Blocked::Wait)?;
            }
        }
        match self.pending.overwrites_of(&(first..end)) {
            Some(event) => Err(Blocked::Wait(event)),
            None => Ok(()),
        }
    }

    /// The disk ends earlier, and with it the L1 table. Nothing beyond is in use any more, durably.
    fn cut(&mut self, size: u64) -> Step<()> {
        let geometry = self.geometry;
        // A table of no entries at all is nothing that others are used to.
        let entries = geometry.l1_entries_for(size).max(1).min(self.l1.len() as u64);
        let start = geometry.cluster_of(self.header.l1_offset);
        let [kept, old] =
            [entries, self.l1.len() as u64].map(|count| start + geometry.clusters_for(count * 8));
        if kept < old {
            self.defer_free(DeferredFree { punch: Punch::Yes, ..DeferredFree::of(kept..old) });
        }
        self.l1.truncate(entries as usize);
        self.header.l1_entries = entries as u32;
        self.header.size = size;
        self.version += 1;
        Ok(())
    }
}
