//! Copies a disk, or a part of it, into another one, whatever their formats.
//!
//! What the source's map shows as zeros is never read; what was read and turns out to be zeros is not
//! written. Several chunks are in flight at the same time and end in any order; no two of them touch
//! the same cluster of the target. Any number of threads can work on one copy, each on its own event
//! loop. Nothing is durable before the target is closed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhouse_core::sync::run_all;
use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, Fallback, IoVector, Request, Result, Storage,
    Unmap,
};
use futures_util::future::join_all;
use futures_util::lock::Mutex;

use super::scan::{Chunk, StatusScan};
use super::zeros::{is_zero, runs};
use crate::disk::Disk;
use crate::write::CompressResult;

/// The least bytes of a chunk, and the bytes of one where clusters are smaller.
const CHUNK_SIZE: u64 = 1 << 20;
/// Zeros shorter than this are not worth a hole, in bytes.
const MIN_HOLE: u64 = 4096;

/// How many requests of one chunk are in flight together.
const MAX_IN_FLIGHT: usize = 16;

/// What the target holds before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetContent {
    /// All of it reads as zeros.
    Zero,
    /// Anything, for instance a part of the copy: it is read, and what is right is not written again.
    Unknown,
}

/// How a copy is made.
#[derive(Clone, Copy, Debug)]
pub struct CopyOptions {
    /// What the target holds before.
    pub target_content: TargetContent,
    /// Whether data is stored in compressed clusters, where that saves something.
    pub compress: bool,
    /// How many chunks each thread has in flight, at least one. A chunk takes 1 MiB of memory or as
    /// much as a cluster of the target, twice that where the target is read too.
    pub max_in_flight: usize,
}

/// How far a copy has come, in bytes of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// What needs no more work, holes included.
    pub done: u64,
    /// The size of the disk.
    pub total: u64,
    /// What was written.
    pub written: u64,
}

/// A copy that is being made. See the module's page.
pub struct CopyJob<S: Storage> {
    source: Arc<Disk<S>>,
    /// What of the source is copied.
    part: ByteRange,
    target: Arc<Disk<S>>,
    options: CopyOptions,
    /// Bytes of a chunk: a multiple of the target's clusters.
    chunk: u64,
    /// Bytes that are looked at together for zeros.
    unit: u64,
    /// Behind a lock that does not look at the clock, as that of `async_lock` does.
    scan: Mutex<StatusScan<Arc<Disk<S>>>>,
    has_failed: AtomicBool,
    /// Where the scan is.
    passed: AtomicU64,
    /// What of that is still in flight.
    in_flight: AtomicU64,
    written: AtomicU64,
}

impl<S: Storage> CopyJob<S> {
    /// The copy of all of `source` to the start of `target`, which nothing else may change meanwhile.
    /// What the target has beyond that stays as it is.
    ///
    /// # Errors
    /// `InvalidInput` when the target is smaller, or data is to be compressed where the target's
    /// format cannot.
    pub fn new(source: Arc<Disk<S>>, target: Arc<Disk<S>>, options: CopyOptions) -> Result<Self> {
        let all = ByteRange::between(0, source.size());
        Self::of_part(source, all, target, options)
    }

    /// As [`new`](Self::new), of a part of `source`, at any offset and of any length. What follows it up to the end of
    /// the target's last sector is zeros then.
    ///
    /// # Errors
    /// As [`new`](Self::new); `InvalidInput` for a part that reaches past the end of the source.
    pub fn of_part(
        source: Arc<Disk<S>>,
        part: ByteRange,
        target: Arc<Disk<S>>,
        options: CopyOptions,
    ) -> Result<Self> {
        let refuse =
            |what: String| Err(Error::new(ErrorKind::InvalidInput, what).on(target.name()));
        if part.end() > source.size() {
            return refuse(format!("the part to copy ends past the end of {}", source.name()));
        }
        if target.size() < part.length() {
            let (has, needs) = (target.size(), part.length());
            return refuse(format!("has {has} bytes, and the copy needs {needs}"));
        }
        if options.compress && target.compression().is_none() {
            return refuse(format!("{} has no compressed clusters", target.format_name()));
        }
        let cluster_size = target.cluster_size().unwrap_or(1);
        let unit = match options.compress {
            false => target.allocation_unit().max(MIN_HOLE),
            true => cluster_size,
        };
        let chunk = CHUNK_SIZE.max(cluster_size);
        let scanned = match options.target_content {
            TargetContent::Zero => vec![Arc::clone(&source)],
            TargetContent::Unknown => vec![Arc::clone(&source), Arc::clone(&target)],
        };
        let scan = StatusScan::new(scanned, chunk, part.length()).with_first_from(part.offset());
        Ok(Self {
            source,
            part,
            target,
            options,
            chunk,
            unit,
            scan: Mutex::new(scan),
            has_failed: AtomicBool::new(false),
            passed: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            written: AtomicU64::new(0),
        })
    }

    /// How far it has come. From any thread, at any time.
    pub fn progress(&self) -> CopyProgress {
        // In this order a chunk that ends meanwhile never counts as done too early.
        let passed = self.passed.load(Ordering::Acquire);
        let in_flight = self.in_flight.load(Ordering::Acquire);
        CopyProgress {
            done: passed.saturating_sub(in_flight),
            total: self.part.length(),
            written: self.written.load(Ordering::Relaxed),
        }
    }

    /// Works until nothing is left to begin and all that this call began has ended. To be called once
    /// by each thread that is to work.
    ///
    /// # Errors
    /// The first error of this thread, which names the file and the offset. The others stop soon
    /// after, without an error. What was written until then stays.
    pub async fn work(&self) -> Result<()> {
        let loops = (0..self.options.max_in_flight.max(1)).map(|_| self.run_loop());
        join_all(loops).await.into_iter().collect()
    }

    async fn run_loop(&self) -> Result<()> {
        let outcome = self.copy_loop().await;
        if outcome.is_err() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        outcome
    }

    async fn copy_loop(&self) -> Result<()> {
        let mut buffer = Buffer::new(self.chunk as usize);
        let mut old = match self.options.target_content {
            TargetContent::Zero => Buffer::new(0),
            TargetContent::Unknown => Buffer::new(self.chunk as usize),
        };
        while let Some(chunk) = self.next().await? {
            let length = chunk.range.length();
            match self.options.target_content {
                TargetContent::Zero => self.copy(&chunk, &mut buffer).await?,
                TargetContent::Unknown => self.update(&chunk, &mut buffer, &mut old).await?,
            }
            self.in_flight.fetch_sub(length, Ordering::Release);
        }
        Ok(())
    }

    async fn next(&self) -> Result<Option<Chunk>> {
        let mut scan = self.scan.lock().await;
        if self.has_failed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let chunk = scan.next().await?;
        let length = chunk.as_ref().map_or(0, |chunk| chunk.range.length());
        self.in_flight.fetch_add(length, Ordering::Release);
        self.passed.store(scan.offset(), Ordering::Release);
        Ok(chunk)
    }

    /// Copies a chunk to where there are zeros.
    async fn copy(&self, chunk: &Chunk, buffer: &mut Buffer) -> Result<()> {
        read_from(&self.source, self.part.offset(), chunk, buffer).await?;
        let length = chunk.range.length() as usize;
        let bytes = buffer.bytes();
        let data = runs(length, self.unit as usize, |unit| !is_zero(&bytes[unit]));
        self.store(chunk.range.offset(), data, buffer).await
    }

    /// Makes a chunk of the target what it is in the source.
    async fn update(&self, chunk: &Chunk, buffer: &mut Buffer, old: &mut Buffer) -> Result<()> {
        read_from(&self.source, self.part.offset(), chunk, buffer).await?;
        let (offset, length) = (chunk.range.offset(), chunk.range.length() as usize);
        let into = old.lend_range(0, length);
        self.target.submit(Request::Read { offset, into }).await?;
        let (new, old) = (buffer.bytes(), old.bytes());
        let differs = |unit: Range<usize>| new[unit.clone()] != old[unit];
        let (unit, is_empty) =
            (self.unit as usize, |unit: &Range<usize>| is_zero(&new[unit.clone()]));
        let data = runs(length, unit, |unit| !is_empty(&unit) && differs(unit));
        let holes = runs(length, unit, |unit| is_empty(&unit) && differs(unit));
        run_all(
            MAX_IN_FLIGHT,
            holes.into_iter().map(|hole| {
                let range =
                    ByteRange::between(offset + hole.start as u64, offset + hole.end as u64);
                let (unmap, fallback, durability) =
                    (Unmap::Allowed, Fallback::Allowed, Durability::None);
                self.target.submit(Request::WriteZeroes { range, unmap, fallback, durability })
            }),
        )
        .await?;
        self.store(offset, data, buffer).await
    }

    /// Writes parts of the buffer, which holds the disk's bytes from `offset` on.
    async fn store(&self, offset: u64, data: Vec<Range<usize>>, buffer: &mut Buffer) -> Result<()> {
        let sum: usize = data.iter().map(ExactSizeIterator::len).sum();
        match self.options.compress {
            false => self.write(offset, data, buffer).await?,
            true => {
                for cluster in clusters(data, self.unit as usize) {
                    let at = offset + cluster.start as u64;
                    let bytes = &buffer.bytes()[cluster.clone()];
                    if self.target.write_compressed(at, bytes).await?
                        == CompressResult::Incompressible
                    {
                        self.write(offset, vec![cluster], buffer).await?;
                    }
                }
            }
        }
        self.written.fetch_add(sum as u64, Ordering::Relaxed);
        Ok(())
    }

    async fn write(&self, offset: u64, data: Vec<Range<usize>>, buffer: &mut Buffer) -> Result<()> {
        let parts = lend(buffer, &data);
        run_all(
            MAX_IN_FLIGHT,
            parts.into_iter().zip(&data).map(|(from, part)| {
                let offset = offset + part.start as u64;
                self.target.submit(Request::Write { offset, from, durability: Durability::None })
            }),
        )
        .await
    }
}

/// Fills the start of `buffer` with a chunk of the disk: its data is read, the rest is zeros.
pub(super) async fn read<S: Storage>(
    disk: &Disk<S>,
    chunk: &Chunk,
    buffer: &mut Buffer,
) -> Result<()> {
    read_from(disk, 0, chunk, buffer).await
}

/// As [`read`], where offset 0 of the chunk's ranges is `first` on the disk.
async fn read_from<S: Storage>(
    disk: &Disk<S>,
    first: u64,
    chunk: &Chunk,
    buffer: &mut Buffer,
) -> Result<()> {
    let start = chunk.range.offset();
    let size = disk.size().saturating_sub(first);
    let within = |range: &ByteRange| {
        (range.offset() - start) as usize..(range.end().min(size).max(start) - start) as usize
    };
    let mut end = 0;
    let mut data = Vec::new();
    for range in &chunk.data {
        let range = within(range);
        // What lies past the disk's end belongs to a longer one.
        if range.start < range.end {
            buffer.bytes_mut()[end..range.start].fill(0);
            end = range.end;
            data.push(range);
        }
    }
    buffer.bytes_mut()[end..chunk.range.length() as usize].fill(0);
    let parts = lend(buffer, &data);
    run_all(
        MAX_IN_FLIGHT,
        parts.into_iter().zip(&data).map(|(into, part)| {
            disk.submit(Request::Read { offset: first + start + part.start as u64, into })
        }),
    )
    .await
}

/// The memory of parts of a buffer, which are in ascending order.
pub(super) fn lend(buffer: &mut Buffer, parts: &[Range<usize>]) -> Vec<IoVector> {
    let mut rest = buffer.lend();
    let mut start = 0;
    let mut lent = Vec::with_capacity(parts.len());
    for part in parts {
        rest.advance(part.start - start);
        let after = rest.split_off(part.len());
        lent.push(std::mem::replace(&mut rest, after));
        start = part.end;
    }
    lent
}

/// Cuts what starts at clusters into single clusters.
fn clusters(data: Vec<Range<usize>>, size: usize) -> impl Iterator<Item = Range<usize>> {
    data.into_iter().flat_map(move |run| {
        run.clone().step_by(size).map(move |start| start..(start + size).min(run.end))
    })
}
