//! Counts the references to each cluster, by reading every table of an image.
//!
//! An error is recorded and the walk continues, so that one damaged entry does not hide the other
//! faults. Each L2 table is read once for the active disk and once for all snapshots, however many
//! references it has. Holes of the file are skipped. So time and memory depend on the data in the
//! file, not on its length.

use std::collections::BTreeMap;

use blockhouse_core::{ByteRange, Result, Storage, ToolProgress};

use crate::qcow2::layout::entry::{self, Entry};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::{EncryptionKind, Header};
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::{table_io, words};

use super::bitmaps;
use super::counts::Counts;
use super::finding::Finding;
use super::snapshot_survey::{L1Location, SnapshotSurvey};
use crate::qcow2::layout::cluster_ranges::ClusterRanges;

/// The number of references to each cluster of the file, and the faults that were found.
pub(crate) struct References<'a, S> {
    storage: &'a S,
    header: &'a Header,
    reader: SparseReader<'a, S>,
    geometry: Geometry,
    /// The number of references, by host cluster.
    pub(crate) counts: Counts,
    /// Guest clusters of the active disk that are compressed, or have a host cluster of their own.
    pub(crate) allocated: u64,
    pub(crate) compressed: u64,
    /// Allocated guest clusters that do not directly follow, in the file, the previous one of their
    /// L2 table, and all compressed ones.
    pub(crate) fragmented: u64,
    /// The faults, in words.
    pub(crate) problems: Vec<String>,
    /// The faults with their figures.
    pub(crate) findings: Vec<Finding>,
    pub(crate) corruptions: u64,
    /// Clusters of L1 tables.
    l1_clusters: ClusterRanges,
    /// The number of L1 entries that refer to each L2 table, by the table's offset and owner.
    l2_tables: BTreeMap<(u64, TableOwner), u32>,
    /// The number of corruptions of the refcount table and its blocks. They do not affect the count
    /// of references.
    pub(crate) broken_refcounts: u64,
    /// Clusters of the refcount table and refcount blocks.
    pub(crate) refcount_clusters: Vec<u64>,
}

/// The maximum number of problems that are described.
const MAX_PROBLEMS: usize = 1000;

impl<'a, S: Storage> References<'a, S> {
    /// Counts all references. Counting is the first part of a pass of `progress`; the second part
    /// reads the active tables again.
    ///
    /// # Errors
    /// Errors of the storage only.
    pub(crate) async fn count(
        storage: &'a S,
        header: &'a Header,
        progress: &ToolProgress,
    ) -> Result<Self> {
        let geometry = header.geometry;
        let mut references = Self {
            storage,
            header,
            reader: SparseReader::new(storage, geometry),
            geometry,
            counts: Counts::new(geometry.clusters_for(storage.size())),
            allocated: 0,
            compressed: 0,
            fragmented: 0,
            problems: Vec::new(),
            findings: Vec::new(),
            corruptions: 0,
            l1_clusters: ClusterRanges::default(),
            l2_tables: BTreeMap::new(),
            broken_refcounts: 0,
            refcount_clusters: Vec::new(),
        };
        references.add("the header", 0, geometry.cluster_size())?;
        if let Some(EncryptionKind::Luks(place)) = header.encryption {
            references.add("the encryption's header", place.offset(), place.length())?;
        }
        references.walk_l1(L1Location::active(header), TableOwner::Active).await?;
        references.walk_snapshots().await?;
        progress.begin(references.bytes_to_read());
        references.walk_l2_tables(progress).await?;
        references.walk_bitmaps().await?;
        references.walk_refcounts().await?;
        references.find_shared_l1();
        Ok(references)
    }

    /// Records a problem.
    pub(crate) fn problem(&mut self, what: String) {
        self.problems_of(1, what);
    }

    /// Records a problem with its figures.
    pub(crate) fn problem_with(&mut self, what: String, finding: Finding) {
        self.corruptions += 1;
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(what);
        }
        self.find(finding);
    }

    /// Adds a finding with its figures, without counting it as a corruption.
    pub(crate) fn find(&mut self, finding: Finding) {
        if self.findings.len() < MAX_PROBLEMS {
            self.findings.push(finding);
        }
    }

    /// Records this many problems with one description.
    fn problems_of(&mut self, count: u64, what: String) {
        self.corruptions += count;
        self.find(Finding::Words(what.clone()));
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(what);
        }
    }

    /// Counts one reference to these bytes. `what` describes the bytes in messages.
    fn add(&mut self, what: &str, offset: u64, length: u64) -> Result<()> {
        self.add_times(what, offset, length, 1)
    }

    /// Counts `times` references to these bytes. `what` describes the bytes in messages.
    fn add_times(&mut self, what: &str, offset: u64, length: u64, times: u32) -> Result<()> {
        if length == 0 {
            return Ok(());
        }
        let first = self.geometry.cluster_of(offset);
        let end = self.geometry.clusters_for(offset.saturating_add(length));
        let count = self.counts.clusters();
        if end > count {
            let what = format!("{what} at offset {offset} is past the end of the file");
            self.problem_with(what, Finding::PastEnd { offset, length });
        }
        self.counts.add(first.min(count)..end.min(count), times)
    }

    async fn walk_l1(&mut self, location: L1Location, which: TableOwner) -> Result<()> {
        let bytes = location.length();
        if !location.is_possible(self.geometry) {
            self.problem(format!("an L1 table has the invalid offset {}", location.offset));
            return Ok(());
        }
        self.add("an L1 table", location.offset, bytes)?;
        let clusters = location.clusters(self.geometry);
        if clusters.end > self.counts.clusters() {
            return Ok(());
        }
        if self.l1_clusters.overlaps(&clusters) {
            let offset = location.offset;
            self.problem(format!("the L1 table at offset {offset} overlaps another one"));
            return Ok(());
        }
        self.l1_clusters.insert(clusters);
        let mut rest = ByteRange::between(location.offset, location.offset + bytes);
        while let Some((data, table)) = self.reader.read(&mut rest).await? {
            for (at, word) in (data.offset()..).step_by(8).zip(words::words_of(&table)) {
                match entry::l1_reference(word, self.geometry) {
                    Ok(None) => {}
                    Ok(Some(table)) => {
                        self.add("an L2 table", table.offset, self.geometry.cluster_size())?;
                        let times = self.l2_tables.entry((table.offset, which)).or_insert(0);
                        *times = times.saturating_add(1);
                    }
                    Err(violation) => {
                        self.problem(format!("the L1 entry at offset {at} {violation}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// The length of all L2 tables found so far. Active tables are counted twice, because they are
    /// read twice.
    fn bytes_to_read(&self) -> u64 {
        let active = self.l2_tables.keys().filter(|(_, owner)| *owner == TableOwner::Active);
        ((self.l2_tables.len() + active.count()) as u64) << self.geometry.cluster_bits
    }

    async fn walk_l2_tables(&mut self, progress: &ToolProgress) -> Result<()> {
        for ((offset, which), times) in std::mem::take(&mut self.l2_tables) {
            self.walk_l2(offset, which, times).await?;
            progress.advance(self.geometry.cluster_size());
        }
        Ok(())
    }

    async fn walk_l2(&mut self, offset: u64, which: TableOwner, times: u32) -> Result<()> {
        let mut next = None;
        let mut rest = ByteRange::between(offset, offset + self.geometry.cluster_size());
        while let Some((data, table)) = self.reader.read(&mut rest).await? {
            let size = self.geometry.l2_entry_size();
            for index in 0..table.len() / size as usize {
                let at = data.offset() + index as u64 * size;
                if Entry::is_copied_compressed(&table, index, self.geometry) {
                    let what = "is compressed, and has the COPIED flag";
                    self.problem(format!("the L2 entry at offset {at} {what}"));
                }
                match Entry::read(&table, index, self.geometry) {
                    Ok(entry) => self.add_entry(entry, which, times, &mut next)?,
                    Err(violation) => {
                        self.problem(format!("the L2 entry at offset {at} {violation}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Counts an L2 entry. `next` is the host offset at which the guest's next cluster is not
    /// fragmented.
    fn add_entry(
        &mut self,
        entry: Entry,
        which: TableOwner,
        times: u32,
        next: &mut Option<u64>,
    ) -> Result<()> {
        let cluster_size = self.geometry.cluster_size();
        match entry {
            Entry::Standard { host: None, .. } => Ok(()),
            Entry::Standard { host: Some(host), .. } => {
                if which == TableOwner::Active {
                    self.allocated += 1;
                    self.fragmented += u64::from(next.is_some_and(|next| next != host.offset));
                    *next = Some(host.offset + cluster_size);
                }
                // The clusters of a data file are not counted.
                if self.geometry.has_data_file {
                    return Ok(());
                }
                self.add_times("a cluster", host.offset, cluster_size, times)
            }
            Entry::Compressed(data) => {
                if which == TableOwner::Active {
                    self.allocated += 1;
                    self.compressed += 1;
                    // A compressed cluster is always counted as fragmented: it does not fill a host
                    // cluster, so it is read with parts of its neighbours.
                    self.fragmented += 1;
                }
                self.add_times("a compressed cluster", data.offset, data.length, times)
            }
        }
    }

    async fn walk_snapshots(&mut self) -> Result<()> {
        let survey = SnapshotSurvey::read(self.storage, self.header).await?;
        for l1 in survey.l1_tables() {
            self.walk_l1(l1, TableOwner::Snapshot).await?;
        }
        if survey.length > 0 {
            self.add("the snapshot table", self.header.snapshots_offset, survey.length)?;
        }
        let table = self.header.snapshots_offset;
        for fault in survey.faults {
            let what = format!("{} (the snapshot table is at offset {table})", fault.what);
            self.problems_of(fault.count, what);
        }
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
        self.add_refcounts("the refcount table", offset, bytes)?;
        let table = table_io::read(self.storage, offset, bytes as usize).await?;
        for (index, word) in words::words_of(&table).into_iter().enumerate() {
            match entry::refcount_block(word, geometry) {
                Ok(None) => {}
                Ok(Some(block)) => {
                    self.add_refcounts("a refcount block", block, geometry.cluster_size())?;
                }
                Err(violation) => {
                    let offset = offset + index as u64 * 8;
                    let what = format!("the refcount table's entry at offset {offset} {violation}");
                    self.problem(what);
                }
            }
        }
        self.find_overlaps();
        self.broken_refcounts = self.corruptions - before;
        Ok(())
    }

    fn add_refcounts(&mut self, what: &str, offset: u64, length: u64) -> Result<()> {
        self.add(what, offset, length)?;
        let clusters =
            self.geometry.cluster_of(offset)..self.geometry.clusters_for(offset + length);
        let inside = clusters.filter(|&cluster| cluster < self.counts.clusters());
        self.refcount_clusters.extend(inside);
        Ok(())
    }

    /// Reports an active L1 table that shares a cluster with other data, even if the refcounts
    /// include both, because the table is changed in place.
    fn find_shared_l1(&mut self) {
        let location = L1Location::active(self.header);
        if !location.is_possible(self.geometry) {
            return;
        }
        let mut clusters = location.clusters(self.geometry);
        if clusters.any(|cluster| self.counts.get(cluster) > 1) {
            let offset = location.offset;
            self.problem(format!("the active L1 table at offset {offset} overlaps other data"));
        }
    }

    /// Reports refcount tables and blocks that share a cluster with other data, even if the
    /// refcounts include both, because these tables and blocks are changed in place.
    fn find_overlaps(&mut self) {
        for cluster in self.refcount_clusters.clone() {
            if self.counts.get(cluster) != 1 {
                let offset = self.geometry.offset_of(cluster);
                self.problem(format!("the refcounts at offset {offset} overlap other data"));
            }
        }
    }
}

/// The owner of the tables that are walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TableOwner {
    Active,
    Snapshot,
}
