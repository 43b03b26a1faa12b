//! Maps with small numbers as keys: the numbers of pages and extents.
//!
//! A guest chooses the numbers, but cannot make a lookup slow: of the N pages of a bitmap, only
//! about the square root of N share one slot of the table.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map with numbers as keys. A hash function that resists chosen keys would cost more than the
/// rest of a lookup.
pub(super) type NumberMap<T> = HashMap<u64, T, BuildHasherDefault<NumberHasher>>;

/// Spreads consecutive numbers by a multiplication and a rotation. Reason for the rotation: the
/// upper bits of the product are mixed best.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_follow_each_other_are_spread() {
        let hash = |number| {
            let mut hasher = NumberHasher::default();
            hasher.write_u64(number);
            hasher.finish()
        };
        // The slots in a table of 1024, and the upper 7 bits, which the table compares.
        let low: std::collections::HashSet<u64> = (0..512).map(|n| hash(n) % 1024).collect();
        let high: std::collections::HashSet<u64> = (0..512).map(|n| hash(n) >> 57).collect();
        assert!(low.len() > 300 && high.len() > 100, "{} {}", low.len(), high.len());
    }
}
