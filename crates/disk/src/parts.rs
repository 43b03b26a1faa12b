//! Requests that consist of several parts: how they are cut, and how the parts run together.
//!
//! Several storage operations of one request are in flight at once. As they complete, the next
//! extents are looked up. So a request of any length holds at most 2 x [`MAX_IN_FLIGHT`] extents of
//! at most [`MAX_PART`] bytes each.

use blockhouse_core::{ByteRange, Extent, IoVector};

/// Maximum number of operations of one request in flight, and of extents of a write that are
/// prepared before the first one is written.
pub(crate) const MAX_IN_FLIGHT: usize = 16;
/// Maximum bytes of one storage operation. A larger operation is no faster on any device. A copy
/// from the page cache is made inside the system call, so a larger copy would block the loop too
/// long.
pub(crate) const MAX_PART: u64 = 4 << 20;
/// The alignment of the cuts of longer requests: the largest cluster of qcow2, so that no cut
/// divides a cluster.
const CUT_ALIGNMENT: u64 = 2 << 20;

/// The part of a request's memory that belongs to the next extent.
pub(crate) fn take_part(vector: &mut IoVector, extent: &Extent) -> IoVector {
    let rest = vector.split_off(extent.guest.length() as usize);
    std::mem::replace(vector, rest)
}

/// The part at the start of a range that one extent may cover.
pub(crate) fn first_part(range: ByteRange) -> ByteRange {
    if range.length() <= MAX_PART {
        return range;
    }
    let end = (range.offset() + MAX_PART) & !(CUT_ALIGNMENT - 1);
    range.truncate(end - range.offset())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_lie_between_clusters() {
        const MIB: u64 = 1 << 20;
        assert_eq!(first_part(ByteRange::between(512, 512 + MAX_PART)).length(), MAX_PART);
        for start in [0, 512, 2 * MIB - 512, 2 * MIB, 3 * MIB + 4096] {
            let part = first_part(ByteRange::between(start, start + MAX_PART + 512));
            assert!(part.end().is_multiple_of(CUT_ALIGNMENT), "{part}");
            assert!(part.length() > MAX_PART - CUT_ALIGNMENT && part.length() <= MAX_PART);
        }
    }
}
