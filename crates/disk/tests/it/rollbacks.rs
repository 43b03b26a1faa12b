//! Rollbacks beside a flat array, with crashes at every operation: before the overlay is gone the
//! disk is the overlay, with all that was durable, whatever was prepared in the layer; afterwards
//! it is what it was at the fork. Bitmaps of the layer have all that differs.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{Durability, Result, Storage, WriteCache};
use blockhouse_disk::{Disk, Image, ImageFormat, NewBitmap, Options};
use blockhouse_sim::{Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::crash_points::at_every_operation;
use crate::forks::{Files, Promise, SECTOR, SIZE, flush, go_on, overlay, plain, read, recover};

const BITMAP: &str = "changes";

/// The image that is the disk, by the file system.
#[derive(Clone, Copy, Default, PartialEq)]
enum Top {
    #[default]
    Layer,
    First,
    /// Another overlay, after a rollback.
    Second,
}

struct World {
    /// The layer, and two overlays over it, one after the other.
    files: Files<3>,
    promise: RefCell<Promise>,
    top: RefCell<Top>,
    /// The disk's content when the bitmap was added to the layer, if it was.
    checkpoint: RefCell<Option<Vec<u8>>>,
}

async fn open_layer(world: &World) -> Result<Image<SimDisk>> {
    let layer = world.files.storages[0].clone();
    // As its overlays are.
    let durability = match layer.capabilities().write_cache {
        WriteCache::None => Durability::Data,
        WriteCache::Volatile => Durability::None,
    };
    let options = Options { durability, ..Options::default() };
    match world.files.format {
        ImageFormat::Raw => Image::raw(layer, options),
        format => Image::open(layer, format, options).await,
    }
}

async fn fork(world: &World, disk: &Disk<SimDisk>, into: usize, top: Top) -> Result<Promise> {
    let storage = &world.files.storages[into];
    let over = overlay(storage, world.files.format, world.files.cluster_size).await?;
    let over = Arc::new(over.over(disk.image()));
    *world.top.borrow_mut() = top;
    let replaced = disk.quiesced().await?.switch_to(over)?;
    let before = world.promise.borrow().clone();
    replaced.close_as_layer().await?;
    Ok(before)
}

async fn roll_back(world: &World, disk: &Disk<SimDisk>, before: &Promise) -> Result<()> {
    let lower = Arc::new(open_layer(world).await?);
    let quiesced = disk.quiesced().await?;
    quiesced.note_own_parts_in(&lower).await?;
    // The overlay's file is removed. The layer was made durable when it was left.
    *world.top.borrow_mut() = Top::Layer;
    let durable = before.now();
    world.promise.replace(Promise { durable, ..Promise::new() });
    // Never closed: it is no file.
    drop(quiesced.go_back_to(lower).await?);
    Ok(())
}

async fn use_disk(world: Rc<World>, mut random: Rng) -> Result<()> {
    let disk = Arc::new(Disk::new(open_layer(&world).await?));
    go_on(&disk, &world.promise, &mut random).await?;
    if world.files.format == ImageFormat::Qcow2 && random.bool() {
        let granularity = Some(SECTOR);
        let new = NewBitmap { name: BITMAP.into(), granularity, is_enabled: true };
        flush(&disk, &world.promise).await?;
        let now = world.promise.borrow().now();
        disk.bitmaps().add(&new).await?;
        world.checkpoint.replace(Some(now));
    }
    go_on(&disk, &world.promise, &mut random).await?;
    let before = fork(&world, &disk, 1, Top::First).await?;
    go_on(&disk, &world.promise, &mut random).await?;
    roll_back(&world, &disk, &before).await?;
    assert!(read(&disk).await? == world.promise.borrow().now(), "it is not what it was");
    for _ in 0..2 {
        go_on(&disk, &world.promise, &mut random).await?;
    }
    let before = fork(&world, &disk, 2, Top::Second).await?;
    go_on(&disk, &world.promise, &mut random).await?;
    if random.bool() {
        roll_back(&world, &disk, &before).await?;
        go_on(&disk, &world.promise, &mut random).await?;
    }
    flush(&disk, &world.promise).await?;
    disk.close().await
}

/// Of the layer as it was found, where it is the disk: whether its bitmap lacks what has changed.
fn check_bitmap(layer: Vec<u8>, checkpoint: &[u8], now: &[u8]) -> Result<(), String> {
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain(), layer);
    let dirty = sim.block_on(async move {
        let disk = Disk::open(storage, ImageFormat::Qcow2, Options::default()).await?;
        if disk.bitmaps().list().await?.iter().any(|bitmap| bitmap.name == BITMAP) {
            disk.bitmaps().copy(BITMAP, SECTOR).await.map(Some)
        } else {
            Ok(None)
        }
    });
    let Some(dirty) = dirty.map_err(|error| error.to_string())? else {
        return Err("the bitmap is gone".into());
    };
    let differs = |at: &usize| now[*at] != checkpoint[*at];
    let is_missing = |at: &usize| !dirty.is_dirty(crate::common::span(*at as u64, 1));
    match (0..SIZE).filter(differs).find(is_missing) {
        Some(at) => Err(format!("byte {at} has changed, and the bitmap does not say so")),
        None => Ok(()),
    }
}

fn rollback(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let files = Files::random(&sim, &mut random).map_err(|error| error.to_string())?;
    let promise = RefCell::new(Promise::new());
    let (top, checkpoint) = Default::default();
    let world = Rc::new(World { files, promise, top, checkpoint });
    let task = sim.spawn(use_disk(Rc::clone(&world), random.fork()));
    let mut crash = || {
        let [layer, first, second] =
            world.files.storages.each_ref().map(|storage| storage.crash(&mut random));
        let top = *world.top.borrow();
        let mut images = vec![(layer.clone(), world.files.format)];
        match top {
            Top::Layer => {}
            Top::First => images.push((first, ImageFormat::Qcow2)),
            Top::Second => images.push((second, ImageFormat::Qcow2)),
        }
        let found = recover(images)?;
        world.promise.borrow().check(&found)?;
        match (&*world.checkpoint.borrow(), top) {
            (Some(checkpoint), Top::Layer) => check_bitmap(layer, checkpoint, &found),
            _ => Ok(()),
        }
    };
    let disks = world.files.storages.each_ref();
    let (outcome, crashes) = at_every_operation(&sim, &disks, &task, &mut crash)?;
    outcome.map_err(|error| error.to_string())?;
    crash()?;
    Ok(Report { crashes, ..Report::default() })
}

#[test]
fn crash_at_every_point_of_rollbacks() {
    let name = "crash_at_every_point_of_rollbacks";
    let report = for_seeds(env!("CARGO_PKG_NAME"), name, 20, rollback);
    eprintln!("{report:?}");
}
