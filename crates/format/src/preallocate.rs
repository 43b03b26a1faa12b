//! Space for bytes that will be written later, so that writing them cannot fail for want of it.

use blockhouse_core::{Buffer, ByteRange, Durability, Error, ErrorKind, Result, Storage, Unmap};

/// How space is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceMode {
    /// The host's file system sets it aside (`fallocate`): quick.
    Falloc,
    /// Zeros are written: slow, and works everywhere.
    Full,
}

/// Bytes of one write.
const CHUNK_SIZE: u64 = 1 << 20;

/// Takes the space of `range`, which lies in whole blocks of the storage and reads as zeros before and
/// after. Durable with the next full flush.
///
/// # Errors
/// `NoSpace`; `Unsupported` where the host cannot set space aside; or what the storage answers.
pub async fn preallocate<S: Storage>(storage: &S, range: ByteRange, mode: SpaceMode) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    match mode {
        SpaceMode::Falloc => reserve(storage, range).await,
        SpaceMode::Full => write(storage, range).await,
    }
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

async fn write<S: Storage>(storage: &S, range: ByteRange) -> Result<()> {
    let mut zeros = Buffer::new(range.length().min(CHUNK_SIZE) as usize);
    zeros.bytes_mut().fill(0);
    let mut rest = range;
    while !rest.is_empty() {
        let chunk = rest.truncate(CHUNK_SIZE);
        zeros.set_len(chunk.length() as usize);
        storage.write(chunk.offset(), zeros.lend(), Durability::None).await?;
        rest = rest.skip(chunk.length());
    }
    Ok(())
}
