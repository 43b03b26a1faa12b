//! Bits of a bitmap in bytes: the least significant bit of a byte comes first.

use std::ops::Range;

/// Sets these bits of `bytes`.
pub(crate) fn set_bits(bytes: &mut [u8], bits: Range<u64>) {
    if bits.is_empty() {
        return;
    }
    let (first, last) = (bits.start as usize / 8, (bits.end as usize - 1) / 8);
    let from = 0xff_u8 << (bits.start % 8);
    let to = 0xff_u8 >> (7 - (bits.end - 1) % 8);
    if first == last {
        bytes[first] |= from & to;
        return;
    }
    bytes[first] |= from;
    bytes[first + 1..last].fill(0xff);
    bytes[last] |= to;
}

/// Clears these bits of `bytes`.
pub(crate) fn clear_bits(bytes: &mut [u8], bits: Range<u64>) {
    for bit in bits {
        bytes[bit as usize / 8] &= !(1 << (bit % 8));
    }
}

/// Whether all of these bits are set.
pub(crate) fn all_set(bytes: &[u8], bits: Range<u64>) -> bool {
    let mut at = bits.start;
    while at < bits.end {
        let byte = bytes[at as usize / 8];
        if at.is_multiple_of(8) && at + 8 <= bits.end {
            if byte != 0xff {
                return false;
            }
            at += 8;
        } else if byte >> (at % 8) & 1 == 0 {
            return false;
        } else {
            at += 1;
        }
    }
    true
}

/// The runs of bits that are set, in order.
pub(crate) struct BitRuns<'a> {
    bytes: &'a [u8],
    at: u64,
    end: u64,
}

impl<'a> BitRuns<'a> {
    /// The runs in the first `end` bits of `bytes`, or in all of them if there are fewer.
    pub(crate) fn new(bytes: &'a [u8], end: u64) -> Self {
        Self { bytes, at: 0, end: end.min(bytes.len() as u64 * 8) }
    }

    /// The first bit from `at` on that differs from the bits of `skipped`, which is 0 or 0xff.
    fn skip_bits(&self, mut at: u64, skipped: u8) -> u64 {
        while at < self.end {
            let byte = self.bytes[at as usize / 8];
            if byte == skipped {
                at = (at / 8 + 1) * 8;
            } else if byte >> (at % 8) & 1 == skipped & 1 {
                at += 1;
            } else {
                return at;
            }
        }
        self.end
    }
}

impl Iterator for BitRuns<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.skip_bits(self.at, 0);
        self.at = self.skip_bits(start, 0xff);
        (start < self.at).then_some(start..self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_those_that_were_set() {
        for (start, end) in [(0, 1), (3, 5), (7, 9), (0, 64), (5, 40), (63, 64)] {
            let mut bytes = [0; 8];
            set_bits(&mut bytes, start..end);
            assert!(BitRuns::new(&bytes, 64).eq(std::iter::once(start..end)));
            assert!(all_set(&bytes, start..end));
            assert!(start == 0 || !all_set(&bytes, start - 1..end));
            assert!(end == 64 || !all_set(&bytes, start..end + 1));
            clear_bits(&mut bytes, start..end);
            assert_eq!(bytes, [0; 8]);
        }
        let mut bytes = [0; 8];
        for bits in [2..4, 4..6, 9..9, 30..31, 40..60] {
            set_bits(&mut bytes, bits);
        }
        assert_eq!(BitRuns::new(&bytes, 50).collect::<Vec<_>>(), [2..6, 30..31, 40..50]);
    }
}
