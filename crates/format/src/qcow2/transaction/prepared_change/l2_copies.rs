//! The active L2 tables after a change of the snapshots. A table whose COPIED flags change gets a
//! copy in a new cluster.
//!
//! A new snapshot and the active L1 table share all L2 tables, and no cluster of these tables may
//! be changed in place. So a table with COPIED flags, in its entries or its L1 entry, gets a copy
//! without these flags. A table without COPIED flags, which an older snapshot shares, is shared
//! once more. The references of the tables' entries are counted
//! ([`ReferenceCounts`](super::reference_counts::ReferenceCounts)) from the copied bytes. So if a
//! table changes, its copy has the references to subtract.
//!
//! When a snapshot is deleted, a cluster that only the snapshot and the disk shared has one
//! reference left, so its COPIED flag is set. The counted references are those of the snapshot,
//! which do not change. The number of references left also stays the same while an active entry
//! refers to the cluster: the entry is one of these references, and only a transaction, which ends
//! the watch, adds references. So a table is processed again only where the table itself changed.

use std::collections::HashMap;

use blockhouse_core::{Result, Storage};
use futures_util::stream::{self, StreamExt};

use crate::qcow2::layout::entry::{Reference, l1_word};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::tables::SliceKind;
use crate::qcow2::writeback::Metadata;

use super::super::metadata_transaction::references;
use super::l2_references::{L2References, Located, overwritten};
use super::page_check::check_new_pages;
use super::plan::Purpose;
use super::reference_counts::{Left, ReferenceCounts};
use super::space::{Halt, Space, check_wanted};
use super::table_parts::{MAX_IN_FLIGHT, MAX_SLICES_IN_FLIGHT, Part, look_at, read, write};

/// The new table of an L1 entry.
#[derive(Clone, Copy)]
struct Table {
    /// The active table.
    active: Reference,
    /// Offset of the copy that replaces the active table.
    copy: Option<u64>,
}

/// The L2 tables after the change; see the module's documentation.
pub(super) struct L2Copies {
    geometry: Geometry,
    purpose: Purpose,
    /// The tables, by the index of the L1 entry.
    tables: Vec<Option<Table>>,
    /// The index of the L1 entry of each table that has a copy, by the offset of the table.
    by_offset: HashMap<u64, usize>,
    entries: L2References,
}

/// An L1 entry to be processed.
struct Look {
    index: usize,
    reference: Option<Reference>,
    /// The L2 table whose references were counted for this entry before.
    counted: Option<Vec<u8>>,
    now: Option<Vec<u8>>,
}

impl L2Copies {
    pub(super) fn new(geometry: Geometry, purpose: Purpose) -> Self {
        let (tables, by_offset) = (Vec::new(), HashMap::new());
        Self { geometry, purpose, tables, by_offset, entries: L2References::new(geometry) }
    }

    /// The L1 table that refers to the copies.
    pub(super) fn l1(&self, counts: &ReferenceCounts) -> Vec<u64> {
        let is_single = |table: &Table| {
            let cluster = self.geometry.cluster_of(table.active.offset);
            table.copy.is_some() || table.active.is_copied() || counts.left(cluster) == Left::One
        };
        let word = |table: &Option<Table>| {
            let Some(table) = table else { return 0 };
            let offset = table.copy.unwrap_or(table.active.offset);
            let copied = self.purpose == Purpose::Delete && is_single(table);
            l1_word(Reference { offset, copied })
        };
        self.tables.iter().map(word).collect()
    }

    /// The tables that copies replace. After the change, only older snapshots may refer to them.
    pub(super) fn replaced(&self) -> impl Iterator<Item = Reference> {
        let all = self.tables.iter().flatten();
        all.filter(|table| table.copy.is_some()).map(|table| table.active)
    }

    /// Copies the tables that changed since they were copied.
    pub(super) async fn update<S: Storage>(
        &mut self,
        metadata: &Metadata<S>,
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
        let slices = metadata.lock().tables.watch.changed(SliceKind::L2);
        for some in slices.chunks(MAX_SLICES_IN_FLIGHT) {
            check_wanted(is_cancelled)?;
            self.update_slices(metadata, some, counts).await?;
        }
        Ok(())
    }

    /// The L1 entries that changed since the last update.
    fn changed_entries<S: Storage>(
        &mut self,
        metadata: &Metadata<S>,
    ) -> Result<Vec<(usize, Option<Reference>)>> {
        let l1 = metadata.lock().tables.l1().to_vec();
        self.tables.resize(l1.len(), None);
        let pairs = references(metadata, &l1)?.into_iter().zip(&self.tables).enumerate();
        let changed = pairs.filter(|(_, (now, table))| *now != table.map(|table| table.active));
        Ok(changed.map(|(index, (now, _))| (index, now)).collect())
    }

    async fn update_tables<S: Storage>(
        &mut self,
        metadata: &Metadata<S>,
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
            if let Some(old) = self.tables[index].take() {
                let offset = old.copy.unwrap_or(old.active.offset);
                if let Some(bytes) = &counted {
                    self.entries.take_back(Located { bytes, name, offset }, counts).await?;
                    let own = counts.remove(self.geometry.cluster_of(offset));
                    own.ok_or_else(|| overwritten(name, offset))?;
                }
                // Another table may have the offset by now.
                if self.by_offset.get(&old.active.offset) == Some(&index) {
                    self.by_offset.remove(&old.active.offset);
                }
                old.copy.into_iter().for_each(|copy| space.put_back(copy));
            }
            let (Some(active), Some(mut bytes)) = (reference, now) else { continue };
            let mut copy = None;
            let is_other = self.convert(&mut bytes, name, active.offset, counts).await?;
            if is_other || self.purpose == Purpose::Create && active.is_copied() {
                let offset = space.take().await?;
                copy = Some(offset);
                self.by_offset.insert(active.offset, index);
                writes.push(TableWrite { offset, bytes });
            }
            if self.purpose == Purpose::Create {
                counts.add(self.geometry.cluster_of(copy.unwrap_or(active.offset)));
            }
            self.tables[index] = Some(Table { active, copy });
            check_new_pages(metadata, counts).await?;
        }
        Ok(write(metadata, &writes).await?)
    }

    async fn look<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        index: usize,
        reference: Option<Reference>,
    ) -> Result<Look> {
        let whole =
            |offset| Part { kind: SliceKind::L2, offset, length: self.geometry.cluster_size() };
        let counted = match self.tables[index] {
            Some(old) if self.purpose == Purpose::Create => {
                let offset = old.copy.unwrap_or(old.active.offset);
                Some(read(metadata, whole(offset)).await?)
            }
            _ => None,
        };
        let now = match reference {
            Some(reference) => Some(look_at(metadata, whole(reference.offset)).await?),
            None => None,
        };
        Ok(Look { index, reference, counted, now })
    }

    /// Copies the changed slices of tables that have copies.
    async fn update_slices<S: Storage>(
        &mut self,
        metadata: &Metadata<S>,
        slices: &[u64],
        counts: &mut ReferenceCounts,
    ) -> Result<(), Halt> {
        let looks = slices.iter().map(async |&offset| {
            let part =
                |offset| Part { kind: SliceKind::L2, offset, length: self.geometry.slice_size() };
            let copy = self.copy_of(offset);
            let counted = match copy.filter(|_| self.purpose == Purpose::Create) {
                Some(copy) => Some(read(metadata, part(copy)).await?),
                None => None,
            };
            Ok((copy, counted, look_at(metadata, part(offset)).await?))
        });
        let looks: Vec<Result<_>> =
            stream::iter(looks).buffered(MAX_SLICES_IN_FLIGHT).collect().await;
        let mut writes = Vec::new();
        for look in looks {
            let (copy, counted, mut bytes) = look?;
            // Without a copy, the slice belongs to a table whose flags stay, or to a new table, to
            // which the L1 table refers.
            let Some(offset) = copy else { continue };
            let name = metadata.storage().name();
            if let Some(bytes) = &counted {
                self.entries.take_back(Located { bytes, name, offset }, counts).await?;
            }
            self.convert(&mut bytes, name, offset, counts).await?;
            check_new_pages(metadata, counts).await?;
            writes.push(TableWrite { offset, bytes });
        }
        Ok(write(metadata, &writes).await?)
    }

    /// Converts slices of a table to their content after the change. For a new snapshot, counts the
    /// references of their entries. Returns whether the content differs.
    async fn convert(
        &self,
        l2: &mut [u8],
        name: &str,
        offset: u64,
        counts: &mut ReferenceCounts,
    ) -> Result<bool> {
        match self.purpose {
            Purpose::Create => {
                self.entries.count(Located { bytes: l2, name, offset }, counts).await?;
                self.entries.clear_copied(l2).await
            }
            Purpose::Delete => self.entries.set_copied(l2, (name, offset), counts).await,
        }
    }

    /// Location of the copy of a slice.
    fn copy_of(&self, slice: u64) -> Option<u64> {
        let table = slice & !(self.geometry.cluster_size() - 1);
        let copy = self.tables[*self.by_offset.get(&table)?]?.copy?;
        Some(copy + (slice - table))
    }
}
