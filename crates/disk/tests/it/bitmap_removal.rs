//! Crashes at every storage operation of a removal of a bitmap for which a transaction finds no
//! space: the image has all of the old bitmaps or all of the new, with their bits, and is never
//! corrupt.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_core::{Buffer, ByteRange, Durability, Request, Result, ToolProgress, errno};
use blockhouse_disk::{BitmapAction, Disk, NewBitmap, Options};
use blockhouse_format::qcow2::{self, CreateOptions, Qcow2};
use blockhouse_sim::{Config, Fault, OperationKind, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::crash_points::at_every_operation;
use crate::crashed::{open, plain_config};

const SIZE: u64 = 256 << 10;

/// Names, and where each bitmap says that the disk has changed.
type Bitmaps = Vec<(String, Vec<(u64, bool)>)>;

async fn opened(image: SimDisk) -> Result<Disk<SimDisk>> {
    open(image, None, None, Options::default()).await
}

async fn bitmaps_of(disk: &Disk<SimDisk>) -> Result<Bitmaps> {
    let mut found = Vec::new();
    for bitmap in disk.bitmaps().list().await? {
        let all = ByteRange::between(0, disk.size());
        let extents = disk.bitmaps().extents(&bitmap.name, all, usize::MAX).await?;
        let extents = extents.iter().map(|extent| (extent.length, extent.is_dirty)).collect();
        found.push((bitmap.name, extents));
    }
    // The one that is going to be removed may become the last before.
    found.sort();
    Ok(found)
}

/// An image with some bitmaps, which was closed.
async fn make(image: SimDisk, random: &mut Rng, block: u64) -> Result<Bitmaps> {
    let cluster_size = [512, 4096][random.usize(..2)].max(block);
    let options = CreateOptions { cluster_size, ..CreateOptions::new(SIZE) };
    qcow2::create_with(&image, None, &options, &ToolProgress::default()).await?;
    let disk = opened(image.clone()).await?;
    for number in 0..random.usize(1..5) {
        // Long names do not fit into a sector together.
        let name = number.to_string().repeat([1, 1, 1, 200][random.usize(..4)]);
        let granularity = Some([512, 4096][random.usize(..2)]);
        let new = NewBitmap { name, granularity, is_enabled: random.u8(..4) > 0 };
        disk.bitmaps().add(&new).await?;
        let (offset, durability) = (random.u64(..SIZE / 512) * 512, Durability::None);
        let from = Buffer::new(512).lend();
        disk.submit(Request::Write { offset, from, durability }).await?;
    }
    disk.close().await?;
    bitmaps_of(&opened(image).await?).await
}

/// The bitmaps that are left; or the reason why they cannot be read.
fn recover(image: Vec<u8>) -> Result<Bitmaps, String> {
    let sim = Sim::new(0);
    let image = SimDisk::new(&sim, plain_config(), image);
    sim.block_on(async move {
        let checked = Qcow2::open(image.clone(), qcow2::OpenOptions::default()).await;
        let checked = checked.map_err(|error| format!("cannot be opened: {error}"))?;
        let report = qcow2::check(&checked).await.map_err(|error| error.to_string())?;
        if report.corruptions > 0 {
            return Err(format!("corrupt: {:?}", report.problems));
        }
        let disk = opened(image).await.map_err(|error| error.to_string())?;
        bitmaps_of(&disk).await.map_err(|error| error.to_string())
    })
}

/// The offset of the refcount table, which a transaction moves.
fn refcount_table(image: &SimDisk) -> Vec<u8> {
    image.content()[48..56].to_vec()
}

static IN_PLACE: AtomicU64 = AtomicU64::new(0);

fn explore(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config::random(&mut random);
    let fresh = SimDisk::new(&sim, plain_config(), Vec::new());
    let (made, mut of_image) = (fresh.clone(), random.fork());
    let block = u64::from(config.alignment.offset);
    let old = sim.block_on(async move { make(made, &mut of_image, block).await });
    let old = old.map_err(|error| error.to_string())?;
    let mut new = old.clone();
    let (name, _) = new.remove(random.usize(..new.len()));
    let image = SimDisk::new(&sim, config, fresh.content());
    let disk = sim.block_on(opened(image.clone())).map_err(|error| error.to_string())?;
    let disk = Rc::new(disk);
    let table = refcount_table(&image);
    image.fail(Fault::nth(random.u64(..6), errno::ENOSPC).of(OperationKind::Write));
    let changed = Rc::clone(&disk);
    let task = sim
        .spawn(async move { changed.bitmaps().change(&name, BitmapAction::Remove).await.is_ok() });
    let judge = || match recover(image.crash(&mut random))? {
        found if found == old || found == new => Ok(()),
        found => Err(format!("from {old:?} to {new:?}, a crash left {found:?}")),
    };
    let (is_removed, crashes) = at_every_operation(&sim, &[&image], &task, judge)?;
    image.clear_faults();
    let wanted = if is_removed { &new } else { &old };
    let closed = Rc::clone(&disk);
    let closed = sim.spawn(async move { closed.close().await.map_err(|error| error.to_string()) });
    let is_in_place = is_removed && refcount_table(&image) == table;
    IN_PLACE.fetch_add(is_in_place.into(), Ordering::Relaxed);
    let judge = || match recover(image.crash(&mut random))? {
        found if found == *wanted || !is_removed => Ok(()),
        found => Err(format!("the removal of {wanted:?} was undone: {found:?}")),
    };
    let (outcome, more) = at_every_operation(&sim, &[&image], &closed, judge)?;
    if is_removed {
        outcome?;
        sim.run();
        check_leaks(image.content())?;
    }
    Ok(Report { crashes: crashes + more, ..Report::default() })
}

fn check_leaks(image: Vec<u8>) -> Result<(), String> {
    let sim = Sim::new(0);
    let image = SimDisk::new(&sim, plain_config(), image);
    let report = sim.block_on(async move {
        let image = Qcow2::open(image, qcow2::OpenOptions::default()).await?;
        qcow2::check(&image).await
    });
    match report.map_err(|error: blockhouse_core::Error| error.to_string())? {
        report if report.leaks > 0 => Err(format!("leaks: {:?}", report.problems)),
        _ => Ok(()),
    }
}

#[test]
fn crash_at_every_point_of_a_removal_without_space() {
    let test = "crash_at_every_point_of_a_removal_without_space";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 300, explore);
    let in_place = IN_PLACE.load(Ordering::Relaxed);
    eprintln!("{report:?}, {in_place} in place");
}
