//! Refcounts of 1 to 64 bits in the bytes of a refcount block.
//!
//! Refcounts narrower than a byte are stored from the least significant bits of a byte upwards;
//! wider refcounts are big-endian.

/// The `index`-th refcount of `1 << order` bits.
pub(crate) fn get(bytes: &[u8], order: u32, index: usize) -> u64 {
    match order {
        0..3 => {
            let (byte, shift, mask) = packed(order, index);
            u64::from(bytes[byte] >> shift & mask)
        }
        _ => {
            let width = 1 << (order - 3);
            let field = &bytes[index * width..][..width];
            field.iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
        }
    }
}

/// The indexes from `first` on whose refcount is not 0, in order. `bytes` are whole words of eight
/// bytes; those that are 0 are skipped at once.
pub(crate) fn used_from(bytes: &[u8], order: u32, first: usize) -> impl Iterator<Item = usize> {
    let in_word = 64 >> order;
    let words = bytes.as_chunks::<8>().0.iter().enumerate().skip(first / in_word);
    let used = words.filter(|(_, word)| **word != [0; 8]);
    let indexes = used.flat_map(move |(at, _)| at * in_word..(at + 1) * in_word);
    indexes.filter(move |&index| index >= first && get(bytes, order, index) != 0)
}

/// Changes the `index`-th refcount. `value` must fit into `1 << order` bits.
pub(crate) fn set(bytes: &mut [u8], order: u32, index: usize, value: u64) {
    match order {
        0..3 => {
            let (byte, shift, mask) = packed(order, index);
            bytes[byte] = bytes[byte] & !(mask << shift) | (value as u8 & mask) << shift;
        }
        _ => {
            let width = 1 << (order - 3);
            bytes[index * width..][..width].copy_from_slice(&value.to_be_bytes()[8 - width..]);
        }
    }
}

/// Byte, shift and mask of a refcount narrower than a byte.
fn packed(order: u32, index: usize) -> (usize, usize, u8) {
    let width = 1 << order;
    let bit = index * width;
    (bit / 8, bit % 8, (1u8 << width) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_keeps_its_neighbours() {
        for order in 0..=6 {
            let most = u64::MAX >> (64 - (1u32 << order));
            let mut bytes = [0xff; 64];
            set(&mut bytes, order, 3, 0);
            assert_eq!((2..5).map(|i| get(&bytes, order, i)).collect::<Vec<_>>(), [most, 0, most]);
            set(&mut bytes, order, 3, most);
            assert_eq!(bytes, [0xff; 64], "order {order}");
        }
    }

    #[test]
    fn used_ones_are_found_in_each_width() {
        for order in 0..=6 {
            let count = (64 * 8) >> order;
            for used in [vec![], vec![0], vec![count - 1], vec![1, 2, count / 2, count - 1]] {
                let mut bytes = [0; 64];
                used.iter().for_each(|&index| set(&mut bytes, order, index, 1));
                for first in 0..=count {
                    let expected: Vec<_> = used.iter().copied().filter(|&at| at >= first).collect();
                    let found: Vec<_> = used_from(&bytes, order, first).collect();
                    assert_eq!(found, expected, "order {order}, from {first}");
                }
            }
        }
    }

    #[test]
    fn narrow_ones_begin_at_the_low_bits_and_wide_ones_are_big_endian() {
        let mut bytes = [0; 4];
        set(&mut bytes, 0, 1, 1);
        assert_eq!(bytes, [2, 0, 0, 0]);
        set(&mut bytes, 4, 1, 0x0102);
        assert_eq!(bytes, [2, 0, 1, 2]);
    }
}
