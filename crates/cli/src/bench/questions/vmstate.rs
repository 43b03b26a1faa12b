//! `bench vmstate`: a VM state that arrives in small pieces, written to a qcow2 image piece by
//! piece, and through the stream that `blockhouse vmstate save` uses.
//!
//! Both variants write from the start of a new image, and sync it at the end; the time includes the
//! sync. A piece is counted when the writer has accepted it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use blockhouse_core::{Buffer, Durability, Request, Storage, rare};
use blockhouse_disk::{Access, Disk, ImageFormat, VmStateWriter};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::{CacheMode, ImageOptions, StateUse, create, open};
use hdrhistogram::Histogram;

use crate::bench::load::{Clocks, End, MAX_BYTES, Sample, machine_clock, new_histogram};
use crate::bench::rows::{Case, Cases, Cost, Variant};
use crate::bench::stop::Stop;
use crate::bench::testbed::Testbed;
use crate::open_args::read_only;

/// The virtual size of the images: not less than the bytes written.
const IMAGE_SIZE: u64 = MAX_BYTES;
/// The time to create, open and remove an image.
const IMAGE_TIME: Duration = Duration::from_millis(60);
/// The smallest unit of a write, with direct I/O and through the page cache, in bytes.
const PAGE: u64 = 4096;

/// Bytes of a piece.
const PIECES: [usize; 4] = [64, 512, 4096, 32 << 10];

/// How a state is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storing {
    /// Each piece is a write of its own, one at a time.
    Unbuffered,
    /// Pieces are collected by the stream and written in larger windows.
    Buffered,
}

/// The text for the page of results.
pub const ABOUT: &str = "A snapshot with memory streams a machine's state into the image in tiny pieces. Written straight \
    through, each becomes a write of its own: reads and writes of whole blocks past the page cache. The stream \
    that <code>blockhouse vmstate save</code> uses collects them in windows of 1 MiB, eight of which may be on \
    their way. Latency is what a piece waits until it is taken; the rate includes that everything is on stable \
    storage at the end.";

/// The cases: each size of a piece, through the page cache and with direct I/O.
pub fn cases(testbed: &Testbed) -> Cases<'_> {
    let Some(folder) = testbed.target().folder() else {
        return Cases::none("its images are files in a folder; leave --destroy-data out for it");
    };
    let each = |kind| PIECES.map(|piece| case(testbed, folder, kind, piece));
    let cached = each(("page cache", CacheMode::Writeback));
    if !testbed.target().takes_direct_io() {
        let mut cases = Cases::all(cached);
        cases.missing = Some("the file system has no direct I/O".into());
        return cases;
    }
    Cases::all(cached.into_iter().chain(each(("direct", CacheMode::None))))
}

fn case<'a>(
    testbed: &'a Testbed,
    folder: &'a Path,
    (kind, cache): (&str, CacheMode),
    piece: usize,
) -> Case<'a> {
    let variant = |name: &str, storing| {
        let limits = Limits { piece, pieces: most_pieces(piece, storing) };
        Variant {
            name: name.into(),
            run: Box::new(move || sample(testbed, folder, cache, (storing, limits))),
            published: None,
            cost: Cost { extra: IMAGE_TIME, written: MAX_BYTES },
        }
    };
    Case {
        name: format!("{piece} B, {kind}"),
        variants: vec![
            variant("unbuffered", Storing::Unbuffered),
            variant("buffered", Storing::Buffered),
        ],
    }
}

/// The limits of a sample.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a piece.
    pub piece: usize,
    /// The maximum number of pieces.
    pub pieces: u64,
}

/// The maximum number of pieces for which the disk writes at most `MAX_BYTES`: an unaligned piece
/// becomes whole pages, and each new cluster is written as a whole once.
fn most_pieces(piece: usize, storing: Storing) -> u64 {
    let piece = piece as u64;
    match storing {
        Storing::Buffered => MAX_BYTES / piece,
        Storing::Unbuffered => MAX_BYTES / 2 / (piece.next_multiple_of(PAGE) + PAGE),
    }
}

fn sample(
    testbed: &Testbed,
    folder: &Path,
    cache: CacheMode,
    (storing, limits): (Storing, Limits),
) -> Result<Sample> {
    let path = folder.join("state.qcow2");
    let mut event_loop = EventLoop::new(EngineChoice::Only(testbed.engines()[0]))?;
    let outcome = event_loop.block_on(async {
        create(&path, IMAGE_SIZE, ImageFormat::Qcow2).await?;
        let options = read_only(Some(ImageFormat::Qcow2), StateUse::Off);
        let options = ImageOptions { access: Access::ReadWrite, cache, ..options };
        let disk = open(&path, options).await?;
        let clocks = Clocks::start(testbed.device(), &machine_clock);
        let latency =
            store(&disk, storing, limits, (testbed.sample_time(), testbed.stop())).await?;
        let sample =
            clocks.end(End::now(&machine_clock), latency.len() * limits.piece as u64, latency);
        disk.close().await?;
        testbed.stop().check()?;
        Ok(sample)
    });
    // The next sample creates its own image; after an error the whole folder is removed.
    std::fs::remove_file(&path).ok();
    outcome
}

/// Stores pieces until the time or the limit is used up, then makes all pieces durable. Returns the
/// nanoseconds that each piece took.
pub async fn store<S: Storage>(
    disk: &Disk<S>,
    storing: Storing,
    limits: Limits,
    until: (Duration, &Stop),
) -> Result<Histogram<u64>> {
    let latency = match storing {
        Storing::Unbuffered => unbuffered(disk, limits, until).await?,
        Storing::Buffered => buffered(disk, limits, until).await?,
    };
    Ok(latency)
}

async fn unbuffered<S: Storage>(
    disk: &Disk<S>,
    limits: Limits,
    until: (Duration, &Stop),
) -> blockhouse_core::Result<Histogram<u64>> {
    let mut pieces = WriteSequence::new(limits, until);
    let mut buffer = Buffer::new(limits.piece);
    buffer.bytes_mut().copy_from_slice(&pieces.content);
    while let Some(offset) = pieces.next() {
        let from = buffer.lend();
        rare(disk.submit(Request::Write { offset, from, durability: Durability::None })).await?;
    }
    disk.flush().await?;
    Ok(pieces.latency)
}

async fn buffered<S: Storage>(
    disk: &Disk<S>,
    limits: Limits,
    until: (Duration, &Stop),
) -> blockhouse_core::Result<Histogram<u64>> {
    let mut writer = VmStateWriter::new(disk, None)?;
    let mut pieces = WriteSequence::new(limits, until);
    let content = pieces.content.clone();
    while let Some(offset) = pieces.next() {
        writer.write(offset, &content).await?;
    }
    writer.flush().await?;
    disk.flush().await?;
    Ok(pieces.latency)
}

/// Gives out the offsets of consecutive pieces. The latency of a piece is the time until the next
/// offset is requested.
struct WriteSequence<'a> {
    limits: Limits,
    until: (Duration, &'a Stop),
    content: Vec<u8>,
    given: u64,
    begin: Instant,
    last: Instant,
    latency: Histogram<u64>,
}

impl<'a> WriteSequence<'a> {
    fn new(limits: Limits, until: (Duration, &'a Stop)) -> Self {
        // The content has no zeros, because zeros take no space in an image.
        let content = (0..limits.piece).map(|_| fastrand::u8(1..)).collect();
        let now = Instant::now();
        Self { limits, until, content, given: 0, begin: now, last: now, latency: new_histogram() }
    }

    fn next(&mut self) -> Option<u64> {
        let now = Instant::now();
        if self.given > 0 {
            let nanoseconds = u64::try_from((now - self.last).as_nanos()).unwrap_or(u64::MAX);
            self.latency.record(nanoseconds.max(1)).expect("the histogram grows");
        }
        self.last = now;
        let (time, stop) = self.until;
        let is_over = self.given == self.limits.pieces || now - self.begin >= time;
        // At least one piece, so that the sample has a figure.
        if (is_over && self.given > 0) || stop.is_asked() {
            return None;
        }
        self.given += 1;
        Some((self.given - 1) * self.limits.piece as u64)
    }
}
