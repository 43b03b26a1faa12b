//! Compares two disks of any formats, and finds the first byte that differs.
//!
//! The part past the end of the shorter disk counts as zeros. Ranges that the block status of both
//! disks shows as zeros are not read. Several chunks are in flight at the same time, on any number
//! of threads. They begin in ascending order, so the first difference is found although they end in
//! any order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhouse_core::{Buffer, ByteRange, Result, Storage, rare};
use futures_util::future::join;
use futures_util::lock::Mutex;

use super::chunks::run_loops;
use super::convert::read;
use super::scan::{Chunk, StatusScan};
use crate::disk::Disk;
use crate::layer::BlockStatusCache;

/// Bytes that are compared at a time.
const CHUNK_SIZE: u64 = 1 << 20;
/// No difference yet.
const NONE: u64 = u64::MAX;

/// A comparison in progress. See the module's documentation.
pub struct CompareJob<S: Storage> {
    disks: [Arc<Disk<S>>; 2],
    max_in_flight: usize,
    size: u64,
    /// This mutex does not read the clock; the mutex of `async_lock` does.
    scan: Mutex<StatusScan<Arc<Disk<S>>>>,
    /// The offset of the first byte found so far that differs.
    difference: AtomicU64,
    has_failed: AtomicBool,
    passed: AtomicU64,
}

impl<S: Storage> CompareJob<S> {
    /// The comparison of two disks, which must not change during it. Each working thread has
    /// `max_in_flight` chunks of 1 MiB in flight and takes twice their memory.
    pub fn new(one: Arc<Disk<S>>, other: Arc<Disk<S>>, max_in_flight: usize) -> Self {
        let size = one.size().max(other.size());
        Self::of_start(one, other, size, max_in_flight)
    }

    /// As [`new`](Self::new), for the first `size` bytes only.
    pub fn of_start(
        one: Arc<Disk<S>>,
        other: Arc<Disk<S>>,
        size: u64,
        max_in_flight: usize,
    ) -> Self {
        let disks = [one, other];
        let scan = Mutex::new(StatusScan::new(disks.iter().cloned(), CHUNK_SIZE, size));
        Self {
            disks,
            max_in_flight,
            size,
            scan,
            difference: AtomicU64::new(NONE),
            has_failed: AtomicBool::new(false),
            passed: AtomicU64::new(0),
        }
    }

    /// The number of bytes compared or being compared, and the total.
    pub fn progress(&self) -> (u64, u64) {
        (self.passed.load(Ordering::Relaxed), self.size)
    }

    /// Compares chunks until a difference is found or no chunk is left, and waits for all chunks
    /// that this call has begun. Each working thread calls it once.
    ///
    /// # Errors
    /// The first error of this thread. The other threads stop soon after it, without an error.
    pub async fn work(&self) -> Result<()> {
        rare(run_loops(self.max_in_flight, &self.has_failed, || self.compare_loop())).await
    }

    /// The offset of the first byte that differs, once all calls of [`work`](Self::work) have ended
    /// without an error.
    pub fn difference(&self) -> Option<u64> {
        Some(self.difference.load(Ordering::Acquire)).filter(|&offset| offset != NONE)
    }

    async fn compare_loop(&self) -> Result<()> {
        let mut buffers = [Buffer::new(CHUNK_SIZE as usize), Buffer::new(CHUNK_SIZE as usize)];
        while let Some(chunk) = self.next().await? {
            let [one, other] = &mut buffers;
            let (first, second) =
                join(read(&self.disks[0], &chunk, one), read(&self.disks[1], &chunk, other)).await;
            first.and(second)?;
            let length = chunk.range.length() as usize;
            let (one, other) = (&one.bytes()[..length], &other.bytes()[..length]);
            if one != other
                && let Some(at) = one.iter().zip(other).position(|(one, other)| one != other)
            {
                self.difference.fetch_min(chunk.range.offset() + at as u64, Ordering::AcqRel);
            }
        }
        Ok(())
    }

    async fn next(&self) -> Result<Option<Chunk>> {
        let mut scan = self.scan.lock().await;
        let is_over = self.has_failed.load(Ordering::Relaxed)
            || self.difference.load(Ordering::Relaxed) != NONE;
        if is_over {
            return Ok(None);
        }
        let chunk = scan.next().await?;
        self.passed.store(scan.offset(), Ordering::Relaxed);
        Ok(chunk)
    }
}

/// The offset of the first byte whose block status differs between two disks: whether the image or
/// a backing file has the range, whether it reads as zeros, is compressed, and has a place in the
/// file. These are the flags that `qemu-img compare -s` compares. Bytes past the end of the shorter
/// disk are not compared.
///
/// # Errors
/// Errors of mapping.
pub async fn first_status_difference<S: Storage>(
    one: &Disk<S>,
    other: &Disk<S>,
) -> Result<Option<u64>> {
    let mut rest = ByteRange::between(0, one.size().min(other.size()));
    let (mut cache, mut other_cache) = (BlockStatusCache::default(), BlockStatusCache::default());
    while !rest.is_empty() {
        let first = one.map_entry(rest, &mut cache).await?;
        let second = other.map_entry(rest, &mut other_cache).await?;
        if !first.kind.has_flags_of(second.kind) {
            return Ok(Some(rest.offset()));
        }
        rest = rest.skip(first.guest.length().min(second.guest.length()));
    }
    Ok(None)
}
