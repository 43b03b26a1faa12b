//! Space for bytes that will be written later, so that writing them cannot fail for want of it.

use blockhouse_core::{Buffer, ByteRange, Durability, Error, ErrorKind, Result, Storage, Unmap};

/// How space is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// The host's file system sets it aside (`fallocate`): quick.
    Reserve,
    /// Zeros are written: slow, and works everywhere.
    Write,
}

/// The most bytes that are written at once.
const PIECE: u64 = 1 << 20;

/// Takes the space of `range`, which lies in whole blocks of the storage and reads as zeros before and
/// after. Durable with the next full flush.
///
/// # Errors
/// `NoSpace`; `Unsupported` where the host cannot set space aside; or what the storage answers.
pub async fn preallocate<S: Storage>(storage: &S, range: ByteRange, fill: Fill) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    match fill {
        Fill::Reserve => reserve(storage, range).await,
        Fill::Write => write(storage, range).await,
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
    let mut zeros = Buffer::new(range.length().min(PIECE) as usize);
    zeros.bytes_mut().fill(0);
    let mut rest = range;
    while !rest.is_empty() {
        let piece = rest.truncate(PIECE);
        zeros.set_len(piece.length() as usize);
        storage.write(piece.offset(), zeros.lend(), Durability::None).await?;
        rest = rest.skip(piece.length());
    }
    Ok(())
}
