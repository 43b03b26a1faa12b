//! Tables on their way between the storage and memory.

use blockhouse_core::{Buffer, ByteRange, Durability, Result, Storage};

/// Reads `length` bytes at any `offset`. Bytes past the end are zeros.
pub(crate) async fn read<S: Storage>(storage: &S, offset: u64, length: usize) -> Result<Vec<u8>> {
    let block = u64::from(storage.capabilities().alignment.offset);
    let mut bytes = Vec::with_capacity(length);
    // Pieces, so that a large table does not need twice its memory.
    const PIECE: usize = 1 << 20;
    let mut at = offset;
    while bytes.len() < length {
        let wanted = (length - bytes.len()).min(PIECE);
        let outer = ByteRange::between(at, at + wanted as u64).align_outward(block);
        let mut buffer = Buffer::new(outer.length() as usize);
        storage.read(outer.offset(), buffer.lend()).await?;
        let start = (at - outer.offset()) as usize;
        bytes.extend_from_slice(&buffer.bytes()[start..start + wanted]);
        at += wanted as u64;
    }
    Ok(bytes)
}

/// Writes `bytes` at `offset`, a multiple of the storage's alignment, with zeros up to the next
/// multiple.
pub(crate) async fn write<S: Storage>(
    storage: &S,
    offset: u64,
    bytes: &[u8],
    durability: Durability,
) -> Result<()> {
    let block = storage.capabilities().alignment.offset as usize;
    let mut buffer = Buffer::new(bytes.len().next_multiple_of(block));
    buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    storage.write(offset, buffer.lend(), durability).await
}

/// As much of a range of whole clusters as lies in the file, in whole blocks: for giving it back.
pub(crate) fn whole_blocks<S: Storage>(storage: &S, range: ByteRange) -> Option<ByteRange> {
    let inside = range.truncate(storage.size().saturating_sub(range.offset()));
    inside.align_inward(u64::from(storage.capabilities().alignment.offset))
}

/// Big-endian words as bytes.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Bytes as big-endian words.
pub(crate) fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| super::entry::be64(word, 0)).collect()
}
