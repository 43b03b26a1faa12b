//! How much a bitmap says too much after a crash: whole extents around changes, as many as may be
//! active, and those of requests in flight.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockhouse_core::{ByteRange, Durability, Request, Result, Storage};
use blockhouse_disk::{BitmapActivity, Disk, NewBitmap, Options};
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_sim::{
    Cancellation, Config, Faults, Growth, ImageState, Rng, Sim, SimDisk, SystemUnderTest, Workload,
    explore_image, for_seeds,
};

use crate::crashed::{open, plain_config, read_all};

/// Bytes of the disk for a bit.
const GRANULARITY: u64 = 512;
const NAME: &str = "changes";

/// The most extents that a crash left too much of.
static MOST: AtomicUsize = AtomicUsize::new(0);

/// A disk whose bitmap is compared with what requests have asked for.
struct Recorded {
    disk: Disk<SimDisk>,
    activity: BitmapActivity,
    /// Bytes of a block of the storage.
    block: u64,
    /// Blocks that a request was to change, and those that the bitmap had in the beginning.
    asked: RefCell<Vec<bool>>,
    in_flight: Rc<Cell<usize>>,
}

/// Counts a request that is in flight.
struct InFlight(Rc<Cell<usize>>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// The bits of a range, whose first and last block are changed as a whole.
fn bits_of(range: ByteRange, block: u64) -> std::ops::Range<usize> {
    let block = block.max(GRANULARITY);
    let (start, end) = (range.offset() / block * block, range.end().next_multiple_of(block));
    (start / GRANULARITY) as usize..(end / GRANULARITY) as usize
}

fn changed_range(request: &Request) -> Option<ByteRange> {
    match request {
        Request::Write { offset, from, .. } => ByteRange::new(*offset, from.len() as u64),
        Request::WriteZeroes { range, .. } | Request::Discard { range, .. } => Some(*range),
        _ => None,
    }
}

async fn dirty(disk: &Disk<SimDisk>) -> std::result::Result<Vec<bool>, String> {
    let all = ByteRange::between(0, disk.size());
    let extents = disk.bitmaps().extents(NAME, all, usize::MAX).await;
    let mut bits = Vec::new();
    let mut end = 0;
    for extent in extents.map_err(|error| error.to_string())? {
        end += extent.length;
        bits.resize(end.div_ceil(GRANULARITY) as usize, extent.is_dirty);
    }
    Ok(bits)
}

impl Recorded {
    /// Extents that have bits of blocks that no request was to change.
    fn count_excess(&self, dirty: &[bool]) -> usize {
        let asked = self.asked.borrow();
        let in_extent = (self.activity.extent_size / GRANULARITY) as usize;
        let extents = dirty.chunks(in_extent).zip(asked.chunks(in_extent));
        extents.filter(|(dirty, asked)| dirty.iter().zip(*asked).any(|(d, a)| *d && !a)).count()
    }
}

impl SystemUnderTest for Recorded {
    fn submit(&self, request: Request) -> impl Future<Output = Result<()>> {
        self.in_flight.set(self.in_flight.get() + 1);
        let in_flight = InFlight(Rc::clone(&self.in_flight));
        if let Some(range) = changed_range(&request) {
            let mut asked = self.asked.borrow_mut();
            let end = asked.len();
            let bits = bits_of(range, self.block);
            asked[bits.start.min(end)..bits.end.min(end)].fill(true);
        }
        let submitted = self.disk.submit(request);
        async move {
            let _in_flight = in_flight;
            submitted.await
        }
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn min_durability(&self) -> Durability {
        Durability::None
    }

    fn grow(&self, size: u64) -> impl Future<Output = Result<()>> {
        self.disk.resize(size)
    }

    fn close(&self) -> impl Future<Output = Result<()>> {
        self.disk.close()
    }

    fn others(&self) -> Vec<SimDisk> {
        Vec::new()
    }

    fn recover(&self, image: Vec<u8>, state: ImageState) -> std::result::Result<Vec<u8>, String> {
        let sim = Sim::new(0);
        let storage = SimDisk::new(&sim, plain_config(), image);
        let (found, dirty) = sim.block_on(async move {
            let disk = open(storage, None, None, Options::default()).await;
            let disk = disk.map_err(|error| format!("cannot be opened again: {error}"))?;
            Ok::<_, String>((read_all(&disk).await?, dirty(&disk).await?))
        })?;
        let excess = self.count_excess(&dirty);
        // A request has no more than part of an extent at either end.
        let bound = match state {
            ImageState::Crashed => self.activity.max_active + 2 * self.in_flight.get(),
            ImageState::Closed => 0,
        };
        MOST.fetch_max(excess, Ordering::Relaxed);
        if excess <= bound {
            Ok(found)
        } else {
            Err(format!(
                "{excess} extents of {:?} are said to have changed that have not, {} requests are in flight",
                self.activity,
                self.in_flight.get()
            ))
        }
    }
}

/// An image with a bitmap.
fn image_of(content: &[u8], block: u32, random: &mut Rng) -> Vec<u8> {
    let sim = Sim::new(random.u64(..));
    let storage = SimDisk::new(&sim, plain_config(), Vec::new());
    let (target, size) = (storage.clone(), content.len() as u64);
    let mut buffer = blockhouse_core::Buffer::new(content.len());
    buffer.bytes_mut().copy_from_slice(content);
    sim.block_on(async move {
        let cluster_size = u64::from(block).max(4096);
        let options = CreateOptions { cluster_size, ..CreateOptions::new(size) };
        qcow2::create(&target, &options).await.expect("a new image");
        let disk = open(target, None, None, Options::default()).await.expect("the new image");
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset: 0, from, durability }).await.expect("room");
        let granularity = Some(GRANULARITY);
        let new = NewBitmap { name: NAME.to_owned(), granularity, is_enabled: true };
        disk.bitmaps().add(&new).await.expect("room");
        disk.close().await.expect("no failure");
    });
    storage.content()
}

#[test]
fn a_crash_leaves_no_more_in_excess_than_active_extents() {
    let test = "bitmap_excess::a_crash_leaves_no_more_in_excess_than_active_extents";
    let workload = Workload {
        tasks: 4,
        requests: 40,
        sectors: 600,
        faults: Faults::Never,
        cancellation: Cancellation::Never,
        growth: Growth::Never,
        ..Workload::default()
    };
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 120, |seed| {
        let encode = |config: &Config, content: Vec<u8>, random: &mut Rng| {
            image_of(&content, config.alignment.offset, random)
        };
        let build = |sim: &Sim, storage: SimDisk, random: &mut Rng| {
            let activity = BitmapActivity {
                extent_size: [2048, 4096, 8192][random.usize(..3)],
                max_active: [1, 2, 4, 8, 16][random.usize(..5)],
            };
            let options = Options { bitmap_activity: activity, ..Options::default() };
            let block = u64::from(storage.capabilities().alignment.offset);
            let disk = sim.block_on(open(storage, None, None, options)).expect("a good image");
            let asked = vec![false; disk.size().div_ceil(GRANULARITY) as usize];
            Recorded { disk, activity, block, asked: RefCell::new(asked), in_flight: Rc::default() }
        };
        explore_image(seed, &workload, encode, build)
    });
    let most = MOST.load(Ordering::Relaxed);
    eprintln!("{test}: {} crashes, at most {most} extents in excess", report.crashes);
    assert!(most > 0, "nothing was in excess, so nothing was tested");
}
