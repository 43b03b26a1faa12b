//! The location of a guest's bytes: the result of a format's mapping.
//!
//! An [`Extent`] corresponds to `struct iomap` of the kernel's file systems: it is all that the I/O
//! path needs to know of a format. The format maps, the I/O path moves the data.

use std::fmt;

/// A range of bytes. `end()` never overflows: constructors check it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    offset: u64,
    length: u64,
}

impl ByteRange {
    /// The `length` bytes from `offset` on, or `None` when the end does not fit into 64 bits.
    pub fn new(offset: u64, length: u64) -> Option<Self> {
        offset.checked_add(length).map(|_| Self { offset, length })
    }

    /// The bytes from `start` up to but excluding `end`. If `end` is before `start`, debug builds
    /// panic and other builds return an empty range, because an error in one request must not end
    /// the process.
    pub fn between(start: u64, end: u64) -> Self {
        debug_assert!(start <= end, "a range ends before it starts: {start}..{end}");
        Self { offset: start, length: end.saturating_sub(start) }
    }

    /// Whether all of `other` lies inside this range.
    pub fn contains(self, other: Self) -> bool {
        self.offset <= other.offset && other.end() <= self.end()
    }

    /// The offset of the first byte.
    pub fn offset(self) -> u64 {
        self.offset
    }

    /// The length in bytes.
    pub fn length(self) -> u64 {
        self.length
    }

    /// The offset after the last byte.
    pub fn end(self) -> u64 {
        self.offset + self.length
    }

    /// Whether the length is 0.
    pub fn is_empty(self) -> bool {
        self.length == 0
    }

    /// Whether the two share a byte.
    pub fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }

    /// Whether both ends are multiples of `alignment`, a power of two.
    pub fn is_aligned(self, alignment: u64) -> bool {
        (self.offset | self.length) & (alignment - 1) == 0
    }

    /// The smallest range with ends at multiples of `alignment` (a power of two) that holds this
    /// one. An end beyond the last multiple below 2^64 stays as it is.
    pub fn align_outward(self, alignment: u64) -> Self {
        let start = self.offset & !(alignment - 1);
        let end = self.end().checked_next_multiple_of(alignment).unwrap_or(self.end());
        Self::between(start, end)
    }

    /// The largest range with ends at multiples of `alignment` (a power of two) inside this one;
    /// `None` if it would be empty.
    pub fn align_inward(self, alignment: u64) -> Option<Self> {
        let start = self.offset.checked_next_multiple_of(alignment)?;
        let end = self.end() & !(alignment - 1);
        (start < end).then(|| Self::between(start, end))
    }

    /// At most the first `length` bytes.
    pub fn truncate(self, length: u64) -> Self {
        Self { offset: self.offset, length: self.length.min(length) }
    }

    /// The part after the first `count` bytes; empty if there are no more bytes.
    pub fn skip(self, count: u64) -> Self {
        let count = count.min(self.length);
        Self { offset: self.offset + count, length: self.length - count }
    }

    /// The bytes from `offset` on: all, some or none.
    pub fn after(self, offset: u64) -> Self {
        self.skip(offset.saturating_sub(self.offset))
    }

    /// The bytes before `offset`: all, some or none.
    pub fn before(self, offset: u64) -> Self {
        self.truncate(offset.saturating_sub(self.offset))
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.offset, self.length)
    }
}

/// A piece of the guest's range with one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The guest's bytes that the extent describes.
    pub guest: ByteRange,
    /// `guest`, or a larger range around it that changes together with it. If the space is `NEW`,
    /// all of the range becomes visible at once, so the writer of `guest` fills the rest with its
    /// old content (the rest surrounds `guest` in the host range, too). If the data is
    /// `Compressed`, this is the decompressed range.
    pub alloc_range: ByteRange,
    /// The location of the content.
    pub state: ExtentState,
    /// Properties due to which an overwrite must do more than write data.
    pub flags: ExtentFlags,
}

impl Extent {
    /// Whether a datasync write of this extent writes data only: the extent is mapped, and neither
    /// new nor shared, and its mapping is durable. Only then does FUA alone make the write durable.
    pub fn is_pure_overwrite(&self) -> bool {
        matches!(self.state, ExtentState::Mapped { .. }) && self.flags.is_empty()
    }
}

/// Where the content of an extent comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentState {
    /// The content is in the storage, byte for byte, from `host` on.
    Mapped {
        /// Offset in the storage of the extent's first byte.
        host: u64,
    },
    /// Reads as zeros by the format's metadata; it may have allocated space.
    Zero,
    /// Nothing was ever written here; reads as zeros.
    Hole,
    /// The content is in the storage, compressed.
    Compressed {
        /// Offset in the storage of the first compressed byte.
        host: u64,
        /// The maximum length of the compressed form in bytes.
        length: u64,
    },
    /// The content is in the image's backing file, at the same guest offset.
    Backing,
}

bitflags::bitflags! {
    /// Properties due to which an overwrite must do more than write data.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ExtentFlags: u8 {
        /// The space was allocated for this request, and becomes visible when the extent is linked.
        const NEW = 1;
        /// Another reference (of a snapshot) shares the space: copy on write.
        const SHARED = 2;
        /// The mapping itself is not yet durable.
        const DIRTY = 4;
        /// With `NEW`: all of the new space reads as zeros, and so did all of `alloc_range` before
        /// the write. The writer of `guest` may leave the rest as it is.
        const ZEROED = 8;
        /// With `ZEROED`: the zeros are written and durable, so even a durable write may leave the
        /// rest as it is.
        const PREPARED = 16;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligning_keeps_or_loses_the_ends() {
        let range = ByteRange::between(1000, 9000);
        assert_eq!(range.align_outward(4096), ByteRange::between(0, 12288));
        assert_eq!(range.align_inward(4096), Some(ByteRange::between(4096, 8192)));
        assert_eq!(ByteRange::between(4097, 8191).align_inward(4096), None);
    }

    #[test]
    fn a_cut_outside_of_a_range_leaves_all_or_none_of_it() {
        let range = ByteRange::between(10, 20);
        let none = |at| ByteRange::between(at, at);
        assert_eq!(
            [5, 10, 15, 20, 25].map(|at| range.after(at)),
            [range, range, ByteRange::between(15, 20), none(20), none(20)]
        );
        assert_eq!(
            [5, 10, 15, 20, 25].map(|at| range.before(at)),
            [none(10), none(10), ByteRange::between(10, 15), range, range]
        );
    }

    #[test]
    fn a_range_beyond_64_bits_does_not_exist() {
        assert_eq!(ByteRange::new(u64::MAX, 2), None);
        assert!(ByteRange::new(u64::MAX, 0).is_some());
    }

    #[test]
    fn touching_ranges_do_not_overlap() {
        let range = ByteRange::between(10, 20);
        assert!(!range.overlaps(ByteRange::between(20, 30)));
        assert!(range.overlaps(ByteRange::between(19, 30)));
    }

    #[test]
    fn only_a_clean_mapped_extent_is_a_pure_overwrite() {
        let clean = Extent {
            guest: ByteRange::between(0, 1),
            alloc_range: ByteRange::between(0, 1),
            state: ExtentState::Mapped { host: 0 },
            flags: ExtentFlags::empty(),
        };
        assert!(clean.is_pure_overwrite());
        for flags in [ExtentFlags::NEW, ExtentFlags::SHARED, ExtentFlags::DIRTY] {
            assert!(!Extent { flags, ..clean }.is_pure_overwrite());
        }
        assert!(!Extent { state: ExtentState::Zero, ..clean }.is_pure_overwrite());
    }
}
