//! Entries of L1 and L2 tables.
//!
//! A standard L2 entry has 8 bytes. With subclusters an entry has 16 bytes: the second word states
//! for each of 32 subclusters whether it is allocated (low half) or reads as zeros (high half).

use blockhouse_core::ByteRange;

use super::geometry::Geometry;
use super::limits::MAX_OFFSET;
use super::words::be64;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Description of the rule of the format that an entry violates.
pub(crate) type EntryError = &'static str;

/// A reference of a table to a cluster of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) offset: u64,
    /// Bit 63: the refcount is exactly one, so that the cluster may be changed in place.
    pub(crate) copied: bool,
}

impl Reference {
    /// A reference to a cluster whose refcount is one.
    pub(crate) fn with_copied(offset: u64) -> Self {
        Self { offset, copied: true }
    }

    pub(crate) fn is_copied(self) -> bool {
        self.copied
    }

    fn bits(self) -> u64 {
        self.offset | if self.is_copied() { COPIED } else { 0 }
    }

    fn of(word: u64) -> Self {
        Self { offset: word & OFFSET, copied: word & COPIED != 0 }
    }
}

/// The L2 table that an L1 entry refers to, if any.
pub(crate) fn l1_reference(word: u64, geometry: Geometry) -> Result<Option<Reference>, EntryError> {
    let reference = Reference::of(word);
    if word & !(COPIED | OFFSET) != 0 {
        Err("has reserved bits set")
    } else if !geometry.is_cluster_aligned(reference.offset) {
        Err("refers to an L2 table that does not start at a cluster")
    } else {
        Ok((reference.offset != 0).then_some(reference))
    }
}

/// An L1 entry without its reserved bits.
pub(crate) fn l1_without_reserved(word: u64) -> u64 {
    word & (COPIED | OFFSET)
}

/// The L1 entry that refers to an L2 table.
pub(crate) fn l1_word(reference: Reference) -> u64 {
    reference.bits()
}

/// The refcount block that an entry of the refcount table refers to, if any.
pub(crate) fn refcount_block(word: u64, geometry: Geometry) -> Result<Option<u64>, EntryError> {
    if word & 0x1ff != 0 {
        Err("has reserved bits set")
    } else if !geometry.is_cluster_aligned(word) {
        Err("refers to a refcount block that does not start at a cluster")
    } else if word >= MAX_OFFSET {
        Err("refers to a refcount block beyond the largest offset")
    } else {
        Ok((word != 0).then_some(word))
    }
}

/// The content of a subcluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SubclusterState {
    /// Reads as the backing file, or as zeros without one.
    Unallocated,
    /// Reads as zeros.
    Zero,
    /// Reads as the data in the host cluster.
    Data,
}

/// A decoded L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// An uncompressed cluster, with or without a host cluster.
    Standard {
        /// The cluster, if there is one.
        host: Option<Reference>,
        /// The state of each of 32 subclusters; without subclusters all are the same.
        subclusters: SubclusterBitmap,
    },
    /// Compressed data.
    Compressed(CompressedDescriptor),
}

/// The states of a cluster's 32 subclusters: a bitmap of the subclusters with data, and a bitmap of
/// the subclusters that read as zeros. No bit is set in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SubclusterBitmap {
    pub(crate) data: u32,
    pub(crate) zero: u32,
}

impl SubclusterBitmap {
    pub(crate) const UNALLOCATED: Self = Self { data: 0, zero: 0 };
    pub(crate) const ZERO: Self = Self { data: 0, zero: u32::MAX };
    pub(crate) const DATA: Self = Self { data: u32::MAX, zero: 0 };

    pub(crate) fn state(self, subcluster: u32) -> SubclusterState {
        match (self.data >> subcluster & 1, self.zero >> subcluster & 1) {
            (1, _) => SubclusterState::Data,
            (_, 1) => SubclusterState::Zero,
            _ => SubclusterState::Unallocated,
        }
    }

    /// A copy in which the subclusters of `mask` have the state `state`.
    pub(crate) fn with(self, mask: u32, state: SubclusterState) -> Self {
        let (data, zero) = (self.data & !mask, self.zero & !mask);
        match state {
            SubclusterState::Unallocated => Self { data, zero },
            SubclusterState::Zero => Self { data, zero: zero | mask },
            SubclusterState::Data => Self { data: data | mask, zero },
        }
    }
}

/// The subclusters of a guest cluster that `range` touches; all 32 bits in an image without
/// subclusters.
pub(crate) fn subclusters_in(geometry: Geometry, cluster: u64, range: ByteRange) -> u32 {
    if !geometry.extended_l2 {
        return SubclusterBitmap::DATA.data;
    }
    let bytes = geometry.bytes_of(cluster..cluster + 1);
    let start = range.offset().max(bytes.offset()) - bytes.offset();
    let end = range.end().min(bytes.end()) - bytes.offset();
    let first = (start / geometry.subcluster_size()) as u32;
    let count = (end.div_ceil(geometry.subcluster_size()) as u32 - first).min(32);
    (SubclusterBitmap::DATA.data >> (32 - count)) << first
}

/// The location of compressed data: the compressed cluster descriptor of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompressedDescriptor {
    /// The first byte, anywhere in a cluster.
    pub(crate) offset: u64,
    /// The maximum length of the data: up to the end of a 512-byte sector.
    pub(crate) length: u64,
}

impl CompressedDescriptor {
    fn offset_bits(geometry: Geometry) -> u32 {
        62 - (geometry.cluster_bits - 8)
    }

    /// Whether an entry can refer to compressed data at `offset`.
    pub(crate) fn is_reachable(offset: u64, geometry: Geometry) -> bool {
        offset >> Self::offset_bits(geometry) == 0
    }

    fn of(word: u64, geometry: Geometry) -> Self {
        let offset_bits = Self::offset_bits(geometry);
        let offset = word & ((1 << offset_bits) - 1);
        let sectors = (word & (COMPRESSED - 1)) >> offset_bits;
        Self { offset, length: (sectors + 1) * 512 - offset % 512 }
    }

    /// The entry for `length` bytes at `offset`; the length is rounded up to a sector's end.
    fn word(self, geometry: Geometry) -> u64 {
        let sectors = (self.offset % 512 + self.length).div_ceil(512) - 1;
        COMPRESSED | sectors << Self::offset_bits(geometry) | self.offset
    }

    /// The host clusters that the data touches.
    pub(crate) fn host_clusters(self, geometry: Geometry) -> std::ops::Range<u64> {
        let end = self.offset + self.length;
        geometry.cluster_of(self.offset)..geometry.clusters_for(end)
    }
}

impl Entry {
    /// Unallocated, without a host cluster.
    pub(crate) const UNALLOCATED: Self =
        Self::Standard { host: None, subclusters: SubclusterBitmap::UNALLOCATED };
    /// Reads as zeros, without a host cluster.
    pub(crate) const ZERO: Self =
        Self::Standard { host: None, subclusters: SubclusterBitmap::ZERO };

    /// The entry after the cluster was zeroed: it keeps its host cluster if the refcount is one.
    pub(crate) fn zeroed_keeping_host(self) -> Self {
        match self {
            Self::Standard { host: Some(host), .. } if host.is_copied() => {
                Self::Standard { host: Some(host), subclusters: SubclusterBitmap::ZERO }
            }
            _ => Self::ZERO,
        }
    }

    /// The entry as numbers; the second is 0 if entries have one word.
    pub(crate) fn words(self, geometry: Geometry) -> [u64; 2] {
        let mut bytes = [0; 16];
        self.write(&mut bytes, 0, geometry);
        [be64(&bytes, 0), be64(&bytes, 8)]
    }

    /// Decodes the numbers of [`words`](Self::words).
    pub(crate) fn from_words(words: [u64; 2], geometry: Geometry) -> Result<Self, EntryError> {
        let mut bytes = [0; 16];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        Self::read(&bytes, 0, geometry)
    }

    /// A cluster of data whose refcount is one.
    pub(crate) fn data(offset: u64) -> Self {
        Self::Standard {
            host: Some(Reference::with_copied(offset)),
            subclusters: SubclusterBitmap::DATA,
        }
    }

    /// Decodes the `index`-th entry of a slice.
    pub(crate) fn read(slice: &[u8], index: usize, geometry: Geometry) -> Result<Self, EntryError> {
        let size = geometry.l2_entry_size() as usize;
        let bytes = &slice[index * size..][..size];
        let word = be64(bytes, 0);
        let bitmap = if geometry.extended_l2 { be64(bytes, 8) } else { 0 };
        if word & COMPRESSED != 0 {
            return Self::compressed(word, bitmap, geometry);
        }
        let reserved = if geometry.version < 3 || geometry.extended_l2 {
            !(COPIED | OFFSET)
        } else {
            !(COPIED | OFFSET | ZERO)
        };
        let reference = Reference::of(word);
        if word & reserved != 0 {
            return Err("has reserved bits set");
        }
        if !geometry.is_cluster_aligned(reference.offset) {
            return Err("refers to data that does not start at a cluster");
        }
        // Offset 0 is valid only in a data file; there, the copied bit distinguishes an entry with
        // offset 0 from an entry without a cluster.
        let is_allocated = reference.offset != 0 || geometry.has_data_file && reference.is_copied();
        let host = is_allocated.then_some(reference);
        if geometry.has_data_file && host.is_some_and(|host| !host.is_copied()) {
            return Err("shares a cluster of the data file");
        }
        let subclusters = if geometry.extended_l2 {
            SubclusterBitmap { data: bitmap as u32, zero: (bitmap >> 32) as u32 }
        } else if word & ZERO != 0 {
            SubclusterBitmap::ZERO
        } else if host.is_some() {
            SubclusterBitmap::DATA
        } else {
            SubclusterBitmap::UNALLOCATED
        };
        if subclusters.data & subclusters.zero != 0 {
            return Err("says that a subcluster holds data and reads as zeros");
        }
        if subclusters.data != 0 && host.is_none() {
            return Err("has allocated subclusters but no place for them");
        }
        Ok(Self::Standard { host, subclusters })
    }

    fn compressed(word: u64, bitmap: u64, geometry: Geometry) -> Result<Self, EntryError> {
        let data = CompressedDescriptor::of(word, geometry);
        if geometry.has_data_file {
            Err("is compressed, which nothing in a data file is")
        } else if bitmap != 0 {
            Err("is compressed and has subclusters")
        } else if data.offset + data.length > MAX_OFFSET {
            Err("refers to compressed data beyond the largest offset")
        } else {
            // The format forbids the copied bit in a compressed entry. Reading ignores it, as QEMU
            // does; see `is_copied_compressed`.
            Ok(Self::Compressed(data))
        }
    }

    /// Whether the `index`-th entry of a slice is compressed and has the copied bit, which the
    /// format forbids: reads are not affected, but a check reports it.
    pub(crate) fn is_copied_compressed(slice: &[u8], index: usize, geometry: Geometry) -> bool {
        let word = be64(slice, index * geometry.l2_entry_size() as usize);
        word & (COMPRESSED | COPIED) == COMPRESSED | COPIED
    }

    /// The valid part of the `index`-th entry of a slice, also for an entry that
    /// [`read`](Self::read) refuses: reserved bits are cleared; a subcluster with both bits set
    /// keeps its data. An entry whose host cluster is invalid, or not among the `clusters` clusters
    /// of the file, has lost its data.
    pub(crate) fn sanitize(slice: &[u8], index: usize, geometry: Geometry, clusters: u64) -> Self {
        let size = geometry.l2_entry_size() as usize;
        let bytes = &slice[index * size..][..size];
        let word = be64(bytes, 0);
        if word & COMPRESSED != 0 {
            let data = CompressedDescriptor::of(word, geometry);
            let is_inside = !geometry.has_data_file && data.host_clusters(geometry).end <= clusters;
            return if is_inside {
                Self::Compressed(data)
            } else {
                Self::lost_data(SubclusterBitmap::DATA, geometry)
            };
        }
        let reference = Reference::of(word);
        let host = if geometry.has_data_file {
            let is_allocated = reference.offset != 0 || reference.is_copied();
            is_allocated.then_some(Reference::with_copied(reference.offset))
        } else {
            Some(reference).filter(|host| host.offset != 0)
        };
        let subclusters = if geometry.extended_l2 {
            let bitmap = be64(bytes, 8);
            SubclusterBitmap { data: bitmap as u32, zero: (bitmap >> 32) as u32 & !(bitmap as u32) }
        } else if geometry.version >= 3 && word & ZERO != 0 {
            SubclusterBitmap::ZERO
        } else if host.is_some() {
            SubclusterBitmap::DATA
        } else {
            SubclusterBitmap::UNALLOCATED
        };
        let is_inside = |host: &Reference| {
            geometry.is_cluster_aligned(host.offset)
                && (geometry.has_data_file || geometry.cluster_of(host.offset) < clusters)
        };
        match host.filter(is_inside) {
            Some(host) => Self::Standard { host: Some(host), subclusters },
            None => Self::lost_data(subclusters, geometry),
        }
    }

    /// An entry whose data cannot be found: it reads as zeros, or in version 2, which has no zero
    /// flag, is unallocated.
    fn lost_data(subclusters: SubclusterBitmap, geometry: Geometry) -> Self {
        if geometry.version < 3 {
            return Self::UNALLOCATED;
        }
        Self::Standard {
            host: None,
            subclusters: SubclusterBitmap { data: 0, zero: subclusters.zero | subclusters.data },
        }
    }

    /// Stores the entry as the `index`-th one of a slice.
    pub(crate) fn write(self, slice: &mut [u8], index: usize, geometry: Geometry) {
        let size = geometry.l2_entry_size() as usize;
        let bytes = &mut slice[index * size..][..size];
        let (word, bitmap) = match self {
            Self::Compressed(data) => (data.word(geometry), 0),
            Self::Standard { host, subclusters } => {
                let is_zero = !geometry.extended_l2 && subclusters.zero != 0;
                let word = host.map_or(0, Reference::bits) | if is_zero { ZERO } else { 0 };
                (word, u64::from(subclusters.zero) << 32 | u64::from(subclusters.data))
            }
        };
        bytes[..8].copy_from_slice(&word.to_be_bytes());
        if geometry.extended_l2 {
            bytes[8..].copy_from_slice(&bitmap.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Geometry = Geometry::COMMON;
    const EXTENDED: Geometry = Geometry { extended_l2: true, ..PLAIN };

    fn entries() -> Vec<Entry> {
        vec![
            Entry::UNALLOCATED,
            Entry::ZERO,
            Entry::data(7 << 16),
            Entry::Standard {
                host: Some(Reference { offset: 1 << 20, copied: false }),
                subclusters: SubclusterBitmap::ZERO,
            },
            Entry::Compressed(CompressedDescriptor {
                offset: 70_000,
                length: 512 * 9 - 70_000 % 512,
            }),
        ]
    }

    #[test]
    fn entries_come_back_as_they_were_stored() {
        for geometry in [PLAIN, EXTENDED] {
            let mut slice = [0xa5; 64];
            for entry in entries() {
                entry.write(&mut slice, 2, geometry);
                assert_eq!(Entry::read(&slice, 2, geometry), Ok(entry), "{geometry:?}");
            }
        }
    }

    #[test]
    fn subclusters_have_states_of_their_own() {
        let subclusters = SubclusterBitmap::UNALLOCATED
            .with(6, SubclusterState::Data)
            .with(4, SubclusterState::Zero);
        let entry = Entry::Standard { host: Some(Reference::with_copied(1 << 16)), subclusters };
        let mut slice = [0; 16];
        entry.write(&mut slice, 0, EXTENDED);
        assert_eq!(be64(&slice, 8), 4 << 32 | 2);
        let Ok(Entry::Standard { subclusters, .. }) = Entry::read(&slice, 0, EXTENDED) else {
            panic!()
        };
        let states: Vec<_> = (0..4).map(|subcluster| subclusters.state(subcluster)).collect();
        use SubclusterState::{Data, Unallocated, Zero};
        assert_eq!(states, [Unallocated, Data, Zero, Unallocated]);
    }

    #[test]
    fn the_compressed_descriptor_counts_additional_sectors() {
        // 64 KiB clusters: 54 bits of offset, then the number of further sectors.
        let word = COMPRESSED | 2 << 54 | 513;
        let mut slice = word.to_be_bytes();
        let data = CompressedDescriptor { offset: 513, length: 3 * 512 - 1 };
        assert_eq!(Entry::read(&slice, 0, PLAIN), Ok(Entry::Compressed(data)));
        slice[0] |= 0x80;
        assert!(Entry::read(&slice, 0, PLAIN).is_ok(), "the bit of old images is ignored");
    }

    #[test]
    fn impossible_entries_are_refused() {
        let read = |word: u64, bitmap: u64, geometry| {
            let mut slice = [0; 16];
            slice[..8].copy_from_slice(&word.to_be_bytes());
            slice[8..].copy_from_slice(&bitmap.to_be_bytes());
            Entry::read(&slice, 0, geometry)
        };
        assert!(read(1 << 16 | 2, 0, PLAIN).is_err(), "reserved");
        assert!(read(1 << 9, 0, PLAIN).is_err(), "misaligned");
        assert!(read(1, 0, Geometry { version: 2, ..PLAIN }).is_err(), "no zeros in version 2");
        assert!(read(1 << 16, 1 << 32 | 1, EXTENDED).is_err(), "data and zero");
        assert!(read(0, 1, EXTENDED).is_err(), "data without a place");
    }
}
