//! Disks of random kinds.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Result, WriteCache};
use blockhouse_disk::{Access, Backing, Disk, Image, ImageFormat, Options};
use blockhouse_engine::{Clock, ClockSleep};
use blockhouse_format::qcow2::{self, CreateOptions, Version};
use blockhouse_jobs::{Completion, JobControl, JobStage};
use blockhouse_sim::{Config, Rng, Sim, SimDisk};

/// Bytes of an image that are data, or a hole.
const PART: usize = 16 << 10;

/// The clock of a simulation.
pub struct SimClock(pub Sim);

impl Clock for SimClock {
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
pub fn clock(sim: &Sim) -> Rc<dyn Clock> {
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
    let below = Image::open(base.clone(), base_format, read_only()).await?;
    let storage = new_overlay(sim, random, size, named("base", base_format)).await?;
    let overlay = Image::open(storage.clone(), ImageFormat::Qcow2, options).await?;
    let disk = Arc::new(Disk::new(overlay.with_backing(&below)));
    write_sectors(&disk, own, content).await?;
    disk.flush().await?;
    Ok(Overlay { storage, disk, base, base_format })
}

fn read_only() -> Options {
    Options { access: Access::ReadOnly, ..Options::default() }
}

/// The name of a backing file of this format.
pub fn named(name: &str, format: ImageFormat) -> Backing {
    Backing { name: name.into(), format: Some(format.as_str().into()) }
}

/// A qcow2 image without data over `backing`, of any kind.
async fn new_overlay(sim: &Sim, random: &mut Rng, size: u64, backing: Backing) -> Result<SimDisk> {
    let config = Config { write_cache: WriteCache::Volatile, ..Config::random(random) };
    let block = u64::from(config.alignment.offset).max(512);
    let image = CreateOptions {
        cluster_size: cluster_size(random, block),
        version: [Version::V2, Version::V3][random.usize(..2)],
        backing: Some(backing),
        ..CreateOptions::new(size)
    };
    let storage = SimDisk::new(sim, config, Vec::new());
    qcow2::create(&storage, &image).await?;
    Ok(storage)
}

/// Writes these sectors of `content`.
async fn write_sectors(disk: &Disk<SimDisk>, sectors: Vec<u64>, content: &[u8]) -> Result<()> {
    for sector in sectors {
        let mut buffer = Buffer::new(512);
        buffer.bytes_mut().copy_from_slice(&content[sector as usize..][..512]);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset: sector, from, durability }).await?;
    }
    Ok(())
}

/// A disk over two backing files, and the storages below.
pub struct Chain {
    pub storage: SimDisk,
    pub disk: Arc<Disk<SimDisk>>,
    pub between: SimDisk,
    pub base: SimDisk,
    pub base_format: ImageFormat,
}

/// A disk with these bytes over an image over a base of any kind. Each has some of the bytes, and
/// others where one above it has them. Those below may be shorter. The disk has these options.
pub async fn chain(sim: &Sim, random: &mut Rng, content: &[u8], options: Options) -> Result<Chain> {
    let size = content.len() as u64;
    let mut shorter = |size: u64| [size, (random.u64(1..=size) & !511).max(512)][random.usize(..2)];
    let between_size = shorter(size);
    let base_size = shorter(between_size);
    let mut below = content[..base_size as usize].to_vec();
    let mut middle = content[..between_size as usize].to_vec();
    let (mut own, mut of_middle) = (Vec::new(), Vec::new());
    for sector in (0..size).step_by(512) {
        let (is_of_middle, is_of_base) = (sector < between_size, sector < base_size);
        let at = sector as usize..sector as usize + 512;
        match random.u8(..4) {
            0 if is_of_base => {}
            1 if is_of_middle => {
                of_middle.push(sector);
                if is_of_base {
                    below[at].fill(0xbb);
                }
            }
            _ => {
                own.push(sector);
                if is_of_base {
                    below[at.clone()].fill(0xbb);
                }
                if is_of_middle && random.bool() {
                    middle[at].fill(0xcc);
                    of_middle.push(sector);
                }
            }
        }
    }
    let Scene { storage: base, disk, format: base_format } = disk(sim, random, &below).await?;
    disk.close().await?;
    let between = new_overlay(sim, random, between_size, named("base", base_format)).await?;
    let open = async |options: Options| {
        let below = Image::open(base.clone(), base_format, read_only()).await?;
        let image = Image::open(between.clone(), ImageFormat::Qcow2, options).await?;
        Ok::<_, blockhouse_core::Error>(image.with_backing(&below))
    };
    let disk = Disk::new(open(Options::default()).await?);
    write_sectors(&disk, of_middle, &middle).await?;
    disk.close().await?;
    let storage = new_overlay(sim, random, size, named("between", ImageFormat::Qcow2)).await?;
    let image = Image::open(storage.clone(), ImageFormat::Qcow2, options).await?;
    let disk = Arc::new(Disk::new(image.with_backing(&open(read_only()).await?)));
    write_sectors(&disk, own, content).await?;
    disk.flush().await?;
    Ok(Chain { storage, disk, between, base, base_format })
}

impl Chain {
    /// The content of the disk that a crash left in these bytes: over the backing files that the
    /// header leads to. These are never written to.
    pub fn recover(&self, left: Vec<u8>) -> std::result::Result<Vec<u8>, String> {
        let base = (self.base.content(), self.base_format);
        match backing_name(&left) {
            b"base" => recover_chain(left, ImageFormat::Qcow2, vec![base]),
            b"between" => {
                let between = (self.between.content(), ImageFormat::Qcow2);
                recover_chain(left, ImageFormat::Qcow2, vec![base, between])
            }
            other => Err(format!("it names {other:?}")),
        }
    }
}

/// A disk over images of which the last two become one, and the storages of all, its own first.
pub struct Layers {
    pub disk: Arc<Disk<SimDisk>>,
    pub storages: Vec<SimDisk>,
    pub base_format: ImageFormat,
}

/// A [`chain`] with these bytes, in half of the cases under the image of a disk.
pub async fn layers(sim: &Sim, random: &mut Rng, content: &[u8]) -> Result<Layers> {
    let is_top = random.bool();
    let mut below = content.to_vec();
    let sectors = (0..content.len() as u64).step_by(512);
    let own: Vec<_> = sectors.filter(|_| is_top && random.u8(..3) == 0).collect();
    for sector in &own {
        below[*sector as usize..][..512].fill(0xdd);
    }
    let Chain { storage, disk, between, base, base_format } =
        chain(sim, random, &below, Options::default()).await?;
    let mut storages = vec![storage.clone(), between.clone(), base.clone()];
    if !is_top {
        return Ok(Layers { disk, storages, base_format });
    }
    disk.close().await?;
    let size = content.len() as u64;
    let top = new_overlay(sim, random, size, named("over", ImageFormat::Qcow2)).await?;
    let mut behind = Image::open(base, base_format, read_only()).await?;
    for storage in [between, storage] {
        let image = Image::open(storage, ImageFormat::Qcow2, read_only()).await?;
        behind = image.with_backing(&behind);
    }
    let image = Image::open(top.clone(), ImageFormat::Qcow2, Options::default()).await?;
    let disk = Arc::new(Disk::new(image.with_backing(&behind)));
    write_sectors(&disk, own, content).await?;
    disk.flush().await?;
    storages.insert(0, top);
    Ok(Layers { disk, storages, base_format })
}

impl Layers {
    /// The depth of the image above those that become one.
    pub fn above(&self) -> usize {
        self.storages.len() - 3
    }

    /// The content of the disk that a crash left in these bytes of all its images.
    pub fn recover(&self, mut left: Vec<Vec<u8>>) -> std::result::Result<Vec<u8>, String> {
        let names = ["over", "between", "base"];
        let names = &names[names.len() + 1 - left.len()..];
        let (mut chain, mut place) = (vec![0], 0);
        while place + 1 < left.len() {
            let name = backing_name(&left[place]);
            let found = names.iter().position(|one| one.as_bytes() == name);
            place = found.ok_or_else(|| format!("it names {name:?}"))? + 1;
            chain.push(place);
        }
        let mut below = Vec::new();
        for place in chain.into_iter().skip(1).rev() {
            let is_base = place + 1 == left.len();
            let format = if is_base { self.base_format } else { ImageFormat::Qcow2 };
            below.push((std::mem::take(&mut left[place]), format));
        }
        recover_chain(left.swap_remove(0), ImageFormat::Qcow2, below)
    }
}

/// The name of the backing file in the header of a qcow2 image.
pub fn backing_name(image: &[u8]) -> &[u8] {
    let number = |at: usize, length: usize| {
        image[at..at + length].iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    };
    let (start, length) = (number(8, 8), number(16, 4));
    &image[start..start + length]
}

/// The content of a disk of this format that was left in these bytes.
pub fn recover(bytes: Vec<u8>, format: ImageFormat) -> std::result::Result<Vec<u8>, String> {
    recover_chain(bytes, format, Vec::new())
}

impl Overlay {
    /// The content of the disk that a crash left in these bytes: over its base, if the header names
    /// one still. That is never written to.
    pub fn recover(&self, left: Vec<u8>) -> std::result::Result<Vec<u8>, String> {
        if names_base(&left) {
            recover_overlay(left, self.base.content(), self.base_format)
        } else {
            recover(left, ImageFormat::Qcow2)
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
    recover_chain(bytes, ImageFormat::Qcow2, vec![(base, format)])
}

/// The content of an image over these, the last one the nearest.
fn recover_chain(
    bytes: Vec<u8>,
    format: ImageFormat,
    below: Vec<(Vec<u8>, ImageFormat)>,
) -> std::result::Result<Vec<u8>, String> {
    let sim = Sim::new(0);
    let config = Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() };
    let storage = SimDisk::new(&sim, config.clone(), bytes);
    let below = below
        .into_iter()
        .map(|(bytes, format)| (SimDisk::new(&sim, config.clone(), bytes), format));
    let below: Vec<_> = below.collect();
    let read = sim.block_on(async move {
        let mut behind: Option<Image<SimDisk>> = None;
        for (storage, format) in below {
            let image = Image::open(storage, format, read_only()).await?;
            behind = Some(match behind {
                Some(behind) => image.with_backing(&behind),
                None => image,
            });
        }
        let mut image = Image::open(storage, format, Options::default()).await?;
        if let Some(behind) = behind {
            image = image.with_backing(&behind);
        }
        crate::guests::read(&Disk::new(image)).await
    });
    read.map_err(|error| error.to_string())
}
