//! Reads metadata from a storage that requires aligned requests.

use blockhouse_core::{Buffer, ByteRange, Result, Storage};

/// Reads `length` bytes at any `offset`. Bytes past the end of the storage are returned as zeros.
///
/// # Errors
/// Errors of the storage.
pub(crate) async fn read<S: Storage>(storage: &S, offset: u64, length: usize) -> Result<Vec<u8>> {
    let block = u64::from(storage.capabilities().alignment.offset);
    let mut bytes = Vec::with_capacity(length);
    // Read in chunks, so that a large table does not need twice its memory.
    const CHUNK_SIZE: usize = 1 << 20;
    let mut at = offset;
    while bytes.len() < length {
        if at >= storage.size() {
            bytes.resize(length, 0);
            break;
        }
        let wanted = (length - bytes.len()).min(CHUNK_SIZE);
        let outer = ByteRange::between(at, at + wanted as u64).align_outward(block);
        let mut buffer = Buffer::new(outer.length() as usize);
        storage.read(outer.offset(), buffer.lend()).await?;
        let start = (at - outer.offset()) as usize;
        bytes.extend_from_slice(&buffer.bytes()[start..start + wanted]);
        at += wanted as u64;
    }
    Ok(bytes)
}
