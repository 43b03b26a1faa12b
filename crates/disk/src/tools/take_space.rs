//! Allocates the space of an unwritten part of a disk, or only its tables. Writes to allocated
//! space cannot fail with ENOSPC.

use blockhouse_core::{
    Buffer, ByteRange, Durability, ErrorKind, Request, Result, Storage, ToolProgress,
};
use blockhouse_format::SpaceMode;

use crate::disk::Disk;

/// Bytes of one write of zeros; of one request that zeroes without sending zeros; of one allocation
/// of space.
const WRITE_SIZE: u64 = 1 << 20;
const PREPARE_SIZE: u64 = 64 << 20;
const RESERVE_SIZE: u64 = 1 << 30;

/// Allocates the space of `range`, which reads as zeros before and after: in a qcow2 image each of
/// its clusters then has a host offset. Durable with the next flush. No other request may be in
/// flight there. With `SpaceMode::Tables`, for images that have tables, the clusters are holes.
///
/// # Errors
/// `NoSpace`, `ReadOnly` or `PastEnd`; `Unsupported` if the host cannot allocate space, and zeros
/// must be written; or storage errors. After an error a part of the space may be allocated.
pub async fn take_space<S: Storage>(
    disk: &Disk<S>,
    range: ByteRange,
    mode: SpaceMode,
    progress: &ToolProgress,
) -> Result<()> {
    progress.begin(range.length());
    let step = match mode {
        SpaceMode::Tables | SpaceMode::Falloc => RESERVE_SIZE,
        SpaceMode::Full => PREPARE_SIZE,
    };
    let mut zeros = Buffer::new(WRITE_SIZE as usize);
    let mut rest = range;
    while !rest.is_empty() {
        // Chunks end at multiples of `step`, because the range may begin inside a cluster that is
        // in use.
        let chunk = rest.truncate(step - rest.offset() % step);
        let left = disk.take_space(chunk, mode).await.map_err(|error| match error.kind() {
            ErrorKind::Unsupported => error.hint("choose preallocation full"),
            _ => error,
        })?;
        rest = rest.skip(chunk.length() - left.length());
        progress.reach(range.length() - rest.length());
        if left.is_empty() {
            continue;
        }
        let unit = disk.image().cluster_size().unwrap_or(WRITE_SIZE);
        let sent = if mode == SpaceMode::Full && left.offset().is_multiple_of(unit) {
            // The storage cannot allocate, or only the last part of a cluster is left.
            rest
        } else {
            // A part of a cluster, at the start or the end of the range.
            left.truncate(unit - left.offset() % unit)
        };
        for chunk in chunks(sent) {
            zeros.set_len(chunk.length() as usize);
            let (offset, durability) = (chunk.offset(), Durability::None);
            disk.submit(Request::Write { offset, from: zeros.lend(), durability }).await?;
            rest = rest.skip(chunk.length());
            progress.reach(range.length() - rest.length());
        }
    }
    Ok(())
}

/// The parts of `range`, one for each write. Each ends at a multiple of `WRITE_SIZE`, or at the end
/// of the range.
fn chunks(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let mut rest = range;
    std::iter::from_fn(move || {
        let chunk = rest.truncate(WRITE_SIZE - rest.offset() % WRITE_SIZE);
        rest = rest.skip(chunk.length());
        (!chunk.is_empty()).then_some(chunk)
    })
}
