//! Iterates over the chunks of an image, for tools that process much of the image.

use std::cell::Cell;
use std::future::{Future, ready};
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::sync::run_bounded;
use blockhouse_core::{
    Allocation, Buffer, ByteRange, Durability, ExtentState, Fallback, IoVector, Request, Result,
    Storage, Unmap, WorkBudget,
};
use blockhouse_format::Intent;
use futures_util::future::join_all;
use futures_util::stream::{self, Stream, StreamExt};

use crate::disk::Disk;
use crate::layer::{HostRuns, Layer};

/// Maximum number of bytes that are moved at once.
const CHUNK_SIZE: u64 = 1 << 20;
/// Maximum number of chunks in flight.
const MAX_CHUNKS: usize = 8;
/// Minimum length, in bytes, of a hole of the host file that counts as zeros; shorter holes count
/// as data.
const MIN_HOST_HOLE: u64 = 64 << 10;

/// The source of a chunk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The image itself has data.
    Image,
    /// The bytes are zeros by the image's metadata, or lie in a hole of the host file.
    Zero,
    /// The backing file has the bytes; without a backing file they are zeros.
    Backing,
}

/// Runs `work` on all chunks, several at a time. Returns the first error, after all work that was
/// started has ended.
pub(super) async fn for_each_in_flight<T, F: Future<Output = Result<()>>>(
    chunks: impl Stream<Item = Result<T>>,
    work: impl Fn(T) -> F,
) -> Result<()> {
    let work = &work;
    let has_failed = &Cell::new(false);
    let chunks = chunks.take_while(|_| ready(!has_failed.get()));
    let done = chunks.map(|chunk| async move { work(chunk?).await });
    run_bounded(MAX_CHUNKS, &WorkBudget::new(), has_failed, done).await
}

/// Runs `count` loops together, at least one. A loop that fails sets `has_failed`, which ends the
/// other loops of this thread and of other threads.
pub(super) async fn run_loops<F: Future<Output = Result<()>>>(
    count: usize,
    has_failed: &AtomicBool,
    run: impl Fn() -> F,
) -> Result<()> {
    let run_one = async || run().await.inspect_err(|_| has_failed.store(true, Ordering::Relaxed));
    join_all((0..count.max(1)).map(|_| run_one())).await.into_iter().collect()
}

/// Runs `work` on all chunks of the disk, as [`for_each_in_flight`].
pub(super) async fn for_each_chunk<S: Storage, F: Future<Output = Result<()>>>(
    disk: &Disk<S>,
    work: impl Fn(ByteRange, Source) -> F,
) -> Result<()> {
    let start = (ByteRange::between(0, disk.size()), HostRuns::default());
    let chunks = stream::unfold(start, |(rest, mut runs)| async move {
        if rest.is_empty() {
            return None;
        }
        Some(match next_chunk(disk.image().layer(), rest, &mut runs).await {
            Ok(next @ (chunk, _)) => (Ok(next), (rest.skip(chunk.length()), runs)),
            Err(error) => (Err(error), (rest.skip(rest.length()), runs)),
        })
    });
    for_each_in_flight(chunks, |(chunk, source)| work(chunk, source)).await
}

async fn next_chunk<S: Storage>(
    layer: &Layer<S>,
    rest: ByteRange,
    runs: &mut HostRuns,
) -> Result<(ByteRange, Source)> {
    let extent = layer.format().map(rest, Intent::Read).await?;
    Ok(match extent.state {
        ExtentState::Mapped { host } => next_mapped(layer, extent.guest, host, runs).await?,
        ExtentState::Compressed { .. } => (extent.guest.truncate(CHUNK_SIZE), Source::Image),
        ExtentState::Zero => (extent.guest, Source::Zero),
        ExtentState::Hole | ExtentState::Backing => (extent.guest, Source::Backing),
    })
}

/// The first chunk of a mapped extent: data, or a hole of the host file, which reads as zeros.
async fn next_mapped<S: Storage>(
    layer: &Layer<S>,
    guest: ByteRange,
    host: u64,
    runs: &mut HostRuns,
) -> Result<(ByteRange, Source)> {
    let mut data = 0;
    while data < guest.length().min(CHUNK_SIZE) {
        let rest = ByteRange::between(host + data, host + guest.length());
        let (status, length) = layer.host_status(runs, rest).await?;
        let is_all = length == guest.length();
        if status == Allocation::Hole && (length >= MIN_HOST_HOLE || is_all) {
            if data == 0 {
                return Ok((guest.truncate(length), Source::Zero));
            }
            break;
        }
        data += length;
    }
    Ok((guest.truncate(data.min(CHUNK_SIZE)), Source::Image))
}

/// Reads `range` of a disk. Bytes past the end are zeros.
pub(super) async fn read_or_zeros<S: Storage>(
    disk: &Disk<S>,
    range: ByteRange,
    buffer: &mut Buffer,
) -> Result<()> {
    let inside = range.truncate(disk.size().saturating_sub(range.offset()));
    let mut into: IoVector = buffer.lend();
    into.split_off(inside.length() as usize).fill(0);
    if inside.is_empty() {
        return Ok(());
    }
    disk.submit(Request::Read { offset: inside.offset(), into }).await
}

/// Zeroes `range`. Not durable before the next flush.
pub(super) async fn make_zeros<S: Storage>(disk: &Disk<S>, range: ByteRange) -> Result<()> {
    let (unmap, fallback, durability) = (Unmap::Allowed, Fallback::Allowed, Durability::None);
    disk.submit(Request::WriteZeroes { range, unmap, fallback, durability }).await
}
