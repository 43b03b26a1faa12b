//! A refcount table that moves while durable writes are in flight: no crash finds its old place in
//! other use.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use blockhouse_core::{Buffer, Durability, Error, Fua, Request};
use blockhouse_disk::{Disk, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions, Qcow2, Switch};
use blockhouse_sim::{Config, Latency, Report, Rng, Sim, SimDisk, Size, for_seeds};

use crate::common::{Rig, write};

/// The first refcount table, of one cluster, counts 2 MiB of such an image.
fn small_tables(lazy: Switch) -> CreateOptions {
    CreateOptions {
        cluster_size: 512,
        refcount_bits: 64,
        lazy_refcounts: lazy,
        ..CreateOptions::new(4 << 20)
    }
}

const PIECE: u64 = 4096;
/// How many bytes are written, of which the first few make the table move.
const PAST_IT: u64 = 160 << 10;

fn table_place(storage: &SimDisk) -> Vec<u8> {
    storage.content()[48..56].to_vec()
}

fn fill(rig: &Rig, from: u64, to: u64) {
    for offset in (from..to).step_by(32 << 10) {
        let length = (to - offset).min(32 << 10) as usize;
        rig.submit(write(offset, length, 1, Durability::None)).unwrap();
    }
}

/// The end of the part of the disk that can be filled before the table moves.
fn before_the_move(image: &CreateOptions) -> u64 {
    let rig = Rig::qcow2(crate::common::steady(), image.clone());
    let first = table_place(&rig.storage);
    let mut filled = 0;
    while table_place(&rig.storage) == first {
        fill(&rig, filled, filled + (32 << 10));
        rig.submit(Request::Flush).unwrap();
        filled += 32 << 10;
    }
    filled - (64 << 10)
}

/// The image after a crash: no corruption, and all acknowledged writes.
fn judge(image: Vec<u8>, acknowledged: &[u64]) -> Result<(), String> {
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, Config::default(), image);
    let acknowledged = acknowledged.to_vec();
    sim.block_on(async move {
        let words = |error: Error| error.to_string();
        // Refcounts that are late are repaired.
        let opened = Qcow2::open(storage.clone(), qcow2::OpenOptions::default()).await;
        let report = qcow2::check(&opened.map_err(words)?).await.map_err(words)?;
        if report.corruptions > 0 {
            return Err(format!("{:?}", report.problems));
        }
        let disk =
            Disk::open(storage, ImageFormat::Qcow2, Options::default()).await.map_err(words)?;
        for offset in acknowledged {
            let mut buffer = Buffer::new(PIECE as usize);
            let into = buffer.lend();
            let read = Request::Read { offset, into };
            disk.submit(read).await.map_err(words)?;
            if buffer.bytes().iter().any(|&byte| byte != 2) {
                return Err(format!("what was acknowledged at {offset} is gone"));
            }
        }
        Ok(())
    })
}

/// Tasks that write durably, one piece after the other, past the move; crashes all the while.
fn explore(image: &CreateOptions, start: u64, seed: u64) -> Result<Report, String> {
    let mut random = Rng::with_seed(seed);
    let fua = if random.bool() { Fua::Native } else { Fua::Emulated };
    let latency = Latency { data: 1..=100, flush: 1..=300 };
    let config = Config { fua, latency, ..Config::default() };
    let rig = Rig::qcow2_by(random.u64(..), config, image.clone());
    let first = table_place(&rig.storage);
    let start = start - random.u64(..8) * PIECE;
    fill(&rig, 0, start);
    let next = Rc::new(Cell::new(start));
    let acknowledged = Rc::new(RefCell::new(Vec::new()));
    for _ in 0..6 {
        let (disk, next) = (Rc::clone(&rig.disk), Rc::clone(&next));
        let acknowledged = Rc::clone(&acknowledged);
        rig.sim.spawn(async move {
            while next.get() < start + PAST_IT {
                let offset = next.replace(next.get() + PIECE);
                disk.submit(write(offset, PIECE as usize, 2, Durability::Data)).await.unwrap();
                acknowledged.borrow_mut().push(offset);
            }
        });
    }
    let mut report = Report::default();
    while rig.sim.step() {
        if random.u8(..16) == 0 {
            report.crashes += 1;
            judge(rig.storage.crash(&mut random), &acknowledged.borrow())?;
        }
    }
    report.requests = acknowledged.borrow().len() as u64;
    if report.requests != PAST_IT / PIECE {
        return Err(format!("only {} writes came to an end", report.requests));
    }
    if table_place(&rig.storage) == first {
        return Err("the table did not move".into());
    }
    Ok(report)
}

#[test]
fn crash_at_every_stage_of_a_table_move() {
    let images = [Switch::On, Switch::Off].map(small_tables);
    let starts = images.each_ref().map(before_the_move);
    let test = "crash_at_every_stage_of_a_table_move";
    for_seeds(env!("CARGO_PKG_NAME"), test, 30, |seed| {
        let which = (seed % 2) as usize;
        explore(&images[which], starts[which], seed)
    });
}

/// The L1 table of a disk that grows moves on a device, whose end no write can pass. `spare`
/// clusters of it are free, the last one is in use or not.
fn grow_on_a_device(block: u32, spare: u64, has_end_in_use: bool) {
    const CLUSTER: u64 = 65_536;
    let sim = Sim::new(spare);
    let alignment = blockhouse_core::Alignment { offset: block, memory: 512 };
    let options = CreateOptions { cluster_size: CLUSTER, ..CreateOptions::new(4 << 20) };
    let file = SimDisk::new(&sim, Config::default(), Vec::new());
    let target = file.clone();
    sim.block_on(async move { qcow2::create(&target, &options).await }).expect("a new image");
    let mut content = file.content();
    content.resize(content.len() + ((65 + spare) * CLUSTER) as usize, 0xaa);
    let config = Config { alignment, size: Size::Fixed, ..Config::default() };
    let device = SimDisk::new(&sim, config, content);
    sim.block_on(async move {
        let disk =
            Disk::open(device.clone(), ImageFormat::Qcow2, Options::default()).await.unwrap();
        let pieces = if has_end_in_use { 0..64 } else { 0..8 };
        for piece in pieces.clone() {
            disk.submit(write(piece * CLUSTER, 512, 1, Durability::None)).await.expect("room");
        }
        // Each of 8,192 entries is for 512 MiB.
        disk.resize((8192 << 29) + 512).await.expect("room for an L1 table of two clusters");
        for piece in pieces {
            let mut buffer = Buffer::new(CLUSTER as usize);
            let read = Request::Read { offset: piece * CLUSTER, into: buffer.lend() };
            disk.submit(read).await.unwrap();
            assert!(buffer.bytes()[..512].iter().all(|&byte| byte == 1));
            assert!(buffer.bytes()[512..].iter().all(|&byte| byte == 0), "what the device held");
        }
        disk.close().await.unwrap();
        drop(disk);
        let image = Qcow2::open(device, qcow2::OpenOptions::default()).await.unwrap();
        let report = qcow2::check(&image).await.unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
    });
}

#[test]
fn an_l1_table_finds_room_on_a_device() {
    for block in [512, 4096, 8192, 65_536] {
        grow_on_a_device(block, 40, false);
        grow_on_a_device(block, 40, true);
        grow_on_a_device(block, 3, true);
    }
}
