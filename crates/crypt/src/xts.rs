//! AES-XTS (IEEE 1619) of whole sectors, many blocks at a time for speed.

use aes::cipher::array::Array;
use aes::cipher::consts::U16;

/// Bytes of a block of AES.
pub(crate) const BLOCK: usize = 16;
/// Blocks that are computed together: 4 KiB.
pub(crate) const BATCH: usize = 256;

pub(crate) type Block = Array<u8, U16>;

/// Encrypts or decrypts sectors of `sector_size` bytes, at most 4 KiB. `iv` returns the
/// initialization vector of a sector by its index. `tweaks` encrypts these vectors; `blocks`
/// encrypts or decrypts blocks.
pub(crate) fn xts(
    bytes: &mut [u8],
    sector_size: usize,
    iv: impl Fn(u64) -> Block,
    tweaks: impl Fn(&mut [Block]),
    blocks: impl Fn(&mut [Block]),
) {
    let sectors_of_batch = BATCH * BLOCK / sector_size;
    let mut masks = [Block::default(); BATCH];
    for (batch, bytes) in bytes.chunks_mut(BATCH * BLOCK).enumerate() {
        let first = (batch * sectors_of_batch) as u64;
        let count = bytes.len() / sector_size;
        let mut first_masks = [Block::default(); BATCH * BLOCK / 512];
        for (index, mask) in first_masks[..count].iter_mut().enumerate() {
            *mask = iv(first + index as u64);
        }
        tweaks(&mut first_masks[..count]);
        let blocks_of_sector = sector_size / BLOCK;
        let of_sectors = masks.chunks_mut(blocks_of_sector).zip(&first_masks[..count]);
        of_sectors.for_each(|(masks, first)| fill_masks(masks, first));
        let (data, _) = Block::slice_as_chunks_mut(bytes);
        apply(data, &masks);
        blocks(data);
        apply(data, &masks);
    }
}

/// The masks of a sector's blocks: each is the previous one times x in GF(2^128).
fn fill_masks(masks: &mut [Block], first: &Block) {
    let mut mask = u128::from_le_bytes(first.0);
    for place in masks {
        *place = Array(mask.to_le_bytes());
        let carry = ((mask as i128) >> 127) as u128;
        mask = mask << 1 ^ carry & 0x87;
    }
}

fn apply(data: &mut [Block], masks: &[Block]) {
    for (block, mask) in data.iter_mut().zip(masks) {
        let both = u128::from_ne_bytes(block.0) ^ u128::from_ne_bytes(mask.0);
        *block = Array(both.to_ne_bytes());
    }
}
