//! Crashes at every storage operation of growing and shrinking: the disk has the old or the new
//! size, what it keeps is unchanged, what it gains reads as zeros, and no image is corrupt.

use std::iter;
use std::rc::Rc;

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Result, Storage, ToolProgress};
use blockhouse_disk::{Disk, NewBitmap, Options};
use blockhouse_format::qcow2::{
    self, Backing, CreateOptions, DataFile, Qcow2, SideFileHeader, Switch, Version,
};
use blockhouse_sim::{Config, Fault, OperationKind, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::crash_points::at_every_operation;
use crate::crashed::open;

const BASE: usize = 192 << 10;

fn plain() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

/// The files of a disk.
#[derive(Clone)]
struct Files<T> {
    image: T,
    /// The one with the guest's clusters.
    data: Option<T>,
    base: Option<T>,
}

impl Files<SimDisk> {
    /// Files with this content, of which only the first two can crash.
    fn with(sim: &Sim, config: &Config, content: Files<Vec<u8>>) -> Self {
        let disk = |content| SimDisk::new(sim, config.clone(), content);
        Self {
            image: disk(content.image),
            data: content.data.map(disk),
            base: content.base.map(|base| SimDisk::new(sim, plain(), base)),
        }
    }

    fn content(&self) -> Files<Vec<u8>> {
        self.each(SimDisk::content)
    }

    fn crash(&self, random: &mut Rng) -> Files<Vec<u8>> {
        self.each(|disk| disk.crash(random))
    }

    fn that_crash(&self) -> Vec<&SimDisk> {
        iter::once(&self.image).chain(&self.data).collect()
    }

    fn each<T>(&self, mut of: impl FnMut(&SimDisk) -> T) -> Files<T> {
        Files {
            image: of(&self.image),
            data: self.data.as_ref().map(&mut of),
            base: self.base.as_ref().map(&mut of),
        }
    }
}

async fn open_files(files: Files<SimDisk>) -> Result<Disk<SimDisk>> {
    open(files.image, files.base, files.data, Options::default()).await
}

async fn write(disk: &Disk<SimDisk>, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut buffer = Buffer::new(bytes.len());
    buffer.bytes_mut().copy_from_slice(bytes);
    let (from, durability) = (buffer.lend(), Durability::None);
    disk.submit(Request::Write { offset, from, durability }).await
}

async fn read(disk: &Disk<SimDisk>) -> Result<Vec<u8>> {
    let mut buffer = Buffer::new(disk.size() as usize);
    disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await?;
    Ok(buffer.bytes().to_vec())
}

fn any_options(block: u32, random: &mut Rng) -> CreateOptions {
    let is_v2 = random.u8(..4) == 0;
    let switch = |on| if on { Switch::On } else { Switch::Off };
    let cluster_size = [512, 4096, 16_384][random.usize(..3)].max(u64::from(block));
    let backing = Backing { name: b"base".to_vec(), format: Some("raw".into()) };
    let raw = switch(random.bool());
    let data_file = DataFile { name: b"data".to_vec(), raw };
    let data_file = (!is_v2 && random.u8(..3) == 0).then_some(data_file);
    let is_raw = data_file.as_ref().is_some_and(|file| file.raw == Switch::On);
    CreateOptions {
        cluster_size,
        version: if is_v2 { Version::V2 } else { Version::V3 },
        lazy_refcounts: switch(!is_v2 && random.u8(..4) == 0),
        extended_l2: switch(!is_v2 && cluster_size == 16_384 && random.bool()),
        backing: (!is_raw && random.bool()).then_some(backing),
        data_file,
        // Then it is a side file.
        identity: (is_raw && random.bool()).then_some([7; 16]),
        ..CreateOptions::new(any_size(random))
    }
}

fn any_size(random: &mut Rng) -> u64 {
    random.u64(1..=512) * 512
}

/// The disk that is left: its size and bytes; or the reason why it cannot be read.
fn recover(files: Files<Vec<u8>>) -> Result<Vec<u8>, String> {
    let sim = Sim::new(0);
    let files = Files::with(&sim, &plain(), files);
    sim.block_on(async move {
        let image = Qcow2::open(files.image.clone(), qcow2::OpenOptions::default()).await;
        let image = image.map_err(|error| format!("cannot be opened: {error}"))?;
        let report = qcow2::check(&image).await.map_err(|error| error.to_string())?;
        if report.corruptions > 0 {
            return Err(format!("corrupt: {:?}", report.problems));
        }
        if let Some(data) = &files.data {
            as_opening_does(&files.image, data).await?;
        }
        let disk = open_files(files).await.map_err(|error| error.to_string())?;
        read(&disk).await.map_err(|error| format!("cannot be read: {error}"))
    })
}

/// A raw disk has the size that its side file says, or the other one that it says, and is cut
/// then.
async fn as_opening_does(image: &SimDisk, data: &SimDisk) -> Result<(), String> {
    let side_file = SideFileHeader::read(image).await.map_err(|error| error.to_string())?;
    let Some(SideFileHeader { size, other_size, .. }) = side_file else { return Ok(()) };
    let has = data.size();
    let is_of = |size: u64| (size..size + 65_536).contains(&has);
    match (is_of(size), other_size.is_some_and(is_of)) {
        (true, _) => Ok(()),
        (false, true) => data.resize(size).await.map_err(|error| error.to_string()),
        (false, false) => {
            Err(format!("a raw disk of {has} bytes, and {size} or {other_size:?} in its side file"))
        }
    }
}

/// Whether these bytes may be what a crash leaves between the one disk and the other.
fn is_between(found: &[u8], old: &[u8], new: &[u8]) -> bool {
    let kept = old.len().min(new.len());
    found[..kept] == old[..kept] && (found.len() == old.len() || found == new)
}

/// Whether a data file reads as the disk. It may end with a block.
fn is_disk(data: &[u8], disk: &[u8]) -> bool {
    data.starts_with(disk) && data.len() < disk.len() + 65_536
}

fn explore(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config::random(&mut random);
    let options = any_options(config.alignment.offset, &mut random);
    let is_raw = options.data_file.as_ref().is_some_and(|file| file.raw == Switch::On);
    let is_side_file = options.identity.is_some();
    // The name of a backing file leaves no room for them in a header of 512 bytes.
    let has_room = options.cluster_size > 512 || options.backing.is_none();
    let has_bitmap = has_room && options.version == Version::V3 && random.u8(..3) == 0;
    let empty = Files {
        image: Vec::new(),
        data: options.data_file.is_some().then(Vec::new),
        base: options.backing.is_some().then(|| vec![0xbb; BASE]),
    };
    let fresh = Files::with(&sim, &plain(), empty);
    let target = fresh.clone();
    let parts: Vec<_> = (1..=random.u8(2..6))
        .map(|byte| (random.u64(..options.size / 512) * 512, random.usize(1..=32) * 512, byte))
        .collect();
    let old = sim.block_on(async move {
        qcow2::create_with(&target.image, target.data.as_ref(), &options, &ToolProgress::default())
            .await?;
        let disk = open_files(target).await?;
        for (offset, length, byte) in parts {
            let length = length.min((disk.size() - offset) as usize);
            write(&disk, offset, &vec![byte; length]).await?;
        }
        if has_bitmap || is_side_file {
            let new = NewBitmap { name: "changes".into(), granularity: None, is_enabled: true };
            disk.bitmaps().add(&new).await?;
        }
        let old = read(&disk).await?;
        disk.close().await?;
        Ok::<_, blockhouse_core::Error>(old)
    });
    let mut old = old.map_err(|error| error.to_string())?;
    let files = Files::with(&sim, &config, fresh.content());
    let opened = files.clone();
    let disk = sim.block_on(open_files(opened));
    let disk = Rc::new(disk.map_err(|error| error.to_string())?);
    let mut report = Report::default();
    for _ in 0..random.usize(1..=3) {
        let size = any_size(&mut random);
        let mut new = old.clone();
        new.resize(size as usize, 0);
        let resized = Rc::clone(&disk);
        let task = sim.spawn(async move {
            let outcome = if size < resized.size() {
                resized.shrink(size).await
            } else {
                resized.resize(size).await
            };
            outcome.map_err(|error| error.to_string())
        });
        let judge = || {
            let found = recover(files.crash(&mut random))?;
            if is_between(&found, &old, &new) {
                return Ok(());
            }
            let (old, new, found) = (old.len(), new.len(), found.len());
            Err(format!("from {old} to {new} bytes, a crash left {found} other ones"))
        };
        let (outcome, crashes) = at_every_operation(&sim, &files.that_crash(), &task, judge)?;
        report.crashes += crashes;
        outcome?;
        let found = recover(files.crash(&mut random))?;
        if found != new {
            return Err(format!("from {} to {} bytes: not what it is to be", old.len(), new.len()));
        }
        if is_raw && files.content().data.is_none_or(|data| !is_disk(&data, &new)) {
            return Err("the data file is not the raw disk".into());
        }
        old = new;
    }
    let closed = Rc::clone(&disk);
    let closed = sim.spawn(async move { closed.close().await.map_err(|error| error.to_string()) });
    let judge = || match recover(files.crash(&mut random))? {
        found if found == old => Ok(()),
        _ => Err("a crash while it was closed left another disk".to_owned()),
    };
    let (outcome, crashes) = at_every_operation(&sim, &files.that_crash(), &closed, judge)?;
    outcome?;
    report.crashes += crashes;
    if sim.step() {
        return Err("closing has left something to do".into());
    }
    let checked = files.image.clone();
    let left = sim.block_on(async move {
        let image = Qcow2::open(checked, qcow2::OpenOptions::default()).await?;
        qcow2::check(&image).await
    });
    match left.map_err(|error| error.to_string())? {
        left if left.leaks > 0 || left.corruptions > 0 => Err(format!("after closing: {left:?}")),
        left if files.image.content().len() as u64 > left.end => {
            Err(format!("after closing: {} bytes, {left:?}", files.image.content().len()))
        }
        _ => Ok(report),
    }
}

#[test]
fn crash_at_every_point_of_a_resize() {
    let report =
        for_seeds(env!("CARGO_PKG_NAME"), "crash_at_every_point_of_a_resize", 1000, explore);
    eprintln!("{report:?}");
}

#[test]
fn bitmaps_in_memory_follow_a_size_that_changes_although_the_data_file_is_not_cut() {
    const SIZE: u64 = 256 << 10;
    let sim = Sim::new(0);
    let files = Files { image: Vec::new(), data: Some(Vec::new()), base: None };
    let files = Files::with(&sim, &plain(), files);
    sim.block_on(async move {
        let data_file = Some(DataFile { name: b"data".to_vec(), raw: Switch::Off });
        let options = CreateOptions { data_file, ..CreateOptions::new(SIZE) };
        let data = files.data.as_ref().expect("a data file");
        let progress = ToolProgress::default();
        qcow2::create_with(&files.image, Some(data), &options, &progress).await.unwrap();
        let disk = open_files(files.clone()).await.unwrap();
        write(&disk, 0, &[1; SIZE as usize]).await.unwrap();
        let new = NewBitmap { name: "changes".into(), granularity: None, is_enabled: true };
        disk.bitmaps().add_transient(&new).await.unwrap();
        data.fail(Fault::nth(0, 5).of(OperationKind::Resize));
        disk.shrink(SIZE / 2).await.expect_err("the data file is not cut");
        assert_eq!(disk.size(), SIZE / 2);
        disk.resize(SIZE).await.unwrap();
        assert_eq!(read(&disk).await.unwrap()[SIZE as usize / 2..], [0; SIZE as usize / 2]);
        assert_eq!(disk.bitmaps().dirty_bytes("changes").await.unwrap(), SIZE / 2);
    });
}
