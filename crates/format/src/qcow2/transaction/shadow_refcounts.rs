//! Builds new refcounts without changing the active refcounts.
//!
//! A change of snapshots modifies refcounts all over the image, in copies of the tables. Every
//! changed refcount block and the refcount table are written to new clusters. Then one write of the
//! header switches from all old tables to all new tables. A new cluster is allocated only where
//! both the old and the new refcount are 0. So no old data is overwritten, and a crash before the
//! switch leaves the image unchanged, without leaks.
//!
//! Only slices of refcounts that are not all zeros are read and kept: memory and time depend on the
//! data in the file, not on the size of the refcount table.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};
use futures_util::stream::{self, StreamExt};

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::limits::{MAX_OFFSET, MAX_REFCOUNT_TABLE};
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::layout::{entry, refcount, table_io, words};

use super::shadow_slices::ShadowSlices;

/// Maximum number of parts of blocks that are read concurrently.
const MAX_IN_FLIGHT: usize = 16;

/// The old and new refcounts of a transaction; see the module's documentation.
pub(crate) struct ShadowRefcounts {
    geometry: Geometry,
    name: String,
    /// Clusters of the old refcount table.
    old_table: Range<u64>,
    blocks: BTreeMap<u64, Block>,
    slices: ShadowSlices,
    /// Blocks that change and have no new cluster yet.
    unallocated_blocks: BTreeSet<u64>,
    /// Clusters of active tables. If the refcount of such a cluster is 0, the image is corrupt.
    tables: HashSet<u64>,
    /// Clusters that a dropped write may still modify. Their refcounts must not become 0, because
    /// the late write would corrupt a new owner's data.
    quarantined: HashSet<u64>,
    /// Allocations search from this cluster on, and use no cluster before it.
    cursor: u64,
}

struct Block {
    offset: Option<u64>,
    new_cluster: Option<u64>,
}

/// The writes for the new refcounts, and their location for the header.
pub(crate) struct NewRefcounts {
    pub(crate) writes: Vec<TableWrite>,
    /// The refcount table.
    pub(crate) table: Vec<u64>,
    pub(crate) table_offset: u64,
    pub(crate) table_clusters: u32,
    /// The clusters that no longer have any reference.
    pub(crate) freed: Vec<Range<u64>>,
}

impl ShadowRefcounts {
    /// Reads all refcounts.
    pub(crate) async fn read<S: Storage>(
        storage: &S,
        header: &Header,
        table: &[u64],
        tables: HashSet<u64>,
        quarantined: HashSet<u64>,
    ) -> Result<Self> {
        let geometry = header.geometry;
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, what).on(storage.name());
        let mut blocks = BTreeMap::new();
        let mut by_offset = BTreeMap::new();
        for (index, &word) in (0..).zip(table) {
            let block = entry::refcount_block(word, geometry).map_err(|violation| {
                corrupt(format!("entry {index} of the refcount table {violation}"))
            })?;
            let Some(offset) = block else { continue };
            blocks.insert(index, Block { offset: Some(offset), new_cluster: None });
            if by_offset.insert(offset, index).is_some() {
                return Err(corrupt("a refcount block has two entries".into()).at(offset));
            }
        }
        let first = geometry.cluster_of(header.refcount_table_offset);
        Ok(Self {
            geometry,
            name: storage.name().to_owned(),
            old_table: first..first + u64::from(header.refcount_table_clusters),
            blocks,
            slices: read_slices(storage, geometry, &by_offset).await?,
            unallocated_blocks: BTreeSet::new(),
            tables,
            quarantined,
            cursor: 0,
        })
    }

    /// The number of the slice with a cluster's refcount, and the refcount's index in it.
    fn index_of(&self, cluster: u64) -> (u64, usize) {
        let in_slice = self.geometry.slice_refcounts();
        (cluster / in_slice, (cluster % in_slice) as usize)
    }

    fn value(&self, slice: &[u8], index: usize) -> u64 {
        match slice {
            [] => 0,
            slice => refcount::get(slice, self.geometry.refcount_order, index),
        }
    }

    /// The refcount of a cluster after the change.
    pub(crate) fn new_refcount(&self, cluster: u64) -> u64 {
        let (slice, index) = self.index_of(cluster);
        self.value(self.slices.now(slice), index)
    }

    /// The refcount of a cluster on disk.
    fn old_refcount(&self, cluster: u64) -> u64 {
        let (slice, index) = self.index_of(cluster);
        self.value(self.slices.before(slice), index)
    }

    fn set(&mut self, cluster: u64, value: u64) {
        let (slice, index) = self.index_of(cluster);
        let bytes = match self.slices.changed_mut(slice) {
            Some(bytes) => bytes,
            None => {
                let block = cluster / self.geometry.block_refcounts();
                let absent = Block { offset: None, new_cluster: None };
                if self.blocks.entry(block).or_insert(absent).new_cluster.is_none() {
                    self.unallocated_blocks.insert(block);
                }
                self.slices.begin_change(slice, self.geometry.slice_size() as usize)
            }
        };
        refcount::set(bytes, self.geometry.refcount_order, index, value);
    }

    fn corrupt(&self, what: &str, cluster: u64) -> Error {
        Error::new(ErrorKind::Corrupt, what.to_owned())
            .on(&self.name)
            .at(self.geometry.offset_of(cluster))
            .hint("check the image before using it")
    }

    /// Adds a reference to a cluster that is in use.
    ///
    /// # Errors
    /// `Corrupt` for a cluster that counts as free; `Unsupported` when refcounts are too narrow.
    pub(crate) fn increment(&mut self, cluster: u64) -> Result<()> {
        let count = self.new_refcount(cluster);
        if count == 0 {
            return Err(self.corrupt("the refcount of a cluster in use is 0", cluster));
        }
        if count == self.geometry.max_refcount() {
            let bits = 1 << self.geometry.refcount_order;
            let what = format!("refcounts of {bits} bits cannot count one more snapshot");
            return Err(Error::new(ErrorKind::Unsupported, what)
                .on(&self.name)
                .hint("delete a snapshot, or copy the image into one with wider refcounts"));
        }
        self.set(cluster, count + 1);
        Ok(())
    }

    /// Removes a reference to a cluster. A quarantined cluster keeps its last reference.
    ///
    /// # Errors
    /// `Corrupt` for a cluster that counts as free.
    pub(crate) fn decrement(&mut self, cluster: u64) -> Result<()> {
        match self.new_refcount(cluster) {
            0 => Err(self.corrupt("the refcount of a cluster in use is 0", cluster)),
            1 if self.quarantined.contains(&cluster) => Ok(()),
            count => {
                self.set(cluster, count - 1);
                Ok(())
            }
        }
    }

    pub(crate) fn decrement_all(&mut self, clusters: Range<u64>) -> Result<()> {
        clusters.into_iter().try_for_each(|cluster| self.decrement(cluster))
    }

    /// Allocates `count` free clusters in a row, each with one reference; returns the first.
    pub(crate) fn allocate(&mut self, count: u64) -> Result<u64> {
        let mut start = self.cursor;
        let mut at = start;
        while at - start < count {
            if at >= MAX_OFFSET >> self.geometry.cluster_bits {
                let what = "the image is as large as its format allows";
                return Err(Error::new(ErrorKind::NoSpace, what).on(&self.name));
            }
            let is_free = self.new_refcount(at) == 0 && self.old_refcount(at) == 0;
            if is_free && self.tables.contains(&at) {
                return Err(self.corrupt("refcount 0 for a cluster that holds metadata", at));
            }
            at += 1;
            if !is_free {
                start = at;
                if count == 1 {
                    self.cursor = at;
                }
            }
        }
        (start..at).for_each(|cluster| self.set(cluster, 1));
        Ok(start)
    }

    /// Allocates a new cluster for every changed block, and new clusters for the table.
    pub(crate) fn finalize(mut self) -> Result<NewRefcounts> {
        self.decrement_all(self.old_table.clone())?;
        let mut table = 0..0;
        loop {
            // An allocation changes a refcount block, possibly a block that was unchanged before,
            // so the set may grow in the loop.
            while let Some(index) = self.unallocated_blocks.pop_first() {
                let cluster = self.allocate(1)?;
                let absent = Block { offset: None, new_cluster: None };
                let block = self.blocks.entry(index).or_insert(absent);
                block.new_cluster = Some(cluster);
                // The allocation of the block's new cluster may have changed the block itself.
                self.unallocated_blocks.remove(&index);
                if let Some(old) = block.offset {
                    self.decrement(self.geometry.cluster_of(old))?;
                }
            }
            let entries = self.blocks.last_key_value().map_or(0, |(&index, _)| index + 1);
            let room = (table.end - table.start) << self.geometry.cluster_bits;
            if room >= (entries * 8).max(1) {
                break;
            }
            self.decrement_all(table.clone())?;
            let start = self.allocate(self.table_clusters(entries)?)?;
            table = start..start + self.table_clusters(entries)?;
        }
        self.into_writes(&table)
    }

    /// Clusters for a table of this many entries: as many as before if they suffice, else 1.5 times
    /// as many as needed, so that the table rarely grows.
    fn table_clusters(&self, entries: u64) -> Result<u64> {
        let before = self.old_table.end - self.old_table.start;
        if entries * 8 <= before << self.geometry.cluster_bits {
            return Ok(before);
        }
        if entries * 8 > MAX_REFCOUNT_TABLE {
            let what = "the refcount table is as large as its format allows";
            return Err(Error::new(ErrorKind::NoSpace, what).on(&self.name));
        }
        let wanted = self.geometry.clusters_for((entries + entries / 2) * 8);
        Ok(wanted.min(MAX_REFCOUNT_TABLE >> self.geometry.cluster_bits))
    }

    fn into_writes(mut self, table: &Range<u64>) -> Result<NewRefcounts> {
        let geometry = self.geometry;
        let freed = self.freed();
        let count = table.end - table.start;
        let mut words = vec![0; (count << geometry.cluster_bits) as usize / 8];
        let mut writes = Vec::new();
        for (index, block) in std::mem::take(&mut self.blocks) {
            let new = block.new_cluster.map(|cluster| geometry.offset_of(cluster));
            let place = words.get_mut(index as usize).zip(new.or(block.offset));
            let (word, offset) = place.ok_or_else(|| {
                let first = index * geometry.block_refcounts();
                self.corrupt("a refcount block has no place", first)
            })?;
            *word = offset;
            writes.extend(new.map(|offset| TableWrite { offset, bytes: self.block_bytes(index) }));
        }
        let table_offset = geometry.offset_of(table.start);
        writes.push(TableWrite { offset: table_offset, bytes: words::bytes_of(&words) });
        let table_clusters = count as u32;
        Ok(NewRefcounts { writes, table: words, table_offset, table_clusters, freed })
    }

    fn block_bytes(&mut self, index: u64) -> Vec<u8> {
        let slices = self.geometry.cluster_size() / self.geometry.slice_size();
        let mut bytes = Vec::with_capacity(self.geometry.cluster_size() as usize);
        for number in 1..=slices {
            bytes.extend(self.slices.take(index * slices + number - 1));
            bytes.resize((number * self.geometry.slice_size()) as usize, 0);
        }
        bytes
    }

    fn freed(&self) -> Vec<Range<u64>> {
        let mut freed: Vec<Range<u64>> = Vec::new();
        let in_slice = self.geometry.slice_refcounts();
        for (number, before, now) in self.slices.changed() {
            if before.is_empty() {
                continue;
            }
            for index in 0..in_slice {
                let cluster = number * in_slice + index;
                let index = index as usize;
                if self.value(now, index) != 0 || self.value(before, index) == 0 {
                    continue;
                }
                match freed.last_mut() {
                    Some(last) if last.end == cluster => last.end += 1,
                    _ => freed.push(cluster..cluster + 1),
                }
            }
        }
        freed
    }
}

/// Reads the slices of refcount blocks that are not all zeros, keyed by their number. `blocks` maps
/// offsets to indexes of the refcount table.
async fn read_slices<S: Storage>(
    storage: &S,
    geometry: Geometry,
    blocks: &BTreeMap<u64, u64>,
) -> Result<ShadowSlices> {
    let mut reader = SparseReader::new(storage, geometry);
    let in_block = geometry.cluster_size() / geometry.slice_size();
    let mut parts = Vec::new();
    for (&block, &index) in blocks {
        let mut rest = ByteRange::between(block, block + geometry.cluster_size());
        while let Some(data) = reader.next_data(&mut rest).await {
            let first = index * in_block + (data.offset() - block) / geometry.slice_size();
            parts.push((first, data));
        }
    }
    let reads = parts.into_iter().map(async |(first, data): (u64, ByteRange)| {
        let bytes = table_io::read(storage, data.offset(), data.length() as usize).await?;
        Ok((first, bytes))
    });
    let mut reads = std::pin::pin!(stream::iter(reads).buffer_unordered(MAX_IN_FLIGHT));
    let mut slices = ShadowSlices::default();
    while let Some(part) = reads.next().await {
        let (first, bytes): (u64, Vec<u8>) = Result::from(part)?;
        for (number, slice) in (first..).zip(bytes.chunks(geometry.slice_size() as usize)) {
            if slice.iter().any(|&byte| byte != 0) {
                slices.insert(number, slice.to_vec());
            }
        }
    }
    Ok(slices)
}
