//! Counting who refers to which cluster, by reading every table of an image.
//!
//! What is wrong on the way is told and passed over, so that one damaged entry does not hide the
//! rest. The tables are read as they are on disk, each once, however many refer to it: so no image
//! takes longer than its file is long.

use std::collections::{BTreeMap, HashSet};

use blockhouse_core::{Result, Storage};

use super::entry::{self, Entry};
use super::geometry::Geometry;
use super::header::Header;
use super::snapshots::{L1Place, SnapshotPlaces};
use super::{bitmaps, table_io};

/// How often each cluster of the file is referred to, and what was wrong.
pub(crate) struct References<'a, S> {
    storage: &'a S,
    header: &'a Header,
    geometry: Geometry,
    /// By host cluster.
    pub(crate) counts: Vec<u32>,
    /// Guest clusters with a place of their own, or compressed.
    pub(crate) allocated: u64,
    pub(crate) compressed: u64,
    /// Allocated guest clusters that do not lie behind the one before them.
    pub(crate) fragmented: u64,
    /// What is wrong, in words.
    pub(crate) problems: Vec<String>,
    pub(crate) corruptions: u64,
    /// Clusters of L1 tables.
    l1_clusters: HashSet<u64>,
    /// L2 tables by offset, and how many L1 entries refer to each.
    l2_tables: BTreeMap<(u64, Which), u32>,
    /// How many of the corruptions are of the refcount table, which says nothing of who refers to
    /// what.
    pub(crate) broken_refcounts: u64,
    /// Clusters of the refcount table and refcount blocks.
    pub(crate) refcount_clusters: Vec<u64>,
}

/// How many problems are told in words.
const MOST_WORDS: usize = 1000;

impl<'a, S: Storage> References<'a, S> {
    /// Counts all references.
    ///
    /// # Errors
    /// Only what the storage answers.
    pub(crate) async fn count(storage: &'a S, header: &'a Header) -> Result<Self> {
        let geometry = header.geometry;
        let clusters = geometry.clusters_for(storage.size());
        let mut references = Self {
            storage,
            header,
            geometry,
            counts: vec![0; clusters as usize],
            allocated: 0,
            compressed: 0,
            fragmented: 0,
            problems: Vec::new(),
            corruptions: 0,
            l1_clusters: HashSet::new(),
            l2_tables: BTreeMap::new(),
            broken_refcounts: 0,
            refcount_clusters: Vec::new(),
        };
        references.add("the header", 0, geometry.cluster_size());
        references.walk_l1(L1Place::active(header), Which::Active).await?;
        references.walk_snapshots().await?;
        references.walk_l2_tables().await?;
        references.walk_bitmaps().await?;
        references.walk_refcounts().await?;
        Ok(references)
    }

    /// Something is wrong.
    pub(crate) fn problem(&mut self, what: String) {
        self.corruptions += 1;
        if self.problems.len() < MOST_WORDS {
            self.problems.push(what);
        }
    }

    /// `what` refers to these bytes.
    fn add(&mut self, what: &str, offset: u64, length: u64) {
        self.add_times(what, offset, length, 1);
    }

    /// So many refer to these bytes as `what`.
    fn add_times(&mut self, what: &str, offset: u64, length: u64, times: u32) {
        if length == 0 {
            return;
        }
        let first = self.geometry.cluster_of(offset);
        let end = self.geometry.clusters_for(offset.saturating_add(length));
        let count = self.counts.len() as u64;
        if end > count {
            self.problem(format!("{what} at offset {offset} lies beyond the end of the file"));
        }
        for cluster in first.min(count)..end.min(count) {
            let counted = &mut self.counts[cluster as usize];
            *counted = counted.saturating_add(times);
        }
    }

    async fn walk_l1(&mut self, place: L1Place, which: Which) -> Result<()> {
        let bytes = place.length();
        if !place.is_possible(self.geometry) {
            self.problem(format!("an L1 table cannot be at offset {}", place.offset));
            return Ok(());
        }
        self.add("an L1 table", place.offset, bytes);
        let clusters = self.geometry.cluster_of(place.offset)
            ..self.geometry.clusters_for(place.offset.saturating_add(bytes));
        if clusters.end > self.counts.len() as u64 {
            return Ok(());
        }
        for cluster in clusters {
            if !self.l1_clusters.insert(cluster) {
                let offset = place.offset;
                self.problem(format!("the L1 table at offset {offset} shares its place"));
                return Ok(());
            }
        }
        let table = table_io::read(self.storage, place.offset, bytes as usize).await?;
        for (index, word) in table_io::words_of(&table).into_iter().enumerate() {
            match entry::l1_reference(word, self.geometry) {
                Ok(None) => {}
                Ok(Some(table)) => {
                    self.add("an L2 table", table.offset, self.geometry.cluster_size());
                    let times = self.l2_tables.entry((table.offset, which)).or_insert(0);
                    *times = times.saturating_add(1);
                }
                Err(violation) => {
                    let offset = place.offset + index as u64 * 8;
                    self.problem(format!("the L1 entry at offset {offset} {violation}"));
                }
            }
        }
        Ok(())
    }

    async fn walk_l2_tables(&mut self) -> Result<()> {
        for ((offset, which), times) in std::mem::take(&mut self.l2_tables) {
            self.walk_l2(offset, which, times).await?;
        }
        Ok(())
    }

    async fn walk_l2(&mut self, offset: u64, which: Which, times: u32) -> Result<()> {
        let geometry = self.geometry;
        if offset >= self.storage.size() {
            return Ok(());
        }
        let table = table_io::read(self.storage, offset, geometry.cluster_size() as usize).await?;
        let mut next = None;
        for index in 0..geometry.l2_entries() as usize {
            if Entry::is_copied_compressed(&table, index, geometry) {
                let offset = offset + index as u64 * geometry.l2_entry_size();
                let what = "is compressed, and marked as counting one";
                self.problem(format!("the L2 entry at offset {offset} {what}"));
            }
            match Entry::read(&table, index, geometry) {
                Ok(Entry::Standard { place: None, .. }) => {}
                Ok(Entry::Standard { place: Some(place), .. }) => {
                    if which == Which::Active {
                        self.allocated += 1;
                        self.fragmented += u64::from(next.is_some_and(|next| next != place.offset));
                        next = Some(place.offset + geometry.cluster_size());
                    }
                    // What lies in a data file is not counted.
                    if !geometry.has_data_file {
                        self.add_times("a cluster", place.offset, geometry.cluster_size(), times);
                    }
                }
                Ok(Entry::Compressed(place)) => {
                    if which == Which::Active {
                        self.allocated += 1;
                        self.compressed += 1;
                        // None fills its place, so each is read with a part of its neighbours.
                        self.fragmented += 1;
                    }
                    self.add_times("a compressed cluster", place.offset, place.length, times);
                }
                Err(violation) => {
                    let offset = offset + index as u64 * geometry.l2_entry_size();
                    self.problem(format!("the L2 entry at offset {offset} {violation}"));
                }
            }
        }
        Ok(())
    }

    async fn walk_snapshots(&mut self) -> Result<()> {
        let places = SnapshotPlaces::read(self.storage, self.header).await?;
        for &l1 in &places.l1_tables {
            self.walk_l1(l1, Which::Snapshot).await?;
        }
        self.add("the snapshot table", self.header.snapshots_offset, places.length);
        places.problem.into_iter().for_each(|problem| self.problem(problem));
        Ok(())
    }

    async fn walk_bitmaps(&mut self) -> Result<()> {
        let (storage, header) = (self.storage, self.header);
        let add = |what: &str, offset, length| self.add(what, offset, length);
        let problem = bitmaps::walk(storage, header, add).await?;
        problem.into_iter().for_each(|problem| self.problem(problem));
        Ok(())
    }

    async fn walk_refcounts(&mut self) -> Result<()> {
        let geometry = self.geometry;
        let before = self.corruptions;
        let offset = self.header.refcount_table_offset;
        let bytes = u64::from(self.header.refcount_table_clusters) << geometry.cluster_bits;
        self.add_refcounts("the refcount table", offset, bytes);
        let table = table_io::read(self.storage, offset, bytes as usize).await?;
        for (index, word) in table_io::words_of(&table).into_iter().enumerate() {
            match entry::refcount_block(word, geometry) {
                Ok(None) => {}
                Ok(Some(block)) => {
                    self.add_refcounts("a refcount block", block, geometry.cluster_size());
                }
                Err(violation) => {
                    let offset = offset + index as u64 * 8;
                    let what = format!("the refcount table's entry at offset {offset} {violation}");
                    self.problem(what);
                }
            }
        }
        self.find_shared_refcounts();
        self.broken_refcounts = self.corruptions - before;
        Ok(())
    }

    fn add_refcounts(&mut self, what: &str, offset: u64, length: u64) {
        self.add(what, offset, length);
        let clusters =
            self.geometry.cluster_of(offset)..self.geometry.clusters_for(offset + length);
        let inside = clusters.filter(|&cluster| cluster < self.counts.len() as u64);
        self.refcount_clusters.extend(inside);
    }

    /// Refcounts must have their clusters alone, whatever these count: they are changed in place.
    fn find_shared_refcounts(&mut self) {
        for cluster in self.refcount_clusters.clone() {
            if self.counts[cluster as usize] != 1 {
                let offset = self.geometry.offset_of(cluster);
                self.problem(format!("the refcounts at offset {offset} share their place"));
            }
        }
    }
}

/// Whose tables are walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Which {
    Active,
    Snapshot,
}
