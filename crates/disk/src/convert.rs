//! Copying a disk into another one, whatever their formats.
//!
//! What the source's map shows as zeros is never read; what was read and turns out to be zeros is not
//! written. Several pieces are under way at the same time and end in any order; no two of them touch
//! the same cluster of the target. Any number of threads can work on one copy, each on its own event
//! loop. Nothing is durable before the target is closed.

mod walk;
mod zeros;

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

use crate::{Disk, Packed};
pub(crate) use walk::{Piece, Walk};
use zeros::{is_zero, runs};

/// The least bytes of a piece, and the bytes of one where clusters are smaller.
const PIECE: u64 = 1 << 20;
/// Zeros shorter than this are not worth a hole, in bytes.
const MIN_HOLE: u64 = 4096;

/// How many requests of one piece are in flight together.
const MAX_IN_FLIGHT: usize = 16;

/// What the target holds before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// All of it reads as zeros.
    Zeros,
    /// Anything, for instance a part of the copy: it is read, and what is right is not written again.
    Anything,
}

/// How data is stored in the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// As it is.
    Plain,
    /// In compressed clusters, where that saves something.
    Compressed,
}

/// How a copy is made.
#[derive(Clone, Copy, Debug)]
pub struct CopyOptions {
    /// What the target holds before.
    pub before: Before,
    /// How data is stored.
    pub packing: Packing,
    /// How many pieces each thread has under way, at least one. A piece takes 1 MiB of memory or as
    /// much as a cluster of the target, twice that where the target is read too.
    pub together: usize,
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
pub struct Copying<S: Storage> {
    source: Arc<Disk<S>>,
    target: Arc<Disk<S>>,
    options: CopyOptions,
    /// Bytes of a piece: a multiple of the target's clusters.
    piece: u64,
    /// Bytes that are looked at together for zeros.
    unit: u64,
    /// Behind a lock that does not look at the clock, as that of `async_lock` does.
    walk: Mutex<Walk<Arc<Disk<S>>>>,
    has_failed: AtomicBool,
    /// Where the walk is.
    passed: AtomicU64,
    /// What of that is still under way.
    under_way: AtomicU64,
    written: AtomicU64,
}

impl<S: Storage> Copying<S> {
    /// The copy of all of `source` to the start of `target`, which nobody else changes meanwhile.
    /// What the target has beyond that stays as it is.
    ///
    /// # Errors
    /// `InvalidInput` when the target is smaller, or data is to be compressed where the target's
    /// format cannot.
    pub fn new(source: Arc<Disk<S>>, target: Arc<Disk<S>>, options: CopyOptions) -> Result<Self> {
        let refuse =
            |what: String| Err(Error::new(ErrorKind::InvalidInput, what).on(target.name()));
        if target.size() < source.size() {
            let (has, needs) = (target.size(), source.size());
            return refuse(format!("has {has} bytes, and the copy needs {needs}"));
        }
        if options.packing == Packing::Compressed && target.compression().is_none() {
            return refuse(format!("{} has no compressed clusters", target.format_name()));
        }
        let cluster_size = target.cluster_size().unwrap_or(1);
        let unit = match options.packing {
            Packing::Plain => target.allocation_unit().max(MIN_HOLE),
            Packing::Compressed => cluster_size,
        };
        let piece = PIECE.max(cluster_size);
        let walked = match options.before {
            Before::Zeros => vec![Arc::clone(&source)],
            Before::Anything => vec![Arc::clone(&source), Arc::clone(&target)],
        };
        let walk = Walk::new(walked, piece, source.size());
        Ok(Self {
            source,
            target,
            options,
            piece,
            unit,
            walk: Mutex::new(walk),
            has_failed: AtomicBool::new(false),
            passed: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            written: AtomicU64::new(0),
        })
    }

    /// How far it has come. From any thread, at any time.
    pub fn progress(&self) -> CopyProgress {
        // In this order a piece that ends meanwhile never counts as done too early.
        let passed = self.passed.load(Ordering::Acquire);
        let under_way = self.under_way.load(Ordering::Acquire);
        CopyProgress {
            done: passed.saturating_sub(under_way),
            total: self.source.size(),
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
        let lanes = (0..self.options.together.max(1)).map(|_| self.lane());
        join_all(lanes).await.into_iter().collect()
    }

    async fn lane(&self) -> Result<()> {
        let outcome = self.copy_pieces().await;
        if outcome.is_err() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        outcome
    }

    async fn copy_pieces(&self) -> Result<()> {
        let mut buffer = Buffer::new(self.piece as usize);
        let mut old = match self.options.before {
            Before::Zeros => Buffer::new(0),
            Before::Anything => Buffer::new(self.piece as usize),
        };
        while let Some(piece) = self.next().await? {
            let length = piece.range.length();
            match self.options.before {
                Before::Zeros => self.copy(&piece, &mut buffer).await?,
                Before::Anything => self.correct(&piece, &mut buffer, &mut old).await?,
            }
            self.under_way.fetch_sub(length, Ordering::Release);
        }
        Ok(())
    }

    async fn next(&self) -> Result<Option<Piece>> {
        let mut walk = self.walk.lock().await;
        if self.has_failed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let piece = walk.next().await?;
        let length = piece.as_ref().map_or(0, |piece| piece.range.length());
        self.under_way.fetch_add(length, Ordering::Release);
        self.passed.store(walk.offset(), Ordering::Release);
        Ok(piece)
    }

    /// Copies a piece to where there are zeros.
    async fn copy(&self, piece: &Piece, buffer: &mut Buffer) -> Result<()> {
        read(&self.source, piece, buffer).await?;
        let length = piece.range.length() as usize;
        let bytes = buffer.bytes();
        let data = runs(length, self.unit as usize, |unit| !is_zero(&bytes[unit]));
        self.store(piece.range.offset(), data, buffer).await
    }

    /// Makes a piece of the target what it is in the source.
    async fn correct(&self, piece: &Piece, buffer: &mut Buffer, old: &mut Buffer) -> Result<()> {
        read(&self.source, piece, buffer).await?;
        let (offset, length) = (piece.range.offset(), piece.range.length() as usize);
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
        match self.options.packing {
            Packing::Plain => self.write(offset, data, buffer).await?,
            Packing::Compressed => {
                for cluster in clusters(data, self.unit as usize) {
                    let at = offset + cluster.start as u64;
                    let bytes = &buffer.bytes()[cluster.clone()];
                    if self.target.write_compressed(at, bytes).await? == Packed::NotWorthwhile {
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

/// Fills the start of `buffer` with a piece of the disk: its data is read, the rest is zeros.
pub(crate) async fn read<S: Storage>(
    disk: &Disk<S>,
    piece: &Piece,
    buffer: &mut Buffer,
) -> Result<()> {
    let start = piece.range.offset();
    let within = |range: &ByteRange| {
        (range.offset() - start) as usize
            ..(range.end().min(disk.size()).max(start) - start) as usize
    };
    let mut end = 0;
    let mut data = Vec::new();
    for range in &piece.data {
        let range = within(range);
        // What lies past the disk's end belongs to a longer one.
        if range.start < range.end {
            buffer.bytes_mut()[end..range.start].fill(0);
            end = range.end;
            data.push(range);
        }
    }
    buffer.bytes_mut()[end..piece.range.length() as usize].fill(0);
    let parts = lend(buffer, &data);
    run_all(
        MAX_IN_FLIGHT,
        parts.into_iter().zip(&data).map(|(into, part)| {
            disk.submit(Request::Read { offset: start + part.start as u64, into })
        }),
    )
    .await
}

/// The memory of parts of a buffer, which are in ascending order.
fn lend(buffer: &mut Buffer, parts: &[Range<usize>]) -> Vec<IoVector> {
    let mut rest = buffer.lend();
    let mut start = 0;
    let mut lent = Vec::with_capacity(parts.len());
    for part in parts {
        rest.advance(part.start - start);
        let behind = rest.split_off(part.len());
        lent.push(std::mem::replace(&mut rest, behind));
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
