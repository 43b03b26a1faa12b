//! Walks an L1 table and its L2 tables and changes entries on disk, while the image is not open.
//!
//! Only slices with changes are written, in whole sectors, so that after a crash each entry is
//! either the old or the new one. Nothing is durable before the storage is flushed.

use std::collections::{BTreeSet, HashSet};

use blockhouse_core::{ByteRange, Durability, Result, Storage};

use crate::qcow2::layout::entry::{self, Entry, Reference, l1_word};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::table_write::dirty_parts;
use crate::qcow2::layout::{table_io, words};

use super::counts::Counts;
use super::snapshot_survey::{L1Location, SnapshotSurvey};
use crate::qcow2::layout::cluster_ranges::ClusterRanges;

/// A change of entries.
pub(crate) trait Editor {
    /// The new word for an L1 entry.
    fn l1(&self, word: u64) -> u64;

    /// The new value of the `index`-th entry of an L2 table; `None` leaves it unchanged.
    fn l2(&self, table: &[u8], index: usize) -> Option<Entry>;
}

/// Changes the entries of L1 tables, and of the L2 tables to which the L1 entries refer after their
/// change. Each L2 table is changed once; holes of the file are skipped.
pub(crate) struct Edit<'a, S, E> {
    storage: &'a S,
    geometry: Geometry,
    editor: &'a E,
    reader: SparseReader<'a, S>,
    /// Offsets of the L2 tables that were visited.
    edited: HashSet<u64>,
    /// Whether this is a trial, which writes nothing.
    is_trial: bool,
    /// Whether any entry has changed or, in a trial, would change.
    has_changed: bool,
}

impl<'a, S: Storage, E: Editor> Edit<'a, S, E> {
    pub(crate) fn new(storage: &'a S, geometry: Geometry, editor: &'a E) -> Self {
        let reader = SparseReader::new(storage, geometry);
        let edited = HashSet::new();
        Self { storage, geometry, editor, reader, edited, is_trial: false, has_changed: false }
    }

    /// Whether an L1 table or its L2 tables have entries to change. Nothing is changed.
    ///
    /// # Errors
    /// Errors of the storage only.
    pub(crate) async fn would_change(mut self, l1: L1Location) -> Result<bool> {
        self.is_trial = true;
        self.l1(l1).await?;
        Ok(self.has_changed)
    }

    async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.has_changed = true;
        if self.is_trial {
            Ok(())
        } else {
            table_io::write(self.storage, offset, bytes, Durability::None).await
        }
    }

    /// Changes one L1 table and its L2 tables.
    ///
    /// # Errors
    /// Errors of the storage only.
    pub(crate) async fn l1(&mut self, l1: L1Location) -> Result<()> {
        let mut reader = SparseReader::new(self.storage, self.geometry);
        let mut rest = ByteRange::between(l1.offset, l1.offset + l1.length());
        while let Some((data, bytes)) = reader.read(&mut rest).await? {
            let mut words = words::words_of(&bytes);
            let mut changed = BTreeSet::new();
            for (index, word) in words.iter_mut().enumerate() {
                let old = std::mem::replace(word, self.editor.l1(*word));
                if old != *word {
                    changed.insert(index);
                }
                if let Ok(Some(table)) = entry::l1_reference(*word, self.geometry)
                    && table.offset < self.storage.size()
                    && self.edited.insert(table.offset)
                {
                    self.l2(table.offset).await?;
                }
            }
            for piece in dirty_parts(&words, &changed, data.offset(), self.geometry.slice_size()) {
                self.write(piece.offset, &piece.bytes).await?;
            }
        }
        Ok(())
    }

    async fn l2(&mut self, offset: u64) -> Result<()> {
        let (geometry, editor) = (self.geometry, self.editor);
        let mut rest = ByteRange::between(offset, offset + geometry.cluster_size());
        while let Some((data, mut table)) = self.reader.read(&mut rest).await? {
            let before = table.clone();
            for index in 0..table.len() / geometry.l2_entry_size() as usize {
                // An entry that differs from the new one only in ignored bits is not rewritten,
                // unless a check reports such a bit.
                if let Some(new) = editor.l2(&table, index)
                    && (Entry::read(&table, index, geometry) != Ok(new)
                        || Entry::is_copied_compressed(&table, index, geometry))
                {
                    new.write(&mut table, index, geometry);
                }
            }
            let step = geometry.slice_size() as usize;
            let slices = before.chunks(step).zip(table.chunks(step));
            for (offset, (old, new)) in (data.offset()..).step_by(step).zip(slices) {
                if old != new {
                    self.write(offset, new).await?;
                }
            }
        }
        Ok(())
    }
}

/// Removes from entries the parts that violate the format or point past the end of the file: see
/// [`Entry::sanitize`]. An L1 entry that cannot refer to an L2 table is cleared.
pub(crate) struct SanitizeEntries {
    geometry: Geometry,
    /// Number of clusters of the file.
    clusters: u64,
    /// Clusters that cannot have an L2 table: those of the header, L1 tables, and the snapshot
    /// table.
    taken: ClusterRanges,
}

impl SanitizeEntries {
    pub(crate) fn new(header: &Header, snapshots: &SnapshotSurvey, clusters: u64) -> Self {
        let geometry = header.geometry;
        let table = (header.snapshots_offset, snapshots.length);
        let l1_tables = snapshots.l1_tables().chain([L1Location::active(header)]);
        let l1_tables = l1_tables.filter(|l1| l1.is_possible(geometry));
        let tables = l1_tables.map(|l1| (l1.offset, l1.length())).chain([(0, 1), table]);
        let mut taken = ClusterRanges::default();
        for (offset, length) in tables {
            let end = geometry.clusters_for(offset.saturating_add(length)).min(clusters);
            taken.insert(geometry.cluster_of(offset)..end);
        }
        Self { geometry, clusters, taken }
    }
}

impl Editor for SanitizeEntries {
    fn l1(&self, word: u64) -> u64 {
        let is_table = |table: &Reference| {
            let cluster = self.geometry.cluster_of(table.offset);
            cluster < self.clusters && !self.taken.overlaps(&(cluster..cluster + 1))
        };
        let sanitized = entry::l1_without_reserved(word);
        let table = entry::l1_reference(sanitized, self.geometry).ok().flatten();
        table.filter(is_table).map_or(0, l1_word)
    }

    fn l2(&self, table: &[u8], index: usize) -> Option<Entry> {
        Some(Entry::sanitize(table, index, self.geometry, self.clusters))
    }
}

/// The wrong copied flags that are corrected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopiedFix {
    /// Missing flags are set.
    Set,
    /// Flags of clusters whose refcount is not one are cleared.
    Clear,
}

/// Makes the copied flag (bit 63: the refcount is one) agree with the refcounts.
pub(crate) struct CopiedFlagEditor<'a> {
    pub(crate) geometry: Geometry,
    /// The refcounts, by cluster.
    pub(crate) counts: &'a Counts,
    /// The flags that are corrected.
    pub(crate) fix: CopiedFix,
}

impl CopiedFlagEditor<'_> {
    fn corrected(&self, reference: Reference) -> Reference {
        let is_one = self.counts.get(self.geometry.cluster_of(reference.offset)) == 1;
        let copied = match self.fix {
            CopiedFix::Set => reference.copied || is_one,
            CopiedFix::Clear => reference.copied && is_one,
        };
        Reference { copied, ..reference }
    }
}

impl Editor for CopiedFlagEditor<'_> {
    fn l1(&self, word: u64) -> u64 {
        match entry::l1_reference(word, self.geometry) {
            Ok(Some(table)) => l1_word(self.corrected(table)),
            _ => word,
        }
    }

    fn l2(&self, table: &[u8], index: usize) -> Option<Entry> {
        match Entry::read(table, index, self.geometry) {
            Ok(Entry::Standard { host: Some(host), subclusters })
                if !self.geometry.has_data_file =>
            {
                Some(Entry::Standard { host: Some(self.corrected(host)), subclusters })
            }
            _ => None,
        }
    }
}
