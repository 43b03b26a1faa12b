//! Crashes at every storage operation of a commit, of a rebase and of a change of options: the
//! overlay reads as before, over whatever backing file its header names, and has the old options or
//! the new ones.

use blockhouse_core::ByteRange;
use blockhouse_core::{
    Alignment, Buffer, Durability, ErrorKind, Fallback, Fua, Request, Result, ToolProgress, Unmap,
};
use blockhouse_disk::{
    Access, AfterCommit, Amendments, Backing, Compress, Disk, Image, ImageFormat, Options, amend,
    commit_overlay, prepare_rebase, set_backing_file,
};
use blockhouse_format::qcow2::{self, CreateOptions, Qcow2, Switch, Version};
use blockhouse_sim::{Config, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::crash_points::at_every_operation;

fn plain() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

const READ_ONLY: Options = Options {
    access: Access::ReadOnly,
    durability: Durability::None,
    flush: blockhouse_disk::FlushPolicy::Honor,
    discard: blockhouse_disk::Discard::Unmap,
    detect_zeroes: blockhouse_disk::DetectZeroes::Off,
    copy_on_read: false,
    bitmap_activity: blockhouse_disk::BitmapActivity::DEFAULT,
    block_sizes: blockhouse_disk::BlockSizes::OF_IMAGE,
    on_full: blockhouse_disk::OnFull::Report,
    is_inactive: false,
    compress: false,
};

async fn read(disk: &Disk<SimDisk>) -> Result<Vec<u8>> {
    let mut buffer = Buffer::new(disk.size() as usize);
    disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await?;
    Ok(buffer.bytes().to_vec())
}

async fn fill(disk: &Disk<SimDisk>, random: &mut Rng) -> Result<()> {
    for byte in 1..=random.u8(2..8) {
        let sectors = disk.size() / 512;
        let start = random.u64(..sectors);
        let length = random.u64(1..=64).min(sectors - start) * 512;
        let range = ByteRange::between(start * 512, start * 512 + length);
        let durability = Durability::None;
        if random.u8(..4) == 0 {
            let (unmap, fallback) = (Unmap::Allowed, Fallback::Allowed);
            disk.submit(Request::WriteZeroes { range, unmap, fallback, durability }).await?;
            continue;
        }
        let mut buffer = Buffer::new(length as usize);
        buffer.bytes_mut().fill(byte);
        let (offset, from) = (range.offset(), buffer.lend());
        disk.submit(Request::Write { offset, from, durability }).await?;
    }
    Ok(())
}

/// The name of the backing file, as long as it is wanted.
fn named(letter: u8, length: usize) -> Backing {
    Backing { name: vec![letter; length], format: Some("raw".into()) }
}

/// An overlay and two raw bases.
struct Case {
    overlay: Vec<u8>,
    old: Vec<u8>,
    new: Vec<u8>,
    content: Vec<u8>,
}

fn case(block: u32, random: &mut Rng) -> Result<Case> {
    let sizes = [512.max(u64::from(block)), 4096, 16_384];
    let is_v2 = random.u8(..4) == 0;
    let options = CreateOptions {
        cluster_size: sizes[random.usize(..3)].max(block.into()),
        version: if is_v2 { Version::V2 } else { Version::V3 },
        lazy_refcounts: if !is_v2 && random.u8(..4) == 0 { Switch::On } else { Switch::Off },
        backing: Some(named(b'a', random.usize(1..60))),
        ..CreateOptions::new(random.u64(1..=256) * 512)
    };
    let base = |byte: u8, random: &mut Rng| {
        let mut bytes = vec![byte; random.usize(1..=256) * 512];
        bytes[..512].fill(0xcc);
        bytes
    };
    let (old, new) = (base(0xaa, random), base(0xbb, random));
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain(), Vec::new());
    let behind = SimDisk::new(&sim, plain(), old.clone());
    let target = storage.clone();
    let mut random = random.fork();
    let content = sim.block_on(async move {
        qcow2::create(&target, &options).await?;
        let image = Image::open(target, ImageFormat::Qcow2, Options::default()).await?;
        let disk = Disk::new(image.with_backing(&Image::raw(behind, READ_ONLY)?));
        fill(&disk, &mut random).await?;
        let content = read(&disk).await?;
        disk.close().await?;
        Ok::<_, blockhouse_core::Error>(content)
    })?;
    Ok(Case { overlay: storage.content(), old, new, content })
}

/// The overlay's bytes, over the base that it names.
fn recover(overlay: Vec<u8>, old: &[u8], new: &[u8]) -> Result<Vec<u8>, String> {
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain(), overlay);
    let [old, new] = [old, new].map(|base| SimDisk::new(&sim, plain(), base.to_vec()));
    let recovered = sim.block_on(async move {
        let image = Qcow2::open(storage.clone(), qcow2::OpenOptions::default()).await?;
        let report = qcow2::check(&image).await?;
        let image = Image::open(storage, ImageFormat::Qcow2, Options::default()).await?;
        let image = match image.backing_file().map(|backing| backing.name[0]) {
            Some(b'a') => image.with_backing(&Image::raw(old, READ_ONLY)?),
            Some(_) => image.with_backing(&Image::raw(new, READ_ONLY)?),
            None => image,
        };
        Ok::<_, blockhouse_core::Error>((report, read(&Disk::new(image)).await?))
    });
    match recovered.map_err(|error| error.to_string())? {
        (report, _) if report.corruptions > 0 => Err(format!("corrupt: {:?}", report.problems)),
        (_, content) => Ok(content),
    }
}

/// Runs `work` and looks at what crashes leave of both disks.
fn with_crashes(
    sim: &Sim,
    disks: [&SimDisk; 2],
    work: impl Future<Output = Result<()>> + 'static,
    random: &mut Rng,
    judge: impl Fn(Vec<u8>, Vec<u8>) -> Result<(), String>,
) -> Result<Report, String> {
    let task = sim.spawn(work);
    let mut crash = || judge(disks[0].crash(random), disks[1].crash(random));
    let (outcome, crashes) = at_every_operation(sim, &disks, &task, &mut crash)?;
    outcome.map_err(|error| error.to_string())?;
    crash()?;
    Ok(Report { crashes, ..Report::default() })
}

fn commit(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config::random(&mut random);
    let case = case(config.alignment.offset, &mut random).map_err(|error| error.to_string())?;
    let overlay = SimDisk::new(&sim, config, case.overlay);
    let base = SimDisk::new(&sim, plain(), case.old);
    let (target, behind) = (overlay.clone(), base.clone());
    let work = async move {
        let base = Disk::raw(behind, Options::default())?;
        let image = Image::open(target, ImageFormat::Qcow2, Options::default()).await?;
        let disk = Disk::new(image.with_backing(base.image()));
        commit_overlay(&disk, &base, AfterCommit::Empty, &ToolProgress::default()).await?;
        disk.close().await
    };
    let content = case.content.clone();
    let report =
        with_crashes(
            &sim,
            [&overlay, &base],
            work,
            &mut random,
            move |overlay, base| match recover(overlay, &base, &[])? {
                found if found == content => Ok(()),
                _ => Err("a crash changed the disk".into()),
            },
        )?;
    let base = base.content();
    let length = case.content.len();
    if base[..length] != case.content {
        return Err("the base does not have everything".into());
    }
    // Nothing is left in the overlay: over another base it reads as that.
    let other = vec![0x77; length];
    if recover(overlay.content(), &other, &[])? != other {
        return Err("the overlay is not empty".into());
    }
    Ok(report)
}

fn rebase(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config::random(&mut random);
    let case = case(config.alignment.offset, &mut random).map_err(|error| error.to_string())?;
    let overlay = SimDisk::new(&sim, config, case.overlay);
    let [old, new] = [&case.old, &case.new].map(|base| SimDisk::new(&sim, plain(), base.clone()));
    let target = overlay.clone();
    let backing = (random.u8(..4) > 0).then(|| named(b'b', random.usize(1..300)));
    let idle = old.clone();
    let work = async move {
        let image = Image::open(target, ImageFormat::Qcow2, Options::default()).await?;
        let disk = Disk::new(image.with_backing(&Image::raw(old, READ_ONLY)?));
        let new = Disk::raw(new, READ_ONLY)?;
        prepare_rebase(
            &disk,
            backing.as_ref().map(|_| &new),
            Compress::Nothing,
            &ToolProgress::default(),
        )
        .await?;
        set_backing_file(&disk, backing).await?;
        disk.close().await
    };
    with_crashes(&sim, [&overlay, &idle], work, &mut random, |overlay, _| {
        match recover(overlay, &case.old, &case.new)? {
            found if found == case.content => Ok(()),
            _ => Err("a crash changed the disk".into()),
        }
    })
}

#[test]
fn crash_at_every_point_of_a_commit() {
    let report = for_seeds(env!("CARGO_PKG_NAME"), "crash_at_every_point_of_a_commit", 400, commit);
    eprintln!("{report:?}");
}

#[test]
fn crash_at_every_point_of_a_rebase() {
    let report = for_seeds(env!("CARGO_PKG_NAME"), "crash_at_every_point_of_a_rebase", 400, rebase);
    eprintln!("{report:?}");
}

/// The image with a snapshot, sometimes.
fn with_snapshot(image: Vec<u8>, random: &mut Rng) -> Result<Vec<u8>> {
    if random.bool() {
        return Ok(image);
    }
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain(), image);
    let target = storage.clone();
    sim.block_on(async move {
        let disk = Disk::open(target, ImageFormat::Qcow2, Options::default()).await?;
        disk.snapshots().create("before").await?;
        disk.close().await
    })?;
    Ok(storage.content())
}

/// The version of an image, and whether its refcounts may be written late.
fn options_of(image: Vec<u8>) -> Result<(Version, Switch), String> {
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain(), image);
    let options = qcow2::OpenOptions { access: Access::ReadOnly, ..Default::default() };
    let image = sim.block_on(Qcow2::open(storage, options)).map_err(|error| error.to_string())?;
    let features = image.header().features();
    Ok((features.version, features.lazy_refcounts))
}

fn change_options(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config::random(&mut random);
    let case = case(config.alignment.offset, &mut random).map_err(|error| error.to_string())?;
    let image = with_snapshot(case.overlay, &mut random).map_err(|error| error.to_string())?;
    let before = options_of(image.clone())?;
    let overlay = SimDisk::new(&sim, config, image);
    let idle = SimDisk::new(&sim, plain(), case.old.clone());
    let target = overlay.clone();
    let wanted = match random.usize(..3) {
        0 => (Version::V3, Switch::On),
        1 => (Version::V3, Switch::Off),
        _ => (Version::V2, Switch::Off),
    };
    let changes = Amendments { version: Some(wanted.0), lazy_refcounts: Some(wanted.1) };
    let work = async move {
        let disk = Disk::open(target, ImageFormat::Qcow2, Options::default()).await?;
        match amend(&disk, changes).await {
            // All of the header is in one sector, and the name of the backing file may take the
            // rest of it.
            Err(error)
                if error.kind() == ErrorKind::InvalidInput
                    && disk.image().cluster_size() == Some(512) => {}
            outcome => {
                outcome?;
                let features = disk.image().features().expect("it has a header");
                assert_eq!((features.version, features.lazy_refcounts), wanted);
            }
        }
        disk.close().await
    };
    let report = with_crashes(&sim, [&overlay, &idle], work, &mut random, |overlay, _| {
        let found = options_of(overlay.clone())?;
        if found != before && found != wanted {
            return Err(format!("{found:?} is neither what it was nor what it is to be"));
        }
        match recover(overlay, &case.old, &case.new)? {
            found if found == case.content => Ok(()),
            _ => Err("a crash changed the disk".into()),
        }
    })?;
    Ok(report)
}

#[test]
fn crash_at_every_point_of_a_change_of_options() {
    let test = "crash_at_every_point_of_a_change_of_options";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 400, change_options);
    eprintln!("{report:?}");
}
