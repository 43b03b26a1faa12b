//! Writes metadata to a storage that requires aligned requests.

use blockhouse_core::{Buffer, Durability, Result, Storage};

/// Writes `bytes` at `offset`, a multiple of the storage's alignment, padded with zeros to the next
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
