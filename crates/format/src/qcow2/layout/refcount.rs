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
    fn narrow_ones_begin_at_the_low_bits_and_wide_ones_are_big_endian() {
        let mut bytes = [0; 4];
        set(&mut bytes, 0, 1, 1);
        assert_eq!(bytes, [2, 0, 0, 0]);
        set(&mut bytes, 4, 1, 0x0102);
        assert_eq!(bytes, [2, 0, 1, 2]);
    }
}
