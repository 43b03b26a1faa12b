//! Makes a whole bitmap coarser: each bit covers more of the disk, so that the bits fit into the
//! allocated clusters.
//!
//! Guarantee: no change is missing. Before the bits are copied, the old bitmap stops accepting bits
//! and its pages are no longer written, so later changes are recorded in the new bitmap.

use blockhouse_core::{ByteRange, Result, Storage};

use crate::qcow2::bitmaps::bits::{BitRuns, set_bits};
use crate::qcow2::bitmaps::reader::Bits;
use crate::qcow2::layout::bitmap_directory::{BitmapEntry, BitsCluster};
use crate::qcow2::layout::limits::MAX_GRANULARITY_BITS;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::layout::words;
use crate::qcow2::writeback::Metadata;

use super::{LiveBitmap, Phase};

/// The maximum size of the coarser bitmap's bits in memory, in bytes.
const MAX_BYTES: u64 = 8 << 20;

/// A bitmap that another bitmap is about to replace.
pub(in crate::qcow2::bitmaps) struct Superseded<'a> {
    bitmap: &'a LiveBitmap,
    /// The phase that the bitmap gets if this guard is dropped.
    otherwise: Phase,
}

/// The coarser bitmap.
pub(in crate::qcow2::bitmaps) struct Coarser {
    pub(in crate::qcow2::bitmaps) entry: BitmapEntry,
    pub(in crate::qcow2::bitmaps) table: Vec<BitsCluster>,
    /// The writes of its bits and its table, to the offsets of the old bitmap's bits and table.
    pub(in crate::qcow2::bitmaps) writes: Vec<TableWrite>,
    /// Clusters of the old bitmap that the coarser bitmap does not need.
    pub(in crate::qcow2::bitmaps) free: Vec<ByteRange>,
}

impl LiveBitmap {
    /// Whether a cluster of bits for a range is missing. False after a write of the table with an
    /// unknown outcome, because the table on disk may then refer to a cluster that a replacement
    /// would leak.
    pub(in crate::qcow2::bitmaps) fn lacks_room(&self, range: ByteRange) -> bool {
        let (bits, in_cluster) = (self.bits_of(range), self.geometry.cluster_size() * 8);
        let mut clusters = bits.start / in_cluster..bits.end.div_ceil(in_cluster);
        let state = self.state.lock();
        let is_zeros =
            |cluster: u64| state.table.get(cluster as usize) == Some(&BitsCluster::Zeros);
        !state.is_table_write_unknown && clusters.any(is_zeros)
    }

    /// Makes tasks that record changes wait for the new bitmap, and waits until no write of this
    /// bitmap is in flight. `None` if another bitmap has replaced this one, or if a replacement was
    /// dropped after it had begun to change the disk.
    pub(in crate::qcow2::bitmaps) async fn supersede<S: Storage>(
        &self,
        metadata: &Metadata<S>,
    ) -> Option<Superseded<'_>> {
        {
            let mut state = self.state.lock();
            if state.phase != Phase::Open {
                return None;
            }
            state.phase = Phase::Superseded;
        }
        let superseded = Superseded { bitmap: self, otherwise: Phase::Open };
        let is_idle = || !self.state.lock().pages.values().any(|page| page.is_writing());
        self.written.wait_until(|| is_idle().then_some(())).await;
        metadata.writer().drained().await;
        Some(superseded)
    }

    /// The offsets of the bitmap's allocated clusters of bits.
    fn owned(&self) -> Vec<u64> {
        let state = self.state.lock();
        let stored = state.table.iter().filter_map(|entry| match entry {
            BitsCluster::Stored(offset) => Some(*offset),
            BitsCluster::Zeros | BitsCluster::Ones => None,
        });
        stored.collect()
    }

    /// The factor, as a power of two, by which the granularity must grow so that all bits fit into
    /// `clusters` clusters; `None` if no permitted granularity is large enough.
    fn shift_for(&self, clusters: u64) -> Option<u32> {
        let in_cluster = self.geometry.cluster_size() * 8;
        let mut shifts = 1..=MAX_GRANULARITY_BITS.saturating_sub(self.granularity_bits);
        shifts.find(|shift| self.bits.div_ceil(1 << shift) <= clusters * in_cluster)
    }
}

impl Superseded<'_> {
    /// The coarser bitmap that replaces the bitmap with this entry in the directory, for a disk of
    /// `size` bytes; `None` if the old bitmap has no cluster, if no permitted granularity is large
    /// enough, or if the coarser bitmap would exceed [`MAX_BYTES`].
    ///
    /// # Errors
    /// Errors of the storage.
    pub(in crate::qcow2::bitmaps) async fn coarser<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        entry: &BitmapEntry,
        size: u64,
    ) -> Result<Option<Coarser>> {
        let (bitmap, geometry) = (self.bitmap, self.bitmap.geometry);
        let mut owned = bitmap.owned();
        let Some(shift) = bitmap.shift_for(owned.len() as u64) else { return Ok(None) };
        let mut entry = entry.clone();
        entry.granularity_bits += shift;
        let count = entry.clusters_for(size, geometry);
        if count * geometry.cluster_size() > MAX_BYTES || count == 0 {
            return Ok(None);
        }
        let old_table = entry.table_length();
        entry.table_entries = count as u32;
        let bytes = self.bits(metadata, shift, count).await?;
        let left = owned.split_off(count as usize);
        let table: Vec<_> = owned.iter().map(|&offset| BitsCluster::Stored(offset)).collect();
        let clusters = bytes.chunks(geometry.cluster_size() as usize);
        let mut writes: Vec<_> = owned
            .iter()
            .zip(clusters)
            .map(|(&offset, bits)| TableWrite { offset, bytes: bits.to_vec() })
            .collect();
        let block = (metadata.storage().capabilities().alignment.offset as usize).max(512);
        let mut words: Vec<u64> = table.iter().map(|cluster| cluster.word()).collect();
        words.resize((words.len() * 8).next_multiple_of(block) / 8, 0);
        writes.push(TableWrite { offset: entry.table_offset, bytes: words::bytes_of(&words) });
        let mut free: Vec<_> =
            left.iter().map(|&offset| span(offset, geometry.cluster_size())).collect();
        let [old, new] =
            [old_table, entry.table_length()].map(|length| geometry.clusters_for(length));
        let end = entry.table_offset + geometry.offset_of(new);
        if old > new {
            free.push(span(end, geometry.offset_of(old - new)));
        }
        Ok(Some(Coarser { entry, table, writes, free }))
    }

    /// The bits of `count` clusters; each bit covers `1 << shift` old bits.
    async fn bits<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        shift: u32,
        count: u64,
    ) -> Result<Vec<u8>> {
        let bitmap = self.bitmap;
        let in_page = bitmap.page_bits();
        let mut bytes = vec![0; (count * bitmap.geometry.cluster_size()) as usize];
        for page in 0..bitmap.bits.div_ceil(in_page) {
            let in_memory = bitmap.state.lock().pages.get(&page).map(|page| page.bits().to_vec());
            let bits = match in_memory {
                Some(bits) => Bits::Some(bits),
                None => bitmap.read(metadata, page).await?,
            };
            let first = page * in_page;
            let end = in_page.min(bitmap.bits - first);
            let mut set = |run: std::ops::Range<u64>| {
                let (start, last) = (first + run.start, first + run.end - 1);
                set_bits(&mut bytes, start >> shift..(last >> shift) + 1);
            };
            match bits {
                Bits::Zeros => {}
                Bits::Ones => set(0..end),
                Bits::Some(bits) => BitRuns::new(&bits, end).for_each(&mut set),
            }
        }
        Ok(bytes)
    }

    /// Called before the bitmap is changed on disk. From then on, the bitmap lacks changes if the
    /// replacement is not finished.
    pub(in crate::qcow2::bitmaps) fn begin_changes(&mut self) {
        self.otherwise = Phase::Abandoned;
    }

    /// Called when the other bitmap has replaced this one.
    pub(in crate::qcow2::bitmaps) fn finish(mut self) {
        self.otherwise = Phase::Superseded;
    }
}

impl Drop for Superseded<'_> {
    fn drop(&mut self) {
        self.bitmap.state.lock().phase = self.otherwise;
    }
}

fn span(offset: u64, length: u64) -> ByteRange {
    ByteRange::between(offset, offset + length)
}
