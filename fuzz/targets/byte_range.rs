//! Ranges of bytes, as a hostile client or image states them, against arithmetic that cannot
//! overflow.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_core::ByteRange;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    offset: u64,
    length: u64,
    other_offset: u64,
    other_length: u64,
    count: u64,
    alignment_bits: u8,
}

fuzz_target!(|input: Input| {
    let fits = u128::from(input.offset) + u128::from(input.length) <= u128::from(u64::MAX);
    let range = ByteRange::new(input.offset, input.length);
    assert_eq!(range.is_some(), fits);
    let Some(range) = range else { return };
    let (start, end) = (u128::from(range.offset()), u128::from(range.end()));
    assert_eq!(end, start + u128::from(input.length));

    align(range, 1 << (input.alignment_bits % 64));
    let (head, tail) = (range.truncate(input.count), range.skip(input.count));
    assert_eq!(head.length() + tail.length(), range.length());
    assert_eq!(
        (head.offset(), head.end(), tail.end()),
        (range.offset(), tail.offset(), range.end())
    );

    if let Some(other) = ByteRange::new(input.other_offset, input.other_length) {
        let first_common = start.max(other.offset().into());
        let common = first_common < end.min(other.end().into());
        // An empty range shares no byte, though it may lie within the other.
        if !range.is_empty() && !other.is_empty() {
            assert_eq!(range.overlaps(other), common);
        }
        assert_eq!(range.overlaps(other), other.overlaps(range));
    }
});

fn align(range: ByteRange, alignment: u64) {
    let outward = range.align_outward(alignment);
    assert!(outward.offset() <= range.offset() && outward.end() >= range.end());
    assert!(outward.offset().is_multiple_of(alignment));
    assert!(range.offset() - outward.offset() < alignment);
    assert!(outward.end() - range.end() < alignment);
    match range.align_inward(alignment) {
        Some(inward) => {
            assert!(inward.offset() >= range.offset() && inward.end() <= range.end());
            assert!(inward.is_aligned(alignment) && !inward.is_empty());
            assert!(inward.offset() - range.offset() < alignment);
            assert!(range.end() - inward.end() < alignment);
        }
        // No whole unit fits in: the range is shorter than two of them, less two bytes.
        None => assert!(u128::from(range.length()) <= 2 * u128::from(alignment) - 2),
    }
    if range.is_aligned(alignment) {
        assert_eq!(outward, range);
    }
}
