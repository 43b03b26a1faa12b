//! Copies a disk, a part of a disk, or a sequence of parts, to another disk. All disks may have any
//! format.
//!
//! Ranges that read as zeros by the block status, on the source and on a target with earlier
//! content, are not read; zeros in the bytes read become holes of the target (exception:
//! [`CopyJob::writing_zeros`]). Several chunks are in flight at the same time and end in any order
//! (exception: [`CopyJob::in_order`]); no two of them touch the same cluster of the target. Any
//! number of threads can work on one copy, each on its own event loop. Nothing is durable before
//! the target is closed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhouse_core::sync::run_all;
use blockhouse_core::{Buffer, ByteRange, Error, ErrorKind, Request, Result, Storage, rare};
use futures_channel::oneshot;
use futures_util::lock::Mutex;

use super::chunks::run_loops;
use super::new_image::NewImage;
use super::range_writer::RangeWriter;
use super::scan::{Chunk, StatusScan};
use super::zeros::lend;
use crate::disk::Disk;
use crate::parts::MAX_IN_FLIGHT;

/// Minimum number of bytes of a chunk. Larger clusters make larger chunks.
const CHUNK_SIZE: u64 = 1 << 20;
/// Minimum unit, in bytes, in which a salvaging copy locates unreadable bytes.
const SECTOR: u64 = 512;

/// The target's content before the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetContent {
    /// The whole target reads as zeros.
    Zero,
    /// Any content, for instance a part of the copy. The target is read, and equal parts are not
    /// written again.
    Unknown,
}

/// How a copy is made.
#[derive(Clone, Copy, Debug)]
pub struct CopyOptions {
    /// The target's content before the copy.
    pub target_content: TargetContent,
    /// Whether data is stored in compressed clusters if that saves space.
    pub compress: bool,
    /// The number of chunks that each thread has in flight, at least one. A chunk takes 1 MiB of
    /// memory, or more if a cluster of the target is larger; twice that if the target is read too.
    pub max_in_flight: usize,
}

/// The progress of a copy, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// The bytes that need no more work, holes included.
    pub done: u64,
    /// The length of all parts to be copied.
    pub total: u64,
    /// The bytes that were written.
    pub written: u64,
}

/// A copy that is being made. See the module's documentation.
pub struct CopyJob<S: Storage> {
    parts: Vec<Part<S>>,
    /// Bytes of all parts.
    total: u64,
    /// The disk with the target's content before the copy: the target itself, or the parent of a
    /// new image. `None` for a new image without a parent.
    before: Option<Arc<Disk<S>>>,
    writer: RangeWriter<Arc<Disk<S>>, S>,
    options: CopyOptions,
    /// Bytes of a chunk: a multiple of the target's cluster size.
    chunk: u64,
    /// This mutex does not read the clock; the mutex of `async_lock` does when it is contended.
    scan: Mutex<PartsScan<S>>,
    /// Whether zeros are written, too.
    is_dense: bool,
    /// Whether chunks are written one after the other.
    is_in_order: bool,
    /// The number of unreadable bytes that became zeros so far; `None` if a read error stops the
    /// copy.
    lost: Option<AtomicU64>,
    has_failed: AtomicBool,
    /// Called for each finished chunk.
    observer: Option<DataObserver>,
    /// The offset in the target that the scan has reached.
    passed: AtomicU64,
    /// Bytes before `passed` that are still in flight.
    in_flight: AtomicU64,
}

/// Calls `tell` with the number of data bytes done and their total, one chunk after the other.
struct DataObserver {
    tell: Box<dyn Fn(u64, u64) + Send + Sync>,
    total: u64,
    done: parking_lot::Mutex<u64>,
}

impl DataObserver {
    fn advance(&self, chunk: &Chunk) {
        let mut done = self.done.lock();
        *done += data_length(chunk);
        (self.tell)(*done, self.total);
    }
}

fn data_length(chunk: &Chunk) -> u64 {
    chunk.data.iter().map(|data| data.length()).sum()
}

/// A part of a source, and its location in the target.
struct Part<S: Storage> {
    source: Arc<Disk<S>>,
    range: ByteRange,
    /// The start in the target.
    start: u64,
}

impl<S: Storage> Part<S> {
    fn end(&self) -> u64 {
        self.start + self.range.length()
    }

    /// The offset in the source minus the offset in the target, modulo 2^64.
    fn shift(&self) -> u64 {
        self.range.offset().wrapping_sub(self.start)
    }
}

/// The scan of the part at `index`. The parts after it are scanned later.
struct PartsScan<S: Storage> {
    index: usize,
    scan: StatusScan<Arc<Disk<S>>>,
    /// Ready when the chunk that was found last is written, or has failed.
    last: Option<oneshot::Receiver<()>>,
}

impl<S: Storage> PartsScan<S> {
    /// The place of the chunk that was found last.
    fn place(&mut self) -> Place {
        let (written, is_written) = oneshot::channel();
        Place { before: self.last.replace(is_written), _written: Some(written) }
    }
}

/// The place of a chunk in the order of writes.
#[derive(Default)]
struct Place {
    /// Ready when the chunk before it is written, or has failed.
    before: Option<oneshot::Receiver<()>>,
    /// The drop of this sender lets the next chunk be written.
    _written: Option<oneshot::Sender<()>>,
}

impl Place {
    /// Waits until the chunk before is written.
    async fn wait(&mut self) {
        if let Some(before) = self.before.take() {
            // An error says that the sender was dropped, which is the signal.
            let _ = before.await;
        }
    }
}

impl<S: Storage> CopyJob<S> {
    /// The copy of all of `source` to the start of `target`. Nothing else may change `target`
    /// meanwhile. The rest of a longer target stays as it is.
    ///
    /// # Errors
    /// `InvalidInput` if the target is smaller, or if `options` ask for compression and the
    /// target's format has none.
    pub fn new(source: Arc<Disk<S>>, target: Arc<Disk<S>>, options: CopyOptions) -> Result<Self> {
        let all = ByteRange::between(0, source.size());
        Self::of_parts(vec![(source, all)], target, options)
    }

    /// As [`new`](Self::new), for parts of sources, one after the other, each at any offset and of
    /// any length. The target's bytes after them stay as they are.
    ///
    /// # Errors
    /// As [`new`](Self::new); `InvalidInput` for a part beyond the end of its source.
    pub fn of_parts(
        parts: Vec<(Arc<Disk<S>>, ByteRange)>,
        target: Arc<Disk<S>>,
        options: CopyOptions,
    ) -> Result<Self> {
        let cluster = target.image().cluster_size().unwrap_or(1);
        let writer = RangeWriter::new(Arc::clone(&target), options.compress)?;
        Self::with(parts, Some(Arc::clone(&target)), writer, options, cluster)?
            .checked(target.size(), target.name())
    }

    /// As [`of_parts`](Self::of_parts), to a new image of another program's format. With a
    /// `parent`, space is allocated only for the grains that differ from it.
    ///
    /// # Errors
    /// As [`of_parts`](Self::of_parts); `InvalidInput` for a parent that is shorter than the copy.
    pub fn to_new_image(
        parts: Vec<(Arc<Disk<S>>, ByteRange)>,
        image: &Arc<NewImage<S>>,
        parent: Option<Arc<Disk<S>>>,
        max_in_flight: usize,
    ) -> Result<Self> {
        // The parts of a stream are read one after the other.
        let max_in_flight = if image.stream_unit().is_some() { 1 } else { max_in_flight };
        let target_content = match parent {
            Some(_) => TargetContent::Unknown,
            None => TargetContent::Zero,
        };
        let options = CopyOptions { target_content, compress: false, max_in_flight };
        let writer = RangeWriter::to_new(Arc::clone(image));
        let length = parent.as_ref().map(|parent| parent.size());
        let job = Self::with(parts, parent, writer, options, image.overlay_unit().unwrap_or(1))?;
        if length.is_some_and(|length| length < job.total) {
            let what = "is longer than its parent, which has to have all of the disk";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(image.name()));
        }
        job.checked(image.size(), image.name())
    }

    /// A copy to a target with clusters of `cluster` bytes.
    fn with(
        parts: Vec<(Arc<Disk<S>>, ByteRange)>,
        before: Option<Arc<Disk<S>>>,
        writer: RangeWriter<Arc<Disk<S>>, S>,
        options: CopyOptions,
        cluster: u64,
    ) -> Result<Self> {
        let parts = placed(parts)?;
        let total = parts.last().map_or(0, Part::end);
        let chunk = CHUNK_SIZE.max(cluster);
        let Some(first) = parts.first() else {
            return Err(Error::new(ErrorKind::InvalidInput, "no source is given"));
        };
        let scan = scan_of(first, before.as_ref(), options, chunk);
        let scan = PartsScan { index: 0, scan, last: None };
        Ok(Self {
            parts,
            total,
            before,
            writer,
            options,
            chunk,
            scan: Mutex::new(scan),
            is_dense: false,
            is_in_order: false,
            lost: None,
            has_failed: AtomicBool::new(false),
            observer: None,
            passed: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
        })
    }

    /// Refuses a target of `size` bytes that is too short.
    fn checked(self, size: u64, name: &str) -> Result<Self> {
        if size < self.total {
            let what = format!("has {size} bytes, and the copy needs {}", self.total);
            return Err(Error::new(ErrorKind::InvalidInput, what).on(name));
        }
        Ok(self)
    }

    /// Makes the copy write zeros like data, so the whole copy takes space. To be called before
    /// [`work`](Self::work).
    #[must_use]
    pub fn writing_zeros(mut self) -> Self {
        self.is_dense = true;
        self.writer.write_zeros();
        self.with_new_scan()
    }

    /// Makes the copy write its chunks one after the other, in the order of the disk; they are
    /// still read in any order. So a new target allocates in that order, and equal sources give
    /// equal qcow2 files. To be called before [`work`](Self::work).
    #[must_use]
    pub fn in_order(self) -> Self {
        Self { is_in_order: true, ..self }
    }

    /// Makes each unreadable sector zeros in the copy. To be called before [`work`](Self::work).
    #[must_use]
    pub fn salvaging(mut self) -> Self {
        self.lost = Some(AtomicU64::new(0));
        self.with_new_scan()
    }

    /// Makes the copy call `tell` for each finished chunk, with the number of data bytes done and
    /// their total. Walks the maps of all sources once to find the total. To be called before
    /// [`work`](Self::work), and after the other settings.
    ///
    /// # Errors
    /// Errors of the map.
    pub async fn observed(
        mut self,
        tell: impl Fn(u64, u64) + Send + Sync + 'static,
    ) -> Result<Self> {
        let mut total = 0;
        for part in &self.parts {
            let mut scan = self.scan_of(part);
            while let Some(chunk) = scan.next().await? {
                total += data_length(&chunk);
            }
        }
        let done = parking_lot::Mutex::new(0);
        self.observer = Some(DataObserver { tell: Box::new(tell), total, done });
        Ok(self)
    }

    fn with_new_scan(mut self) -> Self {
        if let Some(first) = self.parts.first() {
            self.scan = Mutex::new(PartsScan { index: 0, scan: self.scan_of(first), last: None });
        }
        self
    }

    fn scan_of(&self, part: &Part<S>) -> StatusScan<Arc<Disk<S>>> {
        let scan = scan_of(part, self.before.as_ref(), self.options, self.chunk);
        scan.taking(self.is_dense, self.lost.is_some())
    }

    /// Bytes that could not be read and are zeros now.
    pub fn lost(&self) -> u64 {
        self.lost.as_ref().map_or(0, |lost| lost.load(Ordering::Relaxed))
    }

    /// The copy's progress. From any thread, at any time.
    pub fn progress(&self) -> CopyProgress {
        // In this order, a chunk that begins between the two loads never counts as done.
        let passed = self.passed.load(Ordering::Acquire);
        let in_flight = self.in_flight.load(Ordering::Acquire);
        CopyProgress {
            done: passed.saturating_sub(in_flight),
            total: self.total,
            written: self.writer.written(),
        }
    }

    /// Copies chunks until no chunk is left, and waits for all chunks that this call has begun.
    /// Each working thread calls it once.
    ///
    /// # Errors
    /// The first error of this thread, which names the file and the offset. The other threads stop
    /// soon after it, without an error. Data written until then stays.
    pub async fn work(&self) -> Result<()> {
        rare(run_loops(self.options.max_in_flight, &self.has_failed, || self.copy_loop())).await
    }

    async fn copy_loop(&self) -> Result<()> {
        let mut buffer = Buffer::new(self.chunk as usize);
        let mut old = match self.options.target_content {
            TargetContent::Zero => Buffer::new(0),
            TargetContent::Unknown => Buffer::new(self.chunk as usize),
        };
        while let Some((part, chunk, mut place)) = self.next().await? {
            let length = chunk.range.length();
            let read = read_from(&part.source, part.shift(), part.end(), &chunk, &mut buffer).await;
            match (&self.lost, read) {
                (Some(lost), Err(error)) if error.is_host_failure() => {
                    let bytes = salvage(part, &chunk, &mut buffer).await?;
                    lost.fetch_add(bytes, Ordering::Relaxed);
                }
                (_, read) => read?,
            }
            place.wait().await;
            match self.options.target_content {
                TargetContent::Zero => self.copy(&chunk, &mut buffer).await?,
                TargetContent::Unknown => self.update(&chunk, &mut buffer, &mut old).await?,
            }
            self.in_flight.fetch_sub(length, Ordering::Release);
            if let Some(observer) = &self.observer {
                observer.advance(&chunk);
            }
        }
        Ok(())
    }

    async fn next(&self) -> Result<Option<(&Part<S>, Chunk, Place)>> {
        let mut scan = self.scan.lock().await;
        if self.has_failed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        loop {
            let Some(part) = self.parts.get(scan.index) else { return Ok(None) };
            let chunk = scan.scan.next().await?;
            let length = chunk.as_ref().map_or(0, |chunk| chunk.range.length());
            self.in_flight.fetch_add(length, Ordering::Release);
            self.passed.store(scan.scan.offset(), Ordering::Release);
            if let Some(chunk) = chunk {
                let place = if self.is_in_order { scan.place() } else { Place::default() };
                return Ok(Some((part, chunk, place)));
            }
            let Some(next) = self.parts.get(scan.index + 1) else { return Ok(None) };
            (scan.index, scan.scan) = (scan.index + 1, self.scan_of(next));
        }
    }

    /// Writes the chunk's data in `buffer` to a target that reads as zeros.
    async fn copy(&self, chunk: &Chunk, buffer: &mut Buffer) -> Result<()> {
        let data = {
            let bytes = &buffer.bytes()[..chunk.range.length() as usize];
            self.writer.data_of(chunk.range.offset(), bytes)
        };
        self.writer.store(chunk.range.offset(), data, buffer).await
    }

    /// Makes a chunk of the target equal to the data read from the source.
    async fn update(&self, chunk: &Chunk, buffer: &mut Buffer, old: &mut Buffer) -> Result<()> {
        let (offset, length) = (chunk.range.offset(), chunk.range.length() as usize);
        let Some(before) = &self.before else { return self.copy(chunk, buffer).await };
        let into = old.lend_range(0, length);
        before.submit(Request::Read { offset, into }).await?;
        self.writer.update(offset, length, buffer, old).await
    }
}

/// The parts, each placed where the one before it ends.
fn placed<S: Storage>(parts: Vec<(Arc<Disk<S>>, ByteRange)>) -> Result<Vec<Part<S>>> {
    let refuse = |what: String| Err(Error::new(ErrorKind::InvalidInput, what));
    let mut placed: Vec<Part<S>> = Vec::with_capacity(parts.len());
    for (source, range) in parts {
        if range.end() > source.size() {
            return refuse(format!("{}: the part to copy ends past its end", source.name()));
        }
        let start = placed.last().map_or(0, Part::end);
        if start.checked_add(range.length()).is_none() {
            return refuse("the parts to copy are longer than a disk can be".into());
        }
        placed.push(Part { source, range, start });
    }
    Ok(placed)
}

/// A scan of a part, with offsets in the target.
fn scan_of<S: Storage>(
    part: &Part<S>,
    before: Option<&Arc<Disk<S>>>,
    options: CopyOptions,
    chunk: u64,
) -> StatusScan<Arc<Disk<S>>> {
    let before = before.filter(|_| options.target_content == TargetContent::Unknown);
    let scanned = std::iter::once(&part.source).chain(before).map(Arc::clone);
    StatusScan::new(scanned, chunk, part.end()).between(part.start, part.shift())
}

/// As [`read_from`], piece by piece. Unreadable bytes become zeros. Returns their number.
///
/// # Errors
/// The storage cannot be reached at all: zeros for all the rest would be no copy of it.
async fn salvage<S: Storage>(part: &Part<S>, chunk: &Chunk, buffer: &mut Buffer) -> Result<u64> {
    let unit = u64::from(part.source.image().alignment().offset).max(SECTOR);
    let start = chunk.range.offset();
    buffer.bytes_mut()[..chunk.range.length() as usize].fill(0);
    let within = |range: &ByteRange| (range.offset(), range.end().min(part.end()));
    let mut left: Vec<_> = chunk.data.iter().map(within).filter(|(from, to)| from < to).collect();
    let mut lost = 0;
    while let Some((from, to)) = left.pop() {
        let into = buffer.lend_range((from - start) as usize, (to - from) as usize);
        let offset = from.wrapping_add(part.shift());
        match part.source.submit(Request::Read { offset, into }).await {
            Ok(_) => continue,
            Err(error) if error.is_of_lost_storage() => return Err(error),
            Err(_) => {}
        }
        let middle = from + (to - from) / 2;
        let middle = middle - middle.wrapping_add(part.shift()) % unit;
        if to - from <= unit || middle <= from {
            buffer.bytes_mut()[(from - start) as usize..(to - start) as usize].fill(0);
            tracing::warn!(
                "{}: {} bytes from offset {offset} on cannot be read, and are zeros in the copy",
                part.source.name(),
                to - from
            );
            lost += to - from;
            continue;
        }
        left.extend([(middle, to), (from, middle)]);
    }
    Ok(lost)
}

/// Fills the start of `buffer` with a chunk of the disk: its data is read, the rest is zeros.
pub(super) async fn read<S: Storage>(
    disk: &Disk<S>,
    chunk: &Chunk,
    buffer: &mut Buffer,
) -> Result<()> {
    read_from(disk, 0, disk.size(), chunk, buffer).await
}

/// As [`read`], for a disk whose offsets are those of the chunk plus `shift`, modulo 2^64. The
/// chunk reads as zeros from its offset `end` on; `end + shift` is within the disk.
async fn read_from<S: Storage>(
    disk: &Disk<S>,
    shift: u64,
    end: u64,
    chunk: &Chunk,
    buffer: &mut Buffer,
) -> Result<()> {
    let (start, last) = (chunk.range.offset(), end);
    let within = |range: &ByteRange| {
        (range.offset() - start) as usize..(range.end().min(last).max(start) - start) as usize
    };
    let mut end = 0;
    let mut data = Vec::new();
    for range in &chunk.data {
        let range = within(range);
        // Data past `end` is that of the longer disk in the same scan.
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
            let offset = start.wrapping_add(shift) + part.start as u64;
            disk.submit(Request::Read { offset, into })
        }),
    )
    .await
}
