//! The sizes of an image that are fixed while it is open, and the arithmetic with them.

use blockhouse_core::ByteRange;

/// Bytes of a slice, the unit in which tables are read, cached and written. A slice is longer if
/// the storage's block is larger, and shorter if clusters are smaller.
const SLICE: u64 = 4096;

/// Cluster, table and entry sizes of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) version: u32,
    pub(crate) cluster_bits: u32,
    /// Refcounts are `1 << refcount_order` bits wide.
    pub(crate) refcount_order: u32,
    pub(crate) extended_l2: bool,
    /// Guest clusters are in a data file, each at its guest offset; the image has tables only.
    pub(crate) has_data_file: bool,
    /// The alignment that the image's file requires of offsets and lengths; 1 without a
    /// requirement. A slice has at least this size: a write of a smaller slice would overwrite its
    /// neighbours.
    pub(crate) block: u32,
}

impl Geometry {
    pub(crate) fn cluster_size(self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of an L2 entry: 8, or 16 with subclusters.
    pub(crate) fn l2_entry_size(self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// Entries of an L2 table.
    pub(crate) fn l2_entries(self) -> u64 {
        self.cluster_size() / self.l2_entry_size()
    }

    /// Guest bytes that one L1 entry covers.
    pub(crate) fn l1_entry_span(self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// L1 entries that a disk of `size` bytes needs.
    pub(crate) fn l1_entries_for(self, size: u64) -> u64 {
        size.div_ceil(self.l1_entry_span())
    }

    /// Bytes of the guest's allocation unit: a subcluster, or a cluster in an image without
    /// subclusters.
    pub(crate) fn subcluster_size(self) -> u64 {
        if self.extended_l2 { self.cluster_size() / 32 } else { self.cluster_size() }
    }

    pub(crate) fn slice_size(self) -> u64 {
        SLICE.max(self.block.into()).min(self.cluster_size())
    }

    /// The minimum number of slices in memory for every change to be possible: twice the slices of
    /// a table and of its copy, plus 16 slices for the refcounts that such a change needs.
    pub(crate) fn min_slices(self) -> u64 {
        4 * (self.cluster_size() / self.slice_size()) + 16
    }

    /// L2 entries of a slice.
    pub(crate) fn slice_l2_entries(self) -> u64 {
        self.slice_size() / self.l2_entry_size()
    }

    /// Refcounts of a refcount block.
    pub(crate) fn block_refcounts(self) -> u64 {
        (self.cluster_size() * 8) >> self.refcount_order
    }

    /// Refcounts of a slice.
    pub(crate) fn slice_refcounts(self) -> u64 {
        (self.slice_size() * 8) >> self.refcount_order
    }

    /// The largest refcount.
    pub(crate) fn max_refcount(self) -> u64 {
        u64::MAX >> (64 - (1 << self.refcount_order))
    }

    /// The number of the (guest or host) cluster that `offset` lies in.
    pub(crate) fn cluster_of(self, offset: u64) -> u64 {
        offset >> self.cluster_bits
    }

    /// The first byte of a cluster.
    pub(crate) fn offset_of(self, cluster: u64) -> u64 {
        cluster << self.cluster_bits
    }

    /// Bytes from `offset` to the end of its cluster.
    pub(crate) fn rest_of_cluster(self, offset: u64) -> u64 {
        self.cluster_size() - offset % self.cluster_size()
    }

    /// The bytes of `range` before a cluster.
    pub(crate) fn up_to_cluster(self, range: ByteRange, cluster: u64) -> ByteRange {
        range.truncate(self.offset_of(cluster) - range.offset())
    }

    pub(crate) fn is_cluster_aligned(self, offset: u64) -> bool {
        offset & (self.cluster_size() - 1) == 0
    }

    /// How many clusters `bytes` take.
    pub(crate) fn clusters_for(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }

    /// The clusters that `range` touches.
    pub(crate) fn clusters_of(self, range: ByteRange) -> std::ops::Range<u64> {
        self.cluster_of(range.offset())..range.end().div_ceil(self.cluster_size())
    }

    /// The bytes of clusters, whose offsets must fit into 64 bits.
    pub(crate) fn bytes_of(self, clusters: std::ops::Range<u64>) -> ByteRange {
        ByteRange::between(self.offset_of(clusters.start), self.offset_of(clusters.end))
    }

    /// The location of a guest cluster's L2 entry.
    pub(crate) fn l2_index(self, cluster: u64) -> L2Index {
        let in_table = cluster % self.l2_entries();
        L2Index {
            l1_index: (cluster / self.l2_entries()) as usize,
            slice_offset: in_table / self.slice_l2_entries() * self.slice_size(),
            index: (in_table % self.slice_l2_entries()) as usize,
        }
    }

    /// The location of a host cluster's refcount.
    pub(crate) fn refcount_index(self, cluster: u64) -> RefcountIndex {
        let in_block = cluster % self.block_refcounts();
        RefcountIndex {
            table_index: cluster / self.block_refcounts(),
            slice_offset: in_block / self.slice_refcounts() * self.slice_size(),
            index: (in_block % self.slice_refcounts()) as usize,
        }
    }
}

/// The location of an L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct L2Index {
    pub(crate) l1_index: usize,
    /// Offset of the slice in the L2 table.
    pub(crate) slice_offset: u64,
    /// Index of the entry in the slice.
    pub(crate) index: usize,
}

/// The location of a refcount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RefcountIndex {
    pub(crate) table_index: u64,
    /// Offset of the slice in the refcount block.
    pub(crate) slice_offset: u64,
    /// Index of the refcount in the slice.
    pub(crate) index: usize,
}

#[cfg(test)]
impl Geometry {
    /// The geometry of an image that is made without options.
    pub(crate) const COMMON: Self = Self {
        version: 3,
        cluster_bits: 16,
        refcount_order: 4,
        extended_l2: false,
        has_data_file: false,
        block: 1,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMON: Geometry = Geometry::COMMON;

    #[test]
    fn a_common_image_has_the_well_known_numbers() {
        assert_eq!(COMMON.l2_entries(), 8192);
        assert_eq!(COMMON.l1_entry_span(), 512 << 20);
        assert_eq!(COMMON.block_refcounts(), 32768);
        assert_eq!(COMMON.max_refcount(), 65535);
        let at = COMMON.l2_index(8192 + 513);
        assert_eq!(at, L2Index { l1_index: 1, slice_offset: 4096, index: 1 });
    }

    #[test]
    fn a_slice_is_no_less_than_a_block() {
        for (block, slice) in [(512, 4096), (8192, 8192), (65536, 65536)] {
            let geometry = Geometry { block, ..COMMON };
            assert_eq!(geometry.slice_size(), slice);
            assert_eq!(geometry.l2_index(8191).slice_offset, 65536 - slice);
            assert_eq!(geometry.slice_refcounts(), slice / 2);
        }
        assert_eq!(Geometry { block: 8192, cluster_bits: 13, ..COMMON }.slice_size(), 8192);
    }

    #[test]
    fn small_clusters_are_one_slice_a_table() {
        let small = Geometry { cluster_bits: 9, refcount_order: 6, ..COMMON };
        assert_eq!((small.slice_size(), small.slice_refcounts()), (512, 64));
        assert_eq!(small.max_refcount(), u64::MAX);
        let at = small.refcount_index(130);
        assert_eq!(at, RefcountIndex { table_index: 2, slice_offset: 0, index: 2 });
    }
}
