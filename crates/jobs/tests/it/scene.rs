//! Disks of random kinds.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Result, WriteCache};
use blockhouse_disk::{Access, Backing, Disk, Image, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions, Version};
use blockhouse_jobs::{ClockSleep, Completion, JobClock, JobControl, JobStage};
use blockhouse_sim::{Config, Rng, Sim, SimDisk};

/// Bytes of an image that are data, or a hole.
const PART: usize = 16 << 10;

/// The clock of a simulation.
pub struct SimClock(pub Sim);

impl JobClock for SimClock {
    fn now(&self) -> Duration {
        self.0.clock().now()
    }

    fn sleep(&self, time: Duration) -> ClockSleep {
        let sim = self.0.clone();
        Box::pin(async move { sim.sleep(time).await })
    }
}

/// Asks a job to complete until it does, or ends otherwise: the simulation may have the process
/// stand still for longer than the guest may wait. It is ready again before it is asked another
/// time.
pub async fn complete(control: &JobControl, completion: Completion) {
    loop {
        let known = control.postponements();
        if !control.complete(completion) || control.ended_or_postponed(known).await.is_ok() {
            return;
        }
        control.next_stage(&JobStage::Completing).await;
    }
}

/// As one of those for a job.
pub fn clock(sim: &Sim) -> Rc<dyn JobClock> {
    Rc::new(SimClock(sim.clone()))
}

/// A disk, and the storage below it.
pub struct Scene {
    pub storage: SimDisk,
    pub disk: Arc<Disk<SimDisk>>,
    pub format: ImageFormat,
}

/// A disk of any kind with these bytes.
pub async fn disk(sim: &Sim, random: &mut Rng, content: &[u8]) -> Result<Scene> {
    // A disk that needs no flush has no mirror that needs one.
    let config = Config { write_cache: WriteCache::Volatile, ..Config::random(random) };
    let options = Options::default();
    if random.bool() {
        let storage = SimDisk::new(sim, config, content.to_vec());
        let disk = Arc::new(Disk::raw(storage.clone(), options)?);
        return Ok(Scene { storage, disk, format: ImageFormat::Raw });
    }
    let block = u64::from(config.alignment.offset).max(512);
    let image = CreateOptions {
        cluster_size: cluster_size(random, block),
        ..CreateOptions::new(content.len() as u64)
    };
    let storage = SimDisk::new(sim, config, Vec::new());
    qcow2::create(&storage, &image).await?;
    let disk = Disk::open(storage.clone(), ImageFormat::Qcow2, options).await?;
    // Zeros are holes of the image.
    for (index, part) in content.chunks(PART).enumerate() {
        if part.iter().any(|byte| *byte != 0) {
            let mut buffer = Buffer::new(part.len());
            buffer.bytes_mut().copy_from_slice(part);
            let (from, durability) = (buffer.lend(), Durability::None);
            disk.submit(Request::Write { offset: (index * PART) as u64, from, durability }).await?;
        }
    }
    disk.flush().await?;
    Ok(Scene { storage, disk: Arc::new(disk), format: ImageFormat::Qcow2 })
}

/// A qcow2 image without data, on storage without conditions.
pub async fn empty(sim: &Sim, size: u64, cluster_size: u64) -> Result<Scene> {
    let storage = SimDisk::new(sim, Config::default(), Vec::new());
    let image = CreateOptions { cluster_size, ..CreateOptions::new(size) };
    qcow2::create(&storage, &image).await?;
    let disk = Disk::open(storage.clone(), ImageFormat::Qcow2, Options::default()).await?;
    Ok(Scene { storage, disk: Arc::new(disk), format: ImageFormat::Qcow2 })
}

/// Any size of clusters from one block to 64 KiB: crashes copy the whole image.
fn cluster_size(random: &mut Rng, block: u64) -> u64 {
    1 << random.u32(block.trailing_zeros()..=16)
}

/// A disk whose image is an overlay, and the storages below.
pub struct Overlay {
    pub storage: SimDisk,
    pub disk: Arc<Disk<SimDisk>>,
    /// The storage of the backing file.
    pub base: SimDisk,
    pub base_format: ImageFormat,
}

/// A disk with these bytes over a base of any kind, which has some of them, and may be shorter, or
/// have a snapshot.
pub async fn overlay(sim: &Sim, random: &mut Rng, content: &[u8]) -> Result<Overlay> {
    overlay_with(sim, random, content, Options::default()).await
}

/// As [`overlay`], opened so.
pub async fn overlay_with(
    sim: &Sim,
    random: &mut Rng,
    content: &[u8],
    options: Options,
) -> Result<Overlay> {
    let size = content.len() as u64;
    let base_size = [size, (random.u64(1..=size) & !511).max(512)][random.usize(..2)];
    let mut below = content[..base_size as usize].to_vec();
    let mut own = Vec::new();
    for sector in (0..size).step_by(512) {
        let is_of_base = sector < base_size;
        if is_of_base && random.u8(..3) > 0 {
            continue;
        }
        own.push(sector);
        if is_of_base {
            below[sector as usize..][..512].fill(0xbb);
        }
    }
    let Scene { storage: base, disk, format: base_format } = disk(sim, random, &below).await?;
    if base_format == ImageFormat::Qcow2 && random.bool() {
        disk.snapshots().create("older").await?;
    }
    disk.close().await?;
    let config = Config { write_cache: WriteCache::Volatile, ..Config::random(random) };
    let block = u64::from(config.alignment.offset).max(512);
    let backing = Backing { name: b"base".to_vec(), format: Some(base_format.as_str().into()) };
    let image = CreateOptions {
        cluster_size: cluster_size(random, block),
        version: [Version::V2, Version::V3][random.usize(..2)],
        backing: Some(backing),
        ..CreateOptions::new(size)
    };
    let storage = SimDisk::new(sim, config, Vec::new());
    qcow2::create(&storage, &image).await?;
    let read_only = Options { access: Access::ReadOnly, ..Options::default() };
    let below = Image::open(base.clone(), base_format, read_only).await?;
    let overlay = Image::open(storage.clone(), ImageFormat::Qcow2, options).await?;
    let disk = Arc::new(Disk::new(overlay.with_backing(&below)));
    for sector in own {
        let mut buffer = Buffer::new(512);
        buffer.bytes_mut().copy_from_slice(&content[sector as usize..][..512]);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset: sector, from, durability }).await?;
    }
    disk.flush().await?;
    Ok(Overlay { storage, disk, base, base_format })
}

/// The content of a disk of this format that was left in these bytes.
pub fn recover(bytes: Vec<u8>, format: ImageFormat) -> std::result::Result<Vec<u8>, String> {
    recover_chain(bytes, format, None)
}

impl Overlay {
    /// The content of the disk that a crash left in these bytes: over its base, if the header names
    /// one still. That is never written to.
    pub fn recover(&self, left: Vec<u8>) -> std::result::Result<Vec<u8>, String> {
        match names_base(&left) {
            true => recover_overlay(left, self.base.content(), self.base_format),
            false => recover(left, ImageFormat::Qcow2),
        }
    }
}

/// Whether the header of a qcow2 image names a backing file.
pub fn names_base(image: &[u8]) -> bool {
    image[8..16].iter().any(|byte| *byte != 0)
}

/// The content of an overlay that was left in these bytes, over a base of this format.
pub fn recover_overlay(
    bytes: Vec<u8>,
    base: Vec<u8>,
    format: ImageFormat,
) -> std::result::Result<Vec<u8>, String> {
    recover_chain(bytes, ImageFormat::Qcow2, Some((base, format)))
}

fn recover_chain(
    bytes: Vec<u8>,
    format: ImageFormat,
    base: Option<(Vec<u8>, ImageFormat)>,
) -> std::result::Result<Vec<u8>, String> {
    let sim = Sim::new(0);
    let config = Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() };
    let storage = SimDisk::new(&sim, config.clone(), bytes);
    let base = base.map(|(bytes, format)| (SimDisk::new(&sim, config, bytes), format));
    let read = sim.block_on(async move {
        let mut image = Image::open(storage, format, Options::default()).await?;
        if let Some((storage, format)) = base {
            let options = Options { access: Access::ReadOnly, ..Options::default() };
            image = image.with_backing(&Image::open(storage, format, options).await?);
        }
        crate::guests::read(&Disk::new(image)).await
    });
    read.map_err(|error| error.to_string())
}
