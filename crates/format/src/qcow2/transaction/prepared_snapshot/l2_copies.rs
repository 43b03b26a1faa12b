//! The L2 tables of a new snapshot.
//!
//! The snapshot and the active L1 table are to share all L2 tables, and no cluster of theirs is to be changed in
//! place. So a table that has COPIED flags gets a copy without them in a new cluster. A table that has none, which
//! an older snapshot shares, is shared once more. What the tables refer to is counted
//! ([`ReferenceCounts`](super::reference_counts::ReferenceCounts)), from the same bytes that were copied: a copy says
//! what to take back when its table has changed.

use std::collections::HashMap;

use blockhouse_core::{Error, ErrorKind, Result, Storage, WorkBudget};
use futures_util::stream::{self, StreamExt};

use crate::qcow2::layout::entry::{Entry, Reference, l1_word};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::tables::SliceKind;

use super::super::ImageMetadata;
use super::super::metadata_transaction::references;
use super::page_check::check_new_pages;
use super::reference_counts::ReferenceCounts;
use super::space::{Halt, Space, check_wanted};
use super::table_parts::{MAX_IN_FLIGHT, MAX_SLICES_IN_FLIGHT, Part, look_at, read, write};

/// What became of the table of an L1 entry.
#[derive(Clone, Copy)]
struct Table {
    /// The active one.
    active: Reference,
    /// The copy that takes its place.
    copy: Option<u64>,
}

/// See the module's page.
pub(super) struct L2Copies {
    geometry: Geometry,
    /// By L1 entry.
    tables: Vec<Option<Table>>,
    /// The L1 entries of tables that have copies.
    by_offset: HashMap<u64, usize>,
    budget: WorkBudget,
}

/// An L1 entry that is to be looked at.
struct Look {
    index: usize,
    reference: Option<Reference>,
    /// What was counted for it before.
    counted: Option<Vec<u8>>,
    now: Option<Vec<u8>>,
}

impl L2Copies {
    pub(super) fn new(geometry: Geometry) -> Self {
        let (tables, by_offset) = (Vec::new(), HashMap::new());
        Self { geometry, tables, by_offset, budget: WorkBudget::new() }
    }

    /// The L1 table that refers to the copies.
    pub(super) fn l1(&self) -> Vec<u64> {
        let word = |table: &Option<Table>| {
            let offset = table.map(|table| table.copy.unwrap_or(table.active.offset));
            offset.map_or(0, |offset| l1_word(Reference { offset, copied: false }))
        };
        self.tables.iter().map(word).collect()
    }

    /// The tables that copies take the place of: nothing refers to them any more, but maybe older snapshots.
    pub(super) fn replaced(&self) -> impl Iterator<Item = Reference> {
        let all = self.tables.iter().flatten();
        all.filter(|table| table.copy.is_some()).map(|table| table.active)
    }

    /// Copies what changed since it was copied.
    pub(super) async fn update<S: Storage>(
        &mut self,
        metadata: &ImageMetadata<S>,
        counts: &mut ReferenceCounts,
        space: &mut Space<'_, S>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Halt> {
        let changed = self.changed_entries(metadata)?;
        space.check_room(changed.len())?;
        for some in changed.chunks(MAX_IN_FLIGHT) {
            check_wanted(is_cancelled)?;
            self.update_tables(metadata, some, counts, space).await?;
        }
        let slices = metadata.lock().tables.changed_slices(SliceKind::L2);
        for some in slices.chunks(MAX_SLICES_IN_FLIGHT) {
            check_wanted(is_cancelled)?;
            self.update_slices(metadata, some, counts).await?;
        }
        Ok(())
    }

    /// The L1 entries that are not as they were.
    fn changed_entries<S: Storage>(
        &mut self,
        metadata: &ImageMetadata<S>,
    ) -> Result<Vec<(usize, Option<Reference>)>> {
        let l1 = metadata.lock().tables.l1().to_vec();
        self.tables.resize(l1.len(), None);
        let pairs = references(metadata, &l1)?.into_iter().zip(&self.tables).enumerate();
        let changed = pairs.filter(|(_, (now, table))| *now != table.map(|table| table.active));
        Ok(changed.map(|(index, (now, _))| (index, now)).collect())
    }

    async fn update_tables<S: Storage>(
        &mut self,
        metadata: &ImageMetadata<S>,
        changed: &[(usize, Option<Reference>)],
        counts: &mut ReferenceCounts,
        space: &mut Space<'_, S>,
    ) -> Result<(), Halt> {
        let looks = changed.iter().map(|&(index, now)| self.look(metadata, index, now));
        let looks: Vec<_> = stream::iter(looks).buffered(MAX_IN_FLIGHT).collect().await;
        let mut writes = Vec::new();
        for look in looks {
            let Look { index, reference, counted, now } = look?;
            let name = metadata.storage().name();
            if let (Some(old), Some(counted)) = (self.tables[index].take(), counted) {
                let offset = old.copy.unwrap_or(old.active.offset);
                self.take_back(name, &counted, offset, counts).await?;
                let own = counts.remove(self.geometry.cluster_of(offset));
                own.ok_or_else(|| overwritten(name, offset))?;
                self.by_offset.remove(&old.active.offset);
                old.copy.into_iter().for_each(|copy| space.put_back(copy));
            }
            let (Some(active), Some(mut bytes)) = (reference, now) else { continue };
            self.count(name, &bytes, active.offset, counts).await?;
            let mut copy = None;
            if self.clear_copied(&mut bytes).await || active.is_copied() {
                let offset = space.take().await?;
                copy = Some(offset);
                self.by_offset.insert(active.offset, index);
                writes.push(TableWrite { offset, bytes });
            }
            counts.add(self.geometry.cluster_of(copy.unwrap_or(active.offset)));
            self.tables[index] = Some(Table { active, copy });
            check_new_pages(metadata, counts).await?;
        }
        Ok(write(metadata, &writes).await?)
    }

    async fn look<S: Storage>(
        &self,
        metadata: &ImageMetadata<S>,
        index: usize,
        reference: Option<Reference>,
    ) -> Result<Look> {
        let whole =
            |offset| Part { kind: SliceKind::L2, offset, length: self.geometry.cluster_size() };
        let counted = match self.tables[index] {
            Some(old) => {
                let offset = old.copy.unwrap_or(old.active.offset);
                Some(read(metadata, whole(offset)).await?)
            }
            None => None,
        };
        let now = match reference {
            Some(reference) => Some(look_at(metadata, whole(reference.offset)).await?),
            None => None,
        };
        Ok(Look { index, reference, counted, now })
    }

    /// Copies slices that changed, of tables that have copies.
    async fn update_slices<S: Storage>(
        &mut self,
        metadata: &ImageMetadata<S>,
        slices: &[u64],
        counts: &mut ReferenceCounts,
    ) -> Result<(), Halt> {
        let looks = slices.iter().map(async |&offset| {
            let part =
                |offset| Part { kind: SliceKind::L2, offset, length: self.geometry.slice_size() };
            let copy = self.copy_of(offset);
            let counted = match copy {
                Some(copy) => Some((copy, read(metadata, part(copy)).await?)),
                None => None,
            };
            Ok((counted, look_at(metadata, part(offset)).await?))
        });
        let looks: Vec<Result<_>> =
            stream::iter(looks).buffered(MAX_SLICES_IN_FLIGHT).collect().await;
        let mut writes = Vec::new();
        for look in looks {
            let (counted, mut bytes) = look?;
            // Another table lies there: the L1 table tells of it.
            let Some((offset, counted)) = counted else { continue };
            let name = metadata.storage().name();
            self.take_back(name, &counted, offset, counts).await?;
            self.count(name, &bytes, offset, counts).await?;
            check_new_pages(metadata, counts).await?;
            self.clear_copied(&mut bytes).await;
            writes.push(TableWrite { offset, bytes });
        }
        Ok(write(metadata, &writes).await?)
    }

    /// Where the copy of a slice is.
    fn copy_of(&self, slice: u64) -> Option<u64> {
        let table = slice & !(self.geometry.cluster_size() - 1);
        let copy = self.tables[*self.by_offset.get(&table)?]?.copy?;
        Some(copy + (slice - table))
    }

    /// Counts what the entries refer to. `offset` is for messages.
    async fn count(
        &self,
        name: &str,
        l2: &[u8],
        offset: u64,
        counts: &mut ReferenceCounts,
    ) -> Result<()> {
        let add = |cluster| {
            counts.add(cluster);
            Some(())
        };
        self.for_each_cluster(name, l2, offset, add).await
    }

    /// Takes back what was counted for the entries of a copy, at `offset`.
    ///
    /// # Errors
    /// `Corrupt` where that is not what was counted: the copy was overwritten.
    async fn take_back(
        &self,
        name: &str,
        l2: &[u8],
        offset: u64,
        counts: &mut ReferenceCounts,
    ) -> Result<()> {
        self.for_each_cluster(name, l2, offset, |cluster| counts.remove(cluster)).await
    }

    /// Calls `with` for every reference to a cluster; `None` from it ends that.
    async fn for_each_cluster(
        &self,
        name: &str,
        l2: &[u8],
        offset: u64,
        mut with: impl FnMut(u64) -> Option<()>,
    ) -> Result<()> {
        let (step, geometry) = (self.geometry.slice_size() as usize, self.geometry);
        for (number, slice) in l2.chunks_exact(step).enumerate() {
            for index in 0..geometry.slice_l2_entries() as usize {
                let at = || {
                    let in_table = (number * step) as u64 + index as u64 * geometry.l2_entry_size();
                    offset + in_table
                };
                let entry = Entry::read(slice, index, geometry).map_err(|violation| {
                    Error::new(ErrorKind::Corrupt, format!("an L2 entry {violation}"))
                        .on(name)
                        .at(at())
                        .hint("check the image before using it")
                })?;
                let counted = match entry {
                    Entry::Standard { host: None, .. } => Some(()),
                    Entry::Standard { host: Some(host), .. } => {
                        with(geometry.cluster_of(host.offset))
                    }
                    Entry::Compressed(data) => data.host_clusters(geometry).try_for_each(&mut with),
                };
                counted.ok_or_else(|| overwritten(name, at()))?;
            }
            self.budget.spend(WorkBudget::QUANTUM / 4).await;
        }
        Ok(())
    }

    /// Takes the COPIED flags away; whether there were any.
    async fn clear_copied(&self, l2: &mut [u8]) -> bool {
        let mut had_any = false;
        for slice in l2.chunks_exact_mut(self.geometry.slice_size() as usize) {
            for index in 0..self.geometry.slice_l2_entries() as usize {
                if let Ok(Entry::Standard { host: Some(host), subclusters }) =
                    Entry::read(slice, index, self.geometry)
                    && host.is_copied()
                {
                    had_any = true;
                    let host = Some(Reference { copied: false, ..host });
                    Entry::Standard { host, subclusters }.write(slice, index, self.geometry);
                }
            }
            self.budget.spend(WorkBudget::QUANTUM / 4).await;
        }
        had_any
    }
}

/// The error of a copy that does not hold what was written to it: its cluster has another user, which the refcounts do
/// not tell of.
fn overwritten(name: &str, offset: u64) -> Error {
    Error::new(ErrorKind::Corrupt, "a new table was overwritten: a refcount is wrong")
        .on(name)
        .at(offset)
        .hint("check the image before using it")
}
