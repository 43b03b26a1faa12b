//! The log of old bytes, in the order in which they were saved: the newest in memory, the others on
//! the scratch disk.
//!
//! Guarantees: appended bytes can be read at once, and until the log has ended. Bytes are in memory
//! until the scratch disk has them. At most `MAX_SEGMENTS` segments are in memory: `append` waits
//! until its bytes fit into them. Only full segments are written to the scratch disk, each at its
//! offset in the log. Writes are large and begin in the log's order. `read` and `write_behind`
//! return errors of the scratch disk; `append` returns `NoSpace` at the limit.

use std::collections::VecDeque;

use blockhouse_core::sync::Condvar;
use blockhouse_core::{
    Buffer, BufferPool, ByteRange, Durability, Error, ErrorKind, IoVector, Request, Result, Storage,
};
use blockhouse_disk::Disk;
use parking_lot::Mutex;

/// Segments in memory, at most.
const MAX_SEGMENTS: usize = 16;
/// Minimum and maximum bytes of a segment.
const MIN_SEGMENT: u64 = 8 << 10;
const MAX_SEGMENT: u64 = 1 << 20;
/// Segments that are written concurrently, at most.
const MAX_WRITES: usize = 4;
/// Bytes of unused memory that are kept for later segments and copies.
const MAX_CACHED: usize = 4 << 20;

/// See the module's page.
pub(super) struct Log<S: Storage> {
    scratch: Disk<S>,
    /// The maximum length of the log, in bytes.
    limit: u64,
    /// Bytes of a segment.
    segment: u64,
    pool: BufferPool,
    tail: Mutex<Tail>,
    /// Notified when a segment is full, or the log has ended.
    filled: Condvar,
    /// Notified when a segment was written, or the log has ended.
    written: Condvar,
}

/// The end of the log.
#[derive(Default)]
struct Tail {
    /// Bytes of the log.
    end: u64,
    /// The segments in memory, in order, perhaps with gaps. The last one is not full if `end` is
    /// inside it.
    segments: VecDeque<Segment>,
    has_ended: bool,
}

struct Segment {
    /// The offset of its first byte in the log.
    start: u64,
    /// `None` while the segment is being written.
    buffer: Option<Buffer>,
}

/// Outcome of a read of one segment's bytes from memory.
enum Memory {
    Copied,
    /// The bytes are on the scratch disk.
    Written,
    HasEnded,
}

impl<S: Storage> Log<S> {
    /// An empty log, of `limit` bytes at most, `memory` of them in memory (from 128 KiB to 16 MiB).
    /// `scratch` is at least as long as the log gets.
    pub(super) fn new(scratch: Disk<S>, limit: u64, memory: u64) -> Self {
        let segment = (memory / MAX_SEGMENTS as u64).clamp(MIN_SEGMENT, MAX_SEGMENT);
        Self {
            scratch,
            limit,
            segment: segment & !(MIN_SEGMENT - 1),
            pool: BufferPool::new(MAX_CACHED),
            tail: Mutex::default(),
            filled: Condvar::new(),
            written: Condvar::new(),
        }
    }

    /// Memory for a copy.
    pub(super) fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Bytes of the log: on the scratch disk, or still in memory.
    pub(super) fn length(&self) -> u64 {
        self.tail.lock().end
    }

    /// The name of the scratch disk.
    pub(super) fn name(&self) -> &str {
        self.scratch.name()
    }

    /// Ends the log: later appends and reads fail, and the segments in memory are dropped.
    pub(super) fn end(&self) {
        let mut tail = self.tail.lock();
        tail.has_ended = true;
        tail.segments.clear();
        drop(tail);
        self.filled.notify_all();
        self.written.notify_all();
    }

    /// Makes the scratch disk deallocate its space.
    pub(super) async fn discard(&self) {
        let (range, durability) = (ByteRange::between(0, self.scratch.size()), Durability::None);
        // If this fails, the space is freed when the scratch disk is closed.
        let _ = self.scratch.submit(Request::Discard { range, durability }).await;
    }

    /// Appends `bytes` (at most half of the memory) once they fit into memory. Returns the offset
    /// of the first byte. The bytes are contiguous in the log.
    ///
    /// # Errors
    /// `NoSpace` at the limit; ENOMEM; `Io` once the log has ended.
    pub(super) async fn append(&self, bytes: &[u8]) -> Result<u64> {
        self.written.wait_until(|| self.try_append(bytes).transpose()).await
    }

    /// `None` if memory is full.
    fn try_append(&self, mut bytes: &[u8]) -> Result<Option<u64>> {
        let mut tail = self.tail.lock();
        if tail.has_ended {
            return Err(self.ended());
        }
        let (start, length) = (tail.end, bytes.len() as u64);
        if start + length > self.limit {
            return Err(self.too_long());
        }
        let segments = tail.segments.len() as u64 + (start + length).div_ceil(self.segment)
            - start.div_ceil(self.segment);
        if segments > MAX_SEGMENTS as u64 {
            return Ok(None);
        }
        while !bytes.is_empty() {
            let within = (tail.end % self.segment) as usize;
            if within == 0 {
                let buffer = Some(self.pool.get(self.segment as usize)?);
                let start = tail.end;
                tail.segments.push_back(Segment { start, buffer });
            }
            let (now, rest) = bytes.split_at(bytes.len().min(self.segment as usize - within));
            if let Some(Segment { buffer: Some(buffer), .. }) = tail.segments.back_mut() {
                buffer.bytes_mut()[within..within + now.len()].copy_from_slice(now);
            }
            tail.end += now.len() as u64;
            bytes = rest;
        }
        let has_filled = start / self.segment != tail.end / self.segment;
        drop(tail);
        if has_filled {
            self.filled.notify_all();
        }
        Ok(Some(start))
    }

    /// Fills `into` with the log's bytes from `offset` on.
    ///
    /// # Errors
    /// Errors of the scratch disk; `Io` once the log has ended.
    pub(super) async fn read(&self, mut offset: u64, mut into: IoVector) -> Result<()> {
        while !into.is_empty() {
            let here = (self.segment - offset % self.segment).min(into.len() as u64);
            let rest = into.split_off(here as usize);
            let memory = self.written.wait_until(|| self.copy_from_memory(offset, &mut into));
            match memory.await {
                Memory::Copied => {}
                Memory::Written => self.scratch.submit(Request::Read { offset, into }).await?,
                Memory::HasEnded => return Err(self.ended()),
            }
            (offset, into) = (offset + here, rest);
        }
        Ok(())
    }

    /// Copies bytes of one segment. `None` while the segment is being written.
    fn copy_from_memory(&self, offset: u64, into: &mut IoVector) -> Option<Memory> {
        let tail = self.tail.lock();
        let start = offset - offset % self.segment;
        match tail.segments.iter().find(|segment| segment.start == start) {
            _ if tail.has_ended => Some(Memory::HasEnded),
            None => Some(Memory::Written),
            Some(Segment { buffer: None, .. }) => None,
            Some(Segment { buffer: Some(buffer), .. }) => {
                into.copy_from(&buffer.bytes()[(offset - start) as usize..]);
                Some(Memory::Copied)
            }
        }
    }

    /// Writes segments that are full to the scratch disk, until the log has ended.
    ///
    /// # Errors
    /// Errors of the scratch disk.
    pub(super) async fn write_behind(&self) -> Result<()> {
        let lanes = [(); MAX_WRITES].map(|()| self.write_segments());
        futures_util::future::try_join_all(lanes).await.map(|_| ())
    }

    async fn write_segments(&self) -> Result<()> {
        while let Some((start, mut buffer)) = self.filled.wait_until(|| self.take_full()).await {
            let (from, durability) = (buffer.lend(), Durability::None);
            let write = Request::Write { offset: start, from, durability };
            self.scratch.submit_unlimited(write).await?;
            self.tail.lock().segments.retain(|segment| segment.start != start);
            self.written.notify_all();
        }
        Ok(())
    }

    /// `None` while no segment is full, `Some(None)` once the log has ended.
    fn take_full(&self) -> Option<Option<(u64, Buffer)>> {
        let mut tail = self.tail.lock();
        if tail.has_ended {
            return Some(None);
        }
        let full = tail.end - tail.end % self.segment;
        let is_full = |segment: &&mut Segment| segment.start < full && segment.buffer.is_some();
        let segment = tail.segments.iter_mut().find(is_full)?;
        Some(Some((segment.start, segment.buffer.take()?)))
    }

    fn too_long(&self) -> Error {
        let what = format!("the scratch file would have more than its {} bytes", self.limit);
        let error = Error::new(ErrorKind::NoSpace, what).on(self.scratch.name());
        error.hint("begin the backup again with a larger --scratch-size")
    }

    fn ended(&self) -> Error {
        Error::new(ErrorKind::Io, "the backup has ended").on(self.scratch.name())
    }
}
