//! Space for a part of a disk that nothing has been written to, so that writing to it cannot fail for want of space.

use blockhouse_core::{
    Buffer, ByteRange, Durability, ErrorKind, Fallback, Request, Result, Storage, ToolProgress,
    Unmap,
};
use blockhouse_format::SpaceMode;

use crate::disk::Disk;

/// Bytes of one write of zeros, of one request for zeros that are not sent, and of one for space.
const WRITE_SIZE: u64 = 1 << 20;
const PREPARE_SIZE: u64 = 64 << 20;
const RESERVE_SIZE: u64 = 1 << 30;

/// Takes the space of `range`, which reads as zeros before and after: in a qcow2 image each of its clusters has its
/// place then. Durable with the next flush. No other request may be in flight there.
///
/// # Errors
/// `NoSpace`, `ReadOnly` or `PastEnd`; `Unsupported` where the host cannot set space aside, and zeros have to be
/// written; or what the storage answers. A part of the space may be taken then.
pub async fn take_space<S: Storage>(
    disk: &Disk<S>,
    range: ByteRange,
    mode: SpaceMode,
    progress: &ToolProgress,
) -> Result<()> {
    progress.begin(range.length());
    let size = match mode {
        SpaceMode::Falloc => RESERVE_SIZE,
        SpaceMode::Full => WRITE_SIZE,
    };
    let mut zeros = Buffer::new(if mode == SpaceMode::Full { size as usize } else { 0 });
    zeros.bytes_mut().fill(0);
    let mut rest = match mode {
        SpaceMode::Falloc => range,
        SpaceMode::Full => prepare(disk, range, progress).await?,
    };
    while !rest.is_empty() {
        // Up to whole units of the disk: the last cluster before the range is in use.
        let chunk = rest.truncate(size - rest.offset() % size);
        let durability = Durability::None;
        let request = match mode {
            SpaceMode::Falloc => {
                let (unmap, fallback) = (Unmap::Forbidden, Fallback::Forbidden);
                Request::WriteZeroes { range: chunk, unmap, fallback, durability }
            }
            SpaceMode::Full => {
                zeros.set_len(chunk.length() as usize);
                Request::Write { offset: chunk.offset(), from: zeros.lend(), durability }
            }
        };
        disk.submit(request).await.map_err(|error| match error.kind() {
            ErrorKind::Unsupported => error.hint("choose preallocation full"),
            _ => error,
        })?;
        rest = rest.skip(chunk.length());
        progress.reach(range.length() - rest.length());
    }
    Ok(())
}

/// Takes as written zeros that are not sent what the storage can; the rest is for the caller.
async fn prepare<S: Storage>(
    disk: &Disk<S>,
    range: ByteRange,
    progress: &ToolProgress,
) -> Result<ByteRange> {
    let mut rest = range;
    while !rest.is_empty() {
        let chunk = rest.truncate(PREPARE_SIZE - rest.offset() % PREPARE_SIZE);
        let left = disk.prepare_zeroes(chunk).await?;
        rest = rest.skip(chunk.length() - left.length());
        progress.reach(range.length() - rest.length());
        if !left.is_empty() {
            break;
        }
    }
    Ok(rest)
}
