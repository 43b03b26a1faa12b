//! Allocates host space for bytes that will be written later, so that these writes cannot fail with
//! ENOSPC.

use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, Offload, Result, Storage, ToolProgress, Unmap,
};

/// How space is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceMode {
    /// Only a format's tables take space: data gets host offsets, and takes its space when it is
    /// written. A raw image stays as it is.
    Tables,
    /// The host's file system reserves the space (`fallocate`), which is quick.
    Falloc,
    /// Zeros are written, which is slow but works everywhere. If the storage can write zeros
    /// without a transfer of data, it does so, which is quick.
    Full,
}

/// Maximum bytes of one write of zeros, of one request for zeros without a transfer of data, and of
/// one reservation.
const WRITE_SIZE: u64 = 1 << 20;
const PREPARE_SIZE: u64 = 64 << 20;
const RESERVE_SIZE: u64 = 1 << 30;

/// Allocates the space of `range`, which consists of whole blocks of the storage and reads as zeros
/// before and after. Durable with the next full flush. `progress` advances by the bytes done.
///
/// # Errors
/// `NoSpace`; `Unsupported` if the host cannot reserve space; or errors of the storage.
pub async fn preallocate<S: Storage>(
    storage: &S,
    range: ByteRange,
    mode: SpaceMode,
    progress: &ToolProgress,
) -> Result<()> {
    let (range, size) = match mode {
        SpaceMode::Tables => return Ok(()),
        SpaceMode::Falloc => (range, RESERVE_SIZE),
        SpaceMode::Full => (prepare(storage, range, progress).await?, WRITE_SIZE),
    };
    let is_sent = mode == SpaceMode::Full;
    let mut zeros = Buffer::new(if is_sent { range.length().min(size) as usize } else { 0 });
    let mut rest = range;
    while !rest.is_empty() {
        let chunk = rest.truncate(size);
        if is_sent {
            zeros.set_len(chunk.length() as usize);
            storage.write(chunk.offset(), zeros.lend(), Durability::None).await?;
        } else {
            reserve(storage, chunk).await?;
        }
        progress.advance(chunk.length());
        rest = rest.skip(chunk.length());
    }
    Ok(())
}

/// Fills the start of `range` with zeros that the storage writes without a transfer of data, as far
/// as it supports that. Returns the rest, which the caller must write.
async fn prepare<S: Storage>(
    storage: &S,
    range: ByteRange,
    progress: &ToolProgress,
) -> Result<ByteRange> {
    let mut rest = range;
    while !rest.is_empty() && storage.capabilities().prepare_zeroes == Offload::Available {
        let chunk = rest.truncate(PREPARE_SIZE);
        match storage.prepare_zeroes(chunk, Buffer::new(0).lend()).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => break,
            outcome => outcome?,
        }
        progress.advance(chunk.length());
        rest = rest.skip(chunk.length());
    }
    Ok(rest)
}

async fn reserve<S: Storage>(storage: &S, range: ByteRange) -> Result<()> {
    match storage.write_zeroes(range, Unmap::Forbidden).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            let what = "the host's file system cannot set space aside";
            let error = Error::new(ErrorKind::Unsupported, what).on(storage.name());
            Err(error.hint("choose preallocation=full"))
        }
        outcome => outcome,
    }
}
