//! Finds the parts of a buffer that have to be written, because they are not zeros.

use std::ops::Range;

use blockhouse_core::{Buffer, IoVector};

/// The length of one comparison, in bytes: short enough to stop early, long enough to be quick.
const STEP: usize = 4096;
static ZEROS: [u8; STEP] = [0; STEP];

/// Whether all bytes are zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(STEP).all(|chunk| *chunk == ZEROS[..chunk.len()])
}

/// Divides a part of a buffer into units of the disk; `offset` is the buffer's start on the disk.
pub(super) fn units(
    part: Range<usize>,
    offset: u64,
    unit: usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut start = part.start;
    std::iter::from_fn(move || {
        let inside = (offset % unit as u64) as usize + start;
        let range = start..(start + unit - inside % unit).min(part.end);
        start = range.end;
        (!range.is_empty()).then_some(range)
    })
}

/// The parts of a buffer of `length` bytes that consist of `wanted` [`units`]; `offset` is the
/// buffer's start on the disk. `wanted` gets a unit's range in the buffer. Adjacent units are one
/// part.
pub(super) fn runs(
    length: usize,
    offset: u64,
    unit: usize,
    wanted: impl Fn(Range<usize>) -> bool,
) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for range in units(0..length, offset, unit) {
        if !wanted(range.clone()) {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => runs.push(range),
        }
    }
    runs
}

/// The memory of parts of a buffer, which are in ascending order.
pub(super) fn lend(buffer: &mut Buffer, parts: &[Range<usize>]) -> Vec<IoVector> {
    let mut rest = buffer.lend();
    let mut start = 0;
    let mut lent = Vec::with_capacity(parts.len());
    for part in parts {
        rest.advance(part.start - start);
        let after = rest.split_off(part.len());
        lent.push(std::mem::replace(&mut rest, after));
        start = part.end;
    }
    lent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_makes_a_difference_wherever_it_is() {
        let mut bytes = vec![0; 3 * STEP + 5];
        assert!(is_zero(&bytes) && is_zero(&[]));
        for at in [0, STEP - 1, STEP, 3 * STEP, 3 * STEP + 4] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "byte {at}");
            bytes[at] = 0;
        }
    }

    #[test]
    fn neighbours_become_one_run_and_the_last_unit_may_be_short() {
        let wanted = |range: Range<usize>| [0, 4, 8, 16].contains(&range.start);
        assert_eq!(runs(18, 8, 4, wanted), [0..12, 16..18]);
        assert_eq!(runs(0, 0, 4, |_| true), []);
    }

    #[test]
    fn units_are_those_of_the_disk() {
        let all = |part, offset| units(part, offset, 4).collect::<Vec<_>>();
        assert_eq!(all(0..9, 6), [0..2, 2..6, 6..9]);
        assert_eq!(all(1..5, 6), [1..2, 2..5]);
        assert_eq!(all(3..3, 6), []);
    }
}
