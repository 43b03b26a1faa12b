//! Chains of backing files beside a flat array: images of all makes over each other, read, written
//! and grown, while what was found out about the chain is remembered; and what a read through a
//! long chain costs.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{
    Alignment, Buffer, Durability, Fallback, Fua, Request, Result, ToolProgress, Unmap,
};
use blockhouse_disk::{Access, AfterCommit, Disk, Image, ImageFormat, Options, commit_overlay};
use blockhouse_format::qcow2::{self, Backing, CreateOptions, Switch};
use blockhouse_sim::{Config, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::{assert_same, span};

const SECTOR: u64 = 512;
const READ_WRITE: Access = Access::ReadWrite;

/// Images over each other, the last one first, and what the first one of them reads.
struct Chain {
    files: Vec<(SimDisk, ImageFormat)>,
    content: Vec<u8>,
}

impl Chain {
    /// A chain of `count` images.
    async fn new(sim: &Sim, count: usize, random: &mut Rng) -> Result<Self> {
        let mut chain = Self { files: Vec::new(), content: Vec::new() };
        while chain.files.len() < count {
            let size = random.u64(1..6000) * SECTOR;
            chain.add(sim, size, random).await?;
            chain.fill(random).await?;
        }
        Ok(chain)
    }

    /// A new image over those that are there.
    async fn add(&mut self, sim: &Sim, size: u64, random: &mut Rng) -> Result<()> {
        let format = if self.files.is_empty() && random.bool() {
            ImageFormat::Raw
        } else {
            ImageFormat::Qcow2
        };
        let bits = [9, 12, 14, 16, 16, 18][random.usize(..6)];
        let block = [1, 512, 4096_u32][random.usize(..3)].min(1 << bits);
        let config = Config {
            alignment: Alignment { offset: block, memory: block.min(512) },
            fua: Fua::Emulated,
            ..Config::default()
        };
        let bytes = if format == ImageFormat::Raw { size as usize } else { 0 };
        let storage = SimDisk::new(sim, config, vec![0; bytes]);
        let is_extended = bits >= 14 && random.bool();
        let below = self.files.last().map(|(_, format)| format.as_str().to_owned());
        let options = CreateOptions {
            cluster_size: 1 << bits,
            extended_l2: if is_extended { Switch::On } else { Switch::Off },
            backing: below.map(|format| Backing { name: b"below".to_vec(), format: Some(format) }),
            ..CreateOptions::new(size)
        };
        if format == ImageFormat::Qcow2 {
            qcow2::create(&storage, &options).await?;
        }
        self.files.push((storage, format));
        self.content.resize(size as usize, 0);
        Ok(())
    }

    /// The disk of the first `count` images; the upper ones as `access` says, from the last one on.
    async fn disk(&self, count: usize, access: &[Access]) -> Result<Arc<Disk<SimDisk>>> {
        let mut top: Option<Image<SimDisk>> = None;
        for (at, (storage, format)) in self.files[..count].iter().enumerate() {
            let access = access.get(count - 1 - at).copied().unwrap_or(Access::ReadOnly);
            let options = Options { access, ..Options::default() };
            let image = Image::open(storage.clone(), *format, options).await?;
            top = Some(match top {
                Some(below) => image.with_backing(&below),
                None => image,
            });
        }
        Ok(Arc::new(Disk::new(top.expect("a chain of one image at least"))))
    }

    /// The disk, to be changed.
    async fn open(&self) -> Result<Arc<Disk<SimDisk>>> {
        self.disk(self.files.len(), &[READ_WRITE]).await
    }

    async fn fill(&mut self, random: &mut Rng) -> Result<()> {
        let disk = self.open().await?;
        for _ in 0..random.usize(..8) {
            change(&disk, &mut self.content, random).await?;
        }
        disk.close().await
    }
}

/// A random range of a disk of `size` bytes: often one that is aligned, often one that another one
/// was as well.
fn range(size: usize, random: &mut Rng) -> std::ops::Range<usize> {
    let unit = [1, 512, 4096, 65536][random.usize(..4)];
    let start = random.usize(..size) / unit * unit;
    let length = [random.usize(1..=20_000), 4096, 65536, 1 << 20][random.usize(..4)];
    start..(start + length).min(size)
}

/// One random change of the disk, and of the array.
async fn change(disk: &Disk<SimDisk>, content: &mut [u8], random: &mut Rng) -> Result<()> {
    let (range, durability) = (range(content.len(), random), Durability::None);
    let offset = range.start as u64;
    let byte = if random.u8(..4) == 0 { 0 } else { random.u8(1..) };
    content[range.clone()].fill(byte);
    let span = span(offset, range.len() as u64);
    if byte == 0 {
        let (unmap, fallback) = (Unmap::Allowed, Fallback::Allowed);
        let zeros = Request::WriteZeroes { range: span, unmap, fallback, durability };
        return disk.submit(zeros).await;
    }
    let mut buffer = Buffer::new(range.len());
    buffer.bytes_mut().fill(byte);
    disk.submit(Request::Write { offset, from: buffer.lend(), durability }).await
}

async fn check(disk: &Disk<SimDisk>, content: &[u8], range: std::ops::Range<usize>) -> Result<()> {
    let mut buffer = Buffer::new(range.len());
    disk.submit(Request::Read { offset: range.start as u64, into: buffer.lend() }).await?;
    assert_same(buffer.bytes(), &content[range]);
    Ok(())
}

/// Reads that are in flight together, of places that are soon read again.
async fn check_some(disk: &Disk<SimDisk>, content: &[u8], random: &mut Rng) -> Result<()> {
    for _ in 0..random.usize(1..4) {
        let ranges: Vec<_> =
            (0..random.usize(1..6)).map(|_| range(content.len(), random)).collect();
        for _ in 0..2 {
            let reads = ranges.iter().map(|range| check(disk, content, range.clone()));
            futures_util::future::try_join_all(reads).await?;
        }
    }
    Ok(())
}

fn simulated<F>(seed: u64, run: impl FnOnce(Sim, Rng) -> F) -> Result<Report, String>
where
    F: Future<Output = Result<()>> + 'static,
{
    let sim = Sim::new(seed);
    let random = sim.fork_prng();
    sim.block_on(run(sim.clone(), random)).map_err(|error| error.to_string())?;
    Ok(Report::default())
}

/// Reads, changes and growth of an image over a chain.
async fn use_chain(sim: Sim, mut random: Rng) -> Result<()> {
    let count = random.usize(2..9);
    let mut chain = Chain::new(&sim, count, &mut random).await?;
    let disk = chain.open().await?;
    for _ in 0..random.usize(5..25) {
        check_some(&disk, &chain.content, &mut random).await?;
        match random.u8(..5) {
            0 => {
                let size = chain.content.len() + random.usize(1..800) * SECTOR as usize;
                disk.resize(size as u64).await?;
                chain.content.resize(size, 0);
            }
            1 => check(&disk, &chain.content, 0..chain.content.len()).await?,
            _ => change(&disk, &mut chain.content, &mut random).await?,
        }
    }
    check(&disk, &chain.content, 0..chain.content.len()).await
}

/// A guest goes on while its image is copied into the backing file, which is open for writing from
/// some moment on.
async fn attach_base(sim: Sim, mut random: Rng) -> Result<()> {
    let count = random.usize(2..6);
    let mut chain = Chain::new(&sim, count, &mut random).await?;
    let longest = chain.files.len();
    chain
        .add(&sim, random.u64(1..=chain.content.len() as u64 / SECTOR) * SECTOR, &mut random)
        .await?;
    chain.fill(&mut random).await?;
    let disk = chain.open().await?;
    check_some(&disk, &chain.content, &mut random).await?;
    let base = chain.disk(longest, &[READ_WRITE]).await?;
    disk.jobs().attach_base(Arc::clone(&base)).await?;
    disk.jobs().settle_base().await?;
    for _ in 0..10 {
        check_some(&disk, &chain.content, &mut random).await?;
        let changed = range(chain.content.len(), &mut random);
        let mut buffer = Buffer::new(changed.len());
        buffer.bytes_mut().fill(random.u8(..));
        chain.content[changed.clone()].copy_from_slice(buffer.bytes());
        // The image has it before its base does.
        for disk in [&disk, &base] {
            let (offset, durability) = (changed.start as u64, Durability::None);
            let from = buffer.lend();
            disk.submit(Request::Write { offset, from, durability }).await?;
        }
    }
    check(&disk, &chain.content, 0..chain.content.len()).await?;
    disk.close().await
}

/// The data of an image is in its backing file later, and read from there.
async fn commit(sim: Sim, mut random: Rng) -> Result<()> {
    let count = random.usize(3..6);
    let mut chain = Chain::new(&sim, count, &mut random).await?;
    let size = chain.content.len() as u64;
    chain.add(&sim, size, &mut random).await?;
    chain.fill(&mut random).await?;
    let base = chain.disk(count, &[READ_WRITE]).await?;
    let (storage, format) = chain.files[count].clone();
    let image = Image::open(storage, format, Options::default()).await?;
    let disk = Disk::new(image.with_backing(base.image()));
    for _ in 0..2 {
        check_some(&disk, &chain.content, &mut random).await?;
        check(&disk, &chain.content, 0..chain.content.len()).await?;
        commit_overlay(&disk, &base, AfterCommit::Empty, &ToolProgress::default()).await?;
        check(&disk, &chain.content, 0..chain.content.len()).await?;
        change(&disk, &mut chain.content, &mut random).await?;
    }
    check(&disk, &chain.content, 0..chain.content.len()).await
}

#[test]
fn a_chain_of_all_makes_holds_what_a_flat_array_holds() {
    let test = "a_chain_of_all_makes_holds_what_a_flat_array_holds";
    for_seeds(env!("CARGO_PKG_NAME"), test, 40, |seed| simulated(seed, use_chain));
}

#[test]
fn a_chain_whose_base_is_written_to_holds_what_a_flat_array_holds() {
    let test = "a_chain_whose_base_is_written_to_holds_what_a_flat_array_holds";
    for_seeds(env!("CARGO_PKG_NAME"), test, 20, |seed| simulated(seed, attach_base));
}

#[test]
fn a_chain_that_was_committed_holds_what_a_flat_array_holds() {
    let test = "a_chain_that_was_committed_holds_what_a_flat_array_holds";
    for_seeds(env!("CARGO_PKG_NAME"), test, 30, |seed| simulated(seed, commit));
}

/// The disks of a raw image of `size` bytes and of this many images over it, with clusters of
/// `cluster` bytes. If `filled`, each image has a cluster of its own.
async fn tall(
    sim: &Sim,
    overlays: u64,
    size: usize,
    cluster: usize,
    filled: bool,
) -> Result<Vec<Arc<Disk<SimDisk>>>> {
    let base = SimDisk::new(sim, Config::default(), vec![0xba; size]);
    let read_only = Options { access: Access::ReadOnly, ..Options::default() };
    let mut disks = vec![Arc::new(Disk::raw(base, read_only)?)];
    for number in 0..overlays {
        let storage = SimDisk::new(sim, Config::default(), Vec::new());
        let options = CreateOptions {
            backing: Some(Backing { name: b"below".to_vec(), format: Some("raw".into()) }),
            cluster_size: cluster as u64,
            ..CreateOptions::new(size as u64)
        };
        qcow2::create(&storage, &options).await?;
        let disk = Disk::open(storage.clone(), ImageFormat::Qcow2, Options::default()).await?;
        if filled {
            let mut buffer = Buffer::new(cluster);
            buffer.bytes_mut().fill(number as u8);
            let (offset, durability) = (number * cluster as u64, Durability::None);
            disk.submit(Request::Write { offset, from: buffer.lend(), durability }).await?;
        }
        disk.close().await?;
        let image = Image::open(storage, ImageFormat::Qcow2, read_only).await?;
        let below = disks.last().expect("the raw image").image();
        disks.push(Arc::new(Disk::new(image.with_backing(below))));
    }
    Ok(disks)
}

/// Look-ups in the tables of all images together.
fn look_ups(disks: &[Arc<Disk<SimDisk>>]) -> u64 {
    let counts = disks.iter().filter_map(|disk| disk.stats().metadata_cache());
    counts.map(|counts| counts.hits + counts.misses).sum()
}

#[test]
fn a_read_that_was_done_before_asks_two_images_of_a_chain_of_64() {
    const OVERLAYS: u64 = 64;
    const SIZE: usize = 8 << 20;
    let sim = Sim::new(1);
    let inner = sim.clone();
    let (first, later, whole) = sim.block_on(async move {
        let disks = tall(&inner, OVERLAYS, SIZE, 65536, true).await.expect("a chain");
        let mut content = vec![0xba; SIZE];
        (0..OVERLAYS as usize)
            .for_each(|number| content[number << 16..][..65536].fill(number as u8));
        let disk = disks.last().expect("a chain");
        let mut counts = Vec::new();
        for (length, times) in [(4096, 2), (1 << 20, 1)] {
            for _ in 0..times {
                let before = look_ups(&disks);
                for start in (0..SIZE).step_by(length.max(65536)) {
                    check(disk, &content, start..start + length).await.expect("a read");
                }
                counts.push(look_ups(&disks) - before);
            }
        }
        (counts[0], counts[1], counts[2])
    });
    let reads = (SIZE >> 16) as u64;
    assert!(first > 10 * reads, "the chain was not walked: {first} look-ups for {reads} reads");
    assert!(later <= 2 * reads, "{later} look-ups for {reads} reads");
    assert!(whole <= 2 * reads, "{whole} look-ups for eight long reads");
}

#[test]
fn the_first_long_read_asks_each_image_once_and_yields() {
    const OVERLAYS: u64 = 64;
    const SIZE: usize = 4 << 20;
    let sim = Sim::new(1);
    let inner = sim.clone();
    let disks = sim.block_on(async move { tall(&inner, OVERLAYS, SIZE, 4096, false).await });
    let disks = disks.expect("a chain");
    let mut buffer = Buffer::new(SIZE);
    let into = buffer.lend();
    let polls = Rc::new(Cell::new(0));
    let (counted, disk) = (Rc::clone(&polls), Arc::clone(&disks[OVERLAYS as usize]));
    let allocated = allocation_counter::measure(|| {
        sim.block_on(async move {
            let mut read = pin!(disk.submit(Request::Read { offset: 0, into }));
            poll_fn(|context| {
                counted.update(|count| count + 1);
                read.as_mut().poll(context)
            })
            .await
        })
        .expect("a read");
    });
    assert!(buffer.bytes().iter().all(|&byte| byte == 0xba));
    // Each time that layers are asked takes memory of its own, for a future: 1024 clusters are
    // asked for together.
    let count = allocated.count_total;
    assert!(count < 200, "{count} allocations for 1024 clusters");
    assert!(
        polls.get() > OVERLAYS / 2,
        "{} polls for a walk through {OVERLAYS} images",
        polls.get()
    );
}
