//! Images of every layout, with a guest's bytes in them.

use std::sync::atomic::AtomicU64;

use blockhouse_core::{
    Alignment, Buffer, Durability, Fua, Request, Result, StateMemory, ToolProgress,
};
use blockhouse_disk::{
    Access, CompressResult, DetectZeroes, Discard, Disk, Image, ImageFormat, Options,
};
use blockhouse_format::qcow2::{self, Backing, CreateOptions, DataFile, Switch, Version};
use blockhouse_sim::{Config, Devices, Growth, Rng, Sim, SimDisk, Workload};

/// The storage below an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Below {
    Nothing,
    Raw,
    /// Another qcow2 image over a raw one.
    Chain,
}

/// How an image is made, and how it is used.
#[derive(Clone, Debug)]
pub struct Layout {
    pub format: ImageFormat,
    cluster_size: u64,
    version: Version,
    refcount_bits: u32,
    lazy_refcounts: Switch,
    extended_l2: Switch,
    data_file: Option<Switch>,
    below: Below,
    /// How many snapshots it has at first.
    snapshots: u32,
    /// Whether clusters are written in compressed form, at first and later.
    pub compresses: bool,
    devices: Devices,
    options: Options,
}

/// Content of the raw image at the end of the chain, and of the one over it.
#[derive(Clone, Debug, Default)]
pub struct BackingImages {
    raw: Option<Vec<u8>>,
    qcow2: Option<Vec<u8>>,
}

/// The content of all images of a disk.
pub struct Images {
    pub image: Vec<u8>,
    pub data: Option<Vec<u8>>,
    pub backing: BackingImages,
}

/// A storage without faults, for making and judging images.
pub fn plain_config() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

const READ_ONLY: Options = Options {
    access: Access::ReadOnly,
    durability: Durability::None,
    flush: blockhouse_disk::FlushPolicy::Honor,
    discard: Discard::Unmap,
    detect_zeroes: DetectZeroes::Off,
    copy_on_read: false,
    bitmap_activity: blockhouse_disk::BitmapActivity::DEFAULT,
    block_sizes: blockhouse_disk::BlockSizes::OF_IMAGE,
    on_full: blockhouse_disk::OnFull::Report,
    is_inactive: false,
    compress: false,
};

fn switch(is_on: bool) -> Switch {
    if is_on { Switch::On } else { Switch::Off }
}

fn options(random: &mut Rng) -> Options {
    Options {
        durability: if random.u8(..4) == 0 { Durability::Data } else { Durability::None },
        discard: if random.u8(..4) == 0 { Discard::Ignore } else { Discard::Unmap },
        detect_zeroes: [
            DetectZeroes::Off,
            DetectZeroes::Off,
            DetectZeroes::On,
            DetectZeroes::Unmap,
        ][random.usize(..4)],
        ..Options::default()
    }
}

impl Layout {
    /// A raw image.
    pub fn raw(random: &mut Rng) -> Self {
        Self {
            format: ImageFormat::Raw,
            cluster_size: 512,
            version: Version::V3,
            refcount_bits: 16,
            lazy_refcounts: Switch::Off,
            extended_l2: Switch::Off,
            data_file: None,
            below: Below::Nothing,
            snapshots: 0,
            compresses: false,
            devices: Devices::Never,
            options: options(random),
        }
    }

    /// A qcow2 image of any layout.
    pub fn qcow2(random: &mut Rng) -> Self {
        let is_old = random.u8(..5) == 0;
        let cluster_size = [512, 4096, 4096, 4096, 16_384, 65_536][random.usize(..6)];
        let is_extended = !is_old && cluster_size >= 16_384 && random.bool();
        let data_file = (!is_old && random.u8(..4) == 0).then(|| switch(random.bool()));
        let below = match random.u8(..6) {
            _ if data_file == Some(Switch::On) => Below::Nothing,
            0 | 1 => Below::Raw,
            2 => Below::Chain,
            _ => Below::Nothing,
        };
        let refcount_bits = if is_old { 16 } else { [1, 16, 16, 64][random.usize(..4)] };
        let can_share = data_file.is_none() && refcount_bits > 1;
        Self {
            format: ImageFormat::Qcow2,
            cluster_size,
            version: if is_old { Version::V2 } else { Version::V3 },
            refcount_bits,
            lazy_refcounts: switch(!is_old && random.u8(..4) == 0),
            extended_l2: switch(is_extended),
            data_file,
            below,
            snapshots: if can_share && random.u8(..3) == 0 { random.u32(1..=2) } else { 0 },
            compresses: data_file.is_none() && random.u8(..4) == 0,
            devices: Devices::Never,
            options: options(random),
        }
    }

    /// A qcow2 image of any layout on a block device, with refcount blocks for few clusters.
    pub fn qcow2_on_device(random: &mut Rng) -> Self {
        let layout = Self::qcow2(random);
        let is_new = layout.version == Version::V3;
        Self {
            devices: Devices::Always,
            cluster_size: [512, 4096][random.usize(..2)],
            extended_l2: Switch::Off,
            refcount_bits: if is_new && layout.refcount_bits > 1 {
                64
            } else {
                layout.refcount_bits
            },
            ..layout
        }
    }

    /// A workload with some clusters, few enough to meet again and again.
    pub fn workload(&self) -> Workload {
        let sectors = match self.cluster_size {
            512 if self.devices == Devices::Always => 80,
            512 => 40,
            4096 => 100,
            _ => 5 * self.cluster_size as usize / 512,
        };
        // Snapshots of version 2 do not say how long the disk was: it cannot grow then.
        let growth = if self.version == Version::V2 { Growth::Never } else { Growth::Sometimes };
        let devices = self.devices;
        Workload { sectors: sectors.min(400), growth, devices, ..Workload::default() }
    }

    pub fn min_durability(&self) -> Durability {
        self.options.durability
    }

    /// Bytes of a cluster that the guest may write compressed.
    pub fn cluster_size(&self, block: u32) -> u64 {
        self.cluster_size.max(u64::from(block))
    }

    fn create_options(&self, size: u64, block: u32) -> CreateOptions {
        let format = if self.below == Below::Chain { "qcow2" } else { "raw" };
        let backing = Backing { name: b"base".to_vec(), format: Some(format.into()) };
        CreateOptions {
            cluster_size: self.cluster_size(block),
            refcount_bits: self.refcount_bits,
            version: self.version,
            lazy_refcounts: self.lazy_refcounts,
            extended_l2: self.extended_l2,
            backing: (self.below != Below::Nothing).then_some(backing),
            data_file: self.data_file.map(|raw| DataFile { name: b"data".to_vec(), raw }),
            ..CreateOptions::new(size)
        }
    }

    /// The images of a disk with this content, on storages with blocks of `block` bytes.
    pub fn images(&self, content: &[u8], block: u32, random: &mut Rng) -> Images {
        if self.format == ImageFormat::Raw {
            let backing = BackingImages::default();
            return Images { image: content.to_vec(), data: None, backing };
        }
        let backing = self.backing_images(content, random);
        let sim = Sim::new(random.u64(..));
        let storage = SimDisk::new(&sim, plain_config(), Vec::new());
        let data = self.data_file.map(|_| SimDisk::new(&sim, plain_config(), Vec::new()));
        let options = self.create_options(content.len() as u64, block);
        let (target, target_data) = (storage.clone(), data.clone());
        let (layout, base, content) = (self.clone(), backing.clone(), content.to_vec());
        let made_in = sim.clone();
        let mut random = random.fork();
        sim.block_on(async move {
            let created = qcow2::create_with(
                &target,
                target_data.as_ref(),
                &options,
                &ToolProgress::default(),
            )
            .await;
            created.expect("a new image");
            let disk = layout.open(&made_in, target, target_data, &base, |disk| disk).await;
            let disk = disk.expect("the new image");
            layout.fill(&disk, &content, &mut random).await.expect("room");
            disk.close().await.expect("no failure");
        });
        Images { image: storage.content(), data: data.map(|data| data.content()), backing }
    }

    /// Images that hold the content, or a part of it where the one over them has the rest.
    fn backing_images(&self, content: &[u8], random: &mut Rng) -> BackingImages {
        let mut raw = content.to_vec();
        if self.below == Below::Nothing {
            return BackingImages::default();
        }
        if random.bool() {
            // Shorter than the disk: zeros follow, unless the image itself has the rest.
            raw.truncate(random.usize(1..=raw.len() / 512) * 512);
        }
        if self.below == Below::Raw {
            return BackingImages { raw: Some(raw), qcow2: None };
        }
        let sim = Sim::new(random.u64(..));
        let storage = SimDisk::new(&sim, plain_config(), Vec::new());
        let target = storage.clone();
        let backing = Some(Backing { name: b"raw".to_vec(), format: Some("raw".into()) });
        let options =
            CreateOptions { cluster_size: 4096, backing, ..CreateOptions::new(raw.len() as u64) };
        let middle = random.usize(..raw.len() / 512) * 512;
        let upper = raw[middle..].to_vec();
        raw[middle..].fill(0xee);
        let below = SimDisk::new(&sim, plain_config(), raw.clone());
        sim.block_on(async move {
            qcow2::create(&target, &options).await.expect("a new image");
            let image = Image::open(target, ImageFormat::Qcow2, Options::default()).await;
            let below = Image::raw(below, READ_ONLY).expect("whole sectors");
            let disk = Disk::new(image.expect("the new image").with_backing(&below));
            write(&disk, middle as u64, &upper).await.expect("room");
            disk.close().await.expect("no failure");
        });
        BackingImages { raw: Some(raw), qcow2: Some(storage.content()) }
    }

    /// Makes the disk read as `content`, with snapshots on the way.
    async fn fill(&self, disk: &Disk<SimDisk>, content: &[u8], random: &mut Rng) -> Result<()> {
        let found = read_all(disk).await?;
        let unit = disk.image().cluster_size().expect("qcow2") as usize;
        for (index, bytes) in content.chunks(unit).enumerate() {
            let start = index * unit;
            if found[start..start + bytes.len()] == *bytes && random.u8(..4) > 0 {
                continue;
            }
            let is_compressed = self.compresses
                && random.bool()
                && disk.write_compressed(start as u64, bytes).await? == CompressResult::Compressed;
            if !is_compressed {
                write(disk, start as u64, bytes).await?;
            }
        }
        for number in 0..self.snapshots {
            disk.snapshots().create(&format!("first{number}")).await?;
            let sectors = content.len() / 512;
            let (start, count) = (random.usize(..sectors), random.usize(1..=16));
            let end = (start + count).min(sectors);
            write(disk, start as u64 * 512, &content[start * 512..end * 512]).await?;
        }
        Ok(())
    }

    /// Opens the disk over its images; `wrap` stands between the disk and each storage that can
    /// crash.
    pub async fn open(
        &self,
        sim: &Sim,
        storage: SimDisk,
        data: Option<SimDisk>,
        backing: &BackingImages,
        wrap: impl Fn(SimDisk) -> SimDisk,
    ) -> Result<Disk<SimDisk>> {
        let nothing = Vec::<AtomicU64>::new();
        self.open_before_replay(sim, (storage, data), backing, wrap, &nothing).await
    }

    /// As [`open`](Self::open), for a replay of `log`.
    pub async fn open_before_replay(
        &self,
        sim: &Sim,
        (storage, data): (SimDisk, Option<SimDisk>),
        backing: &BackingImages,
        wrap: impl Fn(SimDisk) -> SimDisk,
        log: &dyn StateMemory,
    ) -> Result<Disk<SimDisk>> {
        if self.format == ImageFormat::Raw {
            return Disk::raw(wrap(storage), self.options);
        }
        let (format, storage) = (ImageFormat::Qcow2, wrap(storage));
        let image = Image::open_before_replay(storage, format, self.options, log).await?;
        let image = match data {
            Some(data) => image.with_data(wrap(data))?,
            None => image,
        };
        let below = |content: &Vec<u8>| wrap(SimDisk::new(sim, plain_config(), content.clone()));
        let raw = backing.raw.as_ref().map(|raw| Image::raw(below(raw), READ_ONLY)).transpose()?;
        let Some(raw) = raw else { return Ok(Disk::new(image)) };
        let base = match &backing.qcow2 {
            Some(qcow2) => {
                Image::open(below(qcow2), ImageFormat::Qcow2, READ_ONLY).await?.with_backing(&raw)
            }
            None => raw,
        };
        Ok(Disk::new(image.with_backing(&base)))
    }
}

pub async fn read_all(disk: &Disk<SimDisk>) -> Result<Vec<u8>> {
    let mut buffer = Buffer::new(disk.size() as usize);
    disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await?;
    Ok(buffer.bytes().to_vec())
}

async fn write(disk: &Disk<SimDisk>, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut buffer = Buffer::new(bytes.len());
    buffer.bytes_mut().copy_from_slice(bytes);
    let (from, durability) = (buffer.lend(), Durability::None);
    disk.submit(Request::Write { offset, from, durability }).await
}
