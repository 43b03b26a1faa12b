//! Forks beside a flat array, and with crashes at every operation: what a disk and its children
//! read is what was written, what was flushed survives whichever file has it, and a flush covers
//! the layers.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{
    Alignment, Buffer, Durability, Fallback, Fua, Request, Result, Storage, SyncMode, Unmap,
    WriteCache,
};
use blockhouse_disk::{Access, Backing, Disk, Image, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions, Switch};
use blockhouse_sim::{Config, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::crash_points::at_every_operation;
use crate::common::span;

pub(crate) const SECTOR: u64 = 512;
pub(crate) const SIZE: usize = 96 * SECTOR as usize;
const BACKING: &[u8] = b"below";

pub(crate) fn plain() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

fn options(access: Access) -> Options {
    Options { access, ..Options::default() }
}

/// A new overlay for a disk over images of this format.
pub(crate) async fn overlay(
    storage: &SimDisk,
    format: ImageFormat,
    cluster_size: u64,
) -> Result<Image<SimDisk>> {
    let backing = Backing { name: BACKING.to_vec(), format: Some(format.as_str().to_owned()) };
    // With subclusters, as forks make them, where these are blocks of the storage.
    let has_subclusters =
        cluster_size / 32 >= SECTOR.max(storage.capabilities().alignment.offset.into());
    let extended_l2 = if has_subclusters { Switch::On } else { Switch::Off };
    let new = CreateOptions::new(SIZE as u64);
    let made = CreateOptions { backing: Some(backing), cluster_size, extended_l2, ..new };
    qcow2::create(storage, &made).await?;
    storage.flush(SyncMode::Full).await?;
    // Where the layer has no write cache, its overlay makes every write durable.
    let durability = match storage.capabilities().write_cache {
        WriteCache::None => Durability::Data,
        WriteCache::Volatile => Durability::None,
    };
    let options = Options { durability, ..Options::default() };
    Image::open(storage.clone(), ImageFormat::Qcow2, options).await
}

pub(crate) async fn read(disk: &Disk<SimDisk>) -> Result<Vec<u8>> {
    let mut buffer = Buffer::new(SIZE);
    disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await?;
    Ok(buffer.bytes().to_vec())
}

/// The values that may be read of each byte after a crash: the durable one, and those written
/// since.
#[derive(Clone, Default)]
pub(crate) struct Promise {
    pub(crate) durable: Vec<u8>,
    /// Each change since, with its range.
    pub(crate) later: Vec<(std::ops::Range<usize>, u8)>,
}

impl Promise {
    pub(crate) fn new() -> Self {
        Self { durable: vec![0; SIZE], later: Vec::new() }
    }

    pub(crate) fn now(&self) -> Vec<u8> {
        let mut now = self.durable.clone();
        self.later.iter().for_each(|(range, byte)| now[range.clone()].fill(*byte));
        now
    }

    fn flushed(&mut self, count: usize) {
        for (range, byte) in self.later.drain(..count) {
            self.durable[range].fill(byte);
        }
    }

    pub(crate) fn check(&self, found: &[u8]) -> Result<(), String> {
        let sector = SECTOR as usize;
        for start in (0..SIZE).step_by(sector) {
            let of = start..start + sector;
            if found[of.clone()] == self.durable[of.clone()] {
                continue;
            }
            let later: Vec<_> =
                self.later.iter().filter(|(range, _)| range.contains(&start)).collect();
            let is_kept = |at: usize| {
                found[at] == self.durable[at] || later.iter().any(|(_, byte)| *byte == found[at])
            };
            if let Some(at) = of.into_iter().find(|at| !is_kept(*at)) {
                let (byte, durable) = (found[at], self.durable[at]);
                return Err(format!("byte {at} is {byte}, and was durable as {durable}"));
            }
        }
        Ok(())
    }
}

async fn change(disk: &Disk<SimDisk>, promise: &RefCell<Promise>, random: &mut Rng) -> Result<()> {
    let sectors = SIZE as u64 / SECTOR;
    let start = random.u64(..sectors);
    let length = random.u64(1..=24).min(sectors - start) * SECTOR;
    let offset = start * SECTOR;
    let byte = if random.u8(..4) == 0 { 0 } else { random.u8(1..) };
    let range = offset as usize..(offset + length) as usize;
    let is_durable = random.u8(..4) == 0;
    let durability = if is_durable { Durability::Data } else { Durability::None };
    promise.borrow_mut().later.push((range.clone(), byte));
    if byte == 0 {
        let (range, unmap, fallback) = (span(offset, length), Unmap::Allowed, Fallback::Allowed);
        disk.submit(Request::WriteZeroes { range, unmap, fallback, durability }).await?;
    } else {
        let mut buffer = Buffer::new(length as usize);
        buffer.bytes_mut().fill(byte);
        disk.submit(Request::Write { offset, from: buffer.lend(), durability }).await?;
    }
    if is_durable {
        // The others are what they were; what these bytes were before cannot come back.
        let mut promise = promise.borrow_mut();
        promise.durable[range.clone()].fill(byte);
        let outside = |(later, one): (std::ops::Range<usize>, u8)| {
            let before = later.start..later.end.min(range.start).max(later.start);
            let after = later.start.max(range.end).min(later.end)..later.end;
            [(before, one), (after, one)]
        };
        let later = std::mem::take(&mut promise.later);
        promise.later =
            later.into_iter().flat_map(outside).filter(|(range, _)| !range.is_empty()).collect();
    }
    Ok(())
}

pub(crate) async fn flush(disk: &Disk<SimDisk>, promise: &RefCell<Promise>) -> Result<()> {
    let count = promise.borrow().later.len();
    disk.flush().await?;
    promise.borrow_mut().flushed(count);
    Ok(())
}

/// Some changes and flushes; the disk reads as it should.
pub(crate) async fn go_on(
    disk: &Disk<SimDisk>,
    promise: &RefCell<Promise>,
    random: &mut Rng,
) -> Result<()> {
    for _ in 0..random.usize(1..6) {
        match random.u8(..5) {
            0 => flush(disk, promise).await?,
            1 => assert!(read(disk).await? == promise.borrow().now(), "it reads something else"),
            _ => change(disk, promise, random).await?,
        }
    }
    Ok(())
}

/// The storages of a disk and of its overlays: the first one has the lowest layer, of any format.
pub(crate) struct Files<const COUNT: usize> {
    pub(crate) storages: [SimDisk; COUNT],
    pub(crate) format: ImageFormat,
    pub(crate) cluster_size: u64,
}

impl<const COUNT: usize> Files<COUNT> {
    /// Storages of a random kind, and an image for the layer where its format needs one.
    pub(crate) fn random(sim: &Sim, random: &mut Rng) -> Result<Self> {
        let config = Config::random(random);
        let block = u64::from(config.alignment.offset);
        let format = if random.bool() { ImageFormat::Raw } else { ImageFormat::Qcow2 };
        let bytes = if format == ImageFormat::Raw { SIZE } else { 0 };
        let storages: [SimDisk; COUNT] = std::array::from_fn(|index| {
            let content = vec![0; if index == 0 { bytes } else { 0 }];
            SimDisk::new(sim, config.clone(), content)
        });
        let cluster_size = [512, 4096, 16_384][random.usize(..3)].max(block);
        if format == ImageFormat::Qcow2 {
            let layer = storages[0].clone();
            let made = CreateOptions { cluster_size, ..CreateOptions::new(SIZE as u64) };
            sim.block_on(async move {
                qcow2::create(&layer, &made).await?;
                layer.flush(SyncMode::Full).await
            })?;
        }
        Ok(Self { storages, format, cluster_size })
    }
}

/// How far the fork is.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// The overlays that are durable and named by a record.
    recorded: usize,
    has_child: bool,
}

/// Forks a disk twice while it is used, with a child of the second one's layer.
async fn use_disk(
    files: Rc<Files<4>>,
    promises: Rc<[RefCell<Promise>; 2]>,
    progress: Rc<RefCell<Progress>>,
    mut random: Rng,
) -> Result<()> {
    let [layer, first, second, child] = &files.storages;
    let lowest = match files.format {
        ImageFormat::Raw => Disk::raw(layer.clone(), Options::default())?,
        format => Disk::open(layer.clone(), format, Options::default()).await?,
    };
    let disk = Arc::new(lowest);
    let ours = &promises[0];
    go_on(&disk, ours, &mut random).await?;
    let over = Arc::new(overlay(first, files.format, files.cluster_size).await?.over(disk.image()));
    progress.borrow_mut().recorded = 1;
    go_on(&disk, ours, &mut random).await?;
    let replaced = disk.quiesced().await?.switch_to(over)?;
    go_on(&disk, ours, &mut random).await?;
    if random.bool() {
        replaced.close_as_layer().await?;
    }
    go_on(&disk, ours, &mut random).await?;
    let of_qcow2 = ImageFormat::Qcow2;
    let over = Arc::new(overlay(second, of_qcow2, files.cluster_size).await?.over(disk.image()));
    progress.borrow_mut().recorded = 2;
    let other = overlay(child, of_qcow2, files.cluster_size).await?.over(disk.image());
    let other = Arc::new(Disk::new(other));
    let second_layer = disk.quiesced().await?.switch_to(over)?;
    promises[1].replace(ours.borrow().clone());
    progress.borrow_mut().has_child = true;
    for _ in 0..3 {
        go_on(&disk, ours, &mut random).await?;
        go_on(&other, &promises[1], &mut random).await?;
    }
    second_layer.close_as_layer().await?;
    go_on(&disk, ours, &mut random).await?;
    go_on(&other, &promises[1], &mut random).await?;
    flush(&disk, ours).await?;
    flush(&other, &promises[1]).await?;
    other.close().await?;
    disk.close().await
}

/// The bytes of the last of these images over the others.
pub(crate) fn recover(images: Vec<(Vec<u8>, ImageFormat)>) -> Result<Vec<u8>, String> {
    let sim = Sim::new(0);
    let storages: Vec<_> = images
        .into_iter()
        .map(|(image, format)| (SimDisk::new(&sim, plain(), image), format))
        .collect();
    let read = sim.block_on(async move {
        let mut top: Option<Image<SimDisk>> = None;
        for (storage, format) in storages {
            let image = Image::open(storage, format, options(Access::ReadOnly)).await?;
            top = Some(match top {
                Some(below) => image.with_backing(&below),
                None => image,
            });
        }
        read(&Disk::new(top.expect("an image"))).await
    });
    read.map_err(|error| error.to_string())
}

fn fork(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    // The last one is of a child over the second.
    let files = Files::random(&sim, &mut random).map_err(|error| error.to_string())?;
    let files = Rc::new(files);
    let promises: Rc<[RefCell<Promise>; 2]> =
        Rc::new([RefCell::new(Promise::new()), RefCell::new(Promise::new())]);
    let progress = Rc::new(RefCell::new(Progress::default()));
    let work =
        use_disk(Rc::clone(&files), Rc::clone(&promises), Rc::clone(&progress), random.fork());
    let task = sim.spawn(work);
    let crashed = |random: &mut Rng| files.storages.each_ref().map(|storage| storage.crash(random));
    let mut crash = || {
        let Progress { recorded, has_child } = *progress.borrow();
        let [layer, first, second, child] = crashed(&mut random);
        let of = |image| (image, ImageFormat::Qcow2);
        let mut images = vec![(layer, files.format), of(first), of(second)];
        images.truncate(recorded + 1);
        promises[0].borrow().check(&recover(images.clone())?)?;
        if has_child {
            images[2] = of(child);
            promises[1].borrow().check(&recover(images)?)?;
        }
        Ok(())
    };
    let disks = files.storages.each_ref();
    let (outcome, crashes) = at_every_operation(&sim, &disks, &task, &mut crash)?;
    outcome.map_err(|error| error.to_string())?;
    crash()?;
    Ok(Report { crashes, ..Report::default() })
}

#[test]
fn crash_at_every_point_of_forks() {
    let report = for_seeds(env!("CARGO_PKG_NAME"), "crash_at_every_point_of_forks", 20, fork);
    eprintln!("{report:?}");
}
