//! Going through an L1 table and its L2 tables and changing entries on disk, outside of any opened
//! image.
//!
//! Only what changes is written, in pieces that are whole sectors, so that each entry is the old or the
//! new one after a crash. Nothing is durable before the storage is flushed.

use std::collections::{BTreeSet, HashSet};

use blockhouse_core::{Durability, Result, Storage};

use super::entry::{self, Entry, Ownership, Reference, l1_word};
use super::geometry::Geometry;
use super::header::Header;
use super::round::entries;
use super::snapshots::{L1Place, SnapshotPlaces};
use super::table_io;

/// What becomes of entries.
pub(crate) trait Editor {
    /// The new word for an L1 entry.
    fn l1(&self, word: u64) -> u64;

    /// The new entry for the `index`-th one of an L2 table; `None` leaves it as it is.
    fn l2(&self, table: &[u8], index: usize) -> Option<Entry>;
}

/// Changes the entries of an L1 table and of the L2 tables that it refers to afterwards.
pub(crate) async fn edit<S: Storage>(
    storage: &S,
    geometry: Geometry,
    l1: L1Place,
    editor: &impl Editor,
) -> Result<()> {
    let bytes = table_io::read(storage, l1.offset, l1.length() as usize).await?;
    let mut words = table_io::words_of(&bytes);
    let mut changed = BTreeSet::new();
    for (index, word) in words.iter_mut().enumerate() {
        let old = std::mem::replace(word, editor.l1(*word));
        if old != *word {
            changed.insert(index);
        }
        if let Ok(Some(table)) = entry::l1_reference(*word, geometry)
            && table.offset < storage.size()
        {
            edit_l2(storage, geometry, table.offset, editor).await?;
        }
    }
    for piece in entries(&words, &changed, l1.offset, geometry.slice_size()) {
        table_io::write(storage, piece.offset, &piece.bytes, Durability::None).await?;
    }
    Ok(())
}

async fn edit_l2<S: Storage>(
    storage: &S,
    geometry: Geometry,
    offset: u64,
    editor: &impl Editor,
) -> Result<()> {
    let mut table = table_io::read(storage, offset, geometry.cluster_size() as usize).await?;
    let before = table.clone();
    for index in 0..geometry.l2_entries() as usize {
        // An entry that says the same in other bits (ignored ones) stays as it is, but for those that a
        // check complains of.
        if let Some(new) = editor.l2(&table, index)
            && (Entry::read(&table, index, geometry) != Ok(new)
                || Entry::is_copied_compressed(&table, index, geometry))
        {
            new.write(&mut table, index, geometry);
        }
    }
    let step = geometry.slice_size() as usize;
    for (index, (old, new)) in before.chunks(step).zip(table.chunks(step)).enumerate() {
        if old != new {
            let offset = offset + (index * step) as u64;
            table_io::write(storage, offset, new, Durability::None).await?;
        }
    }
    Ok(())
}

/// Makes entries keep to the format and to the file: see [`Entry::salvage`]. An L1 entry that refers to
/// no L2 table is emptied.
pub(crate) struct Scrub {
    geometry: Geometry,
    /// Of the file.
    clusters: u64,
    /// Where no L2 table can be: the header, L1 tables, the snapshot table.
    taken: HashSet<u64>,
}

impl Scrub {
    pub(crate) fn new(header: &Header, snapshots: &SnapshotPlaces, clusters: u64) -> Self {
        let geometry = header.geometry;
        let table = (header.snapshots_offset, snapshots.length);
        let l1_tables = snapshots.l1_tables.iter().copied().chain([L1Place::active(header)]);
        let l1_tables = l1_tables.filter(|place| place.is_possible(geometry));
        let places = l1_tables.map(|place| (place.offset, place.length())).chain([(0, 1), table]);
        let mut taken = HashSet::new();
        for (offset, length) in places {
            let end = geometry.clusters_for(offset.saturating_add(length)).min(clusters);
            taken.extend(geometry.cluster_of(offset)..end);
        }
        Self { geometry, clusters, taken }
    }
}

impl Editor for Scrub {
    fn l1(&self, word: u64) -> u64 {
        let is_table = |table: &Reference| {
            let cluster = self.geometry.cluster_of(table.offset);
            cluster < self.clusters && !self.taken.contains(&cluster)
        };
        let salvaged = entry::l1_without_reserved(word);
        let table = entry::l1_reference(salvaged, self.geometry).ok().flatten();
        table.filter(is_table).map_or(0, l1_word)
    }

    fn l2(&self, table: &[u8], index: usize) -> Option<Entry> {
        Some(Entry::salvage(table, index, self.geometry, self.clusters))
    }
}

/// Makes the bit "the refcount is one" tell the truth.
pub(crate) struct Ownerships<'a> {
    pub(crate) geometry: Geometry,
    /// The refcounts, by cluster.
    pub(crate) counts: &'a [u32],
    /// Which of the two is corrected.
    pub(crate) wanted: Ownership,
}

impl Ownerships<'_> {
    fn corrected(&self, reference: Reference) -> Ownership {
        let cluster = self.geometry.cluster_of(reference.offset) as usize;
        let is_sole = self.counts.get(cluster) == Some(&1);
        match self.wanted {
            Ownership::Sole if is_sole => Ownership::Sole,
            Ownership::Shared if !is_sole => Ownership::Shared,
            _ => reference.ownership,
        }
    }
}

impl Editor for Ownerships<'_> {
    fn l1(&self, word: u64) -> u64 {
        match entry::l1_reference(word, self.geometry) {
            Ok(Some(table)) => l1_word(Reference { ownership: self.corrected(table), ..table }),
            _ => word,
        }
    }

    fn l2(&self, table: &[u8], index: usize) -> Option<Entry> {
        match Entry::read(table, index, self.geometry) {
            Ok(Entry::Standard { place: Some(place), units }) if !self.geometry.has_data_file => {
                let place = Reference { ownership: self.corrected(place), ..place };
                Some(Entry::Standard { place: Some(place), units })
            }
            _ => None,
        }
    }
}
