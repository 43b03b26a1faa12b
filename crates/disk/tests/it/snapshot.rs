//! Snapshots of a disk that guests are writing to: each holds what had completed and nothing that
//! began later, every write as a whole.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use blockhouse_core::{Alignment, Buffer, ByteRange, Durability, Fua, Request, errno};
use blockhouse_disk::{BlockStatus, BlockStatusCache, Disk, Image, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions, Preallocation, Qcow2};
use blockhouse_sim::{Config, Fault, OperationKind, Report, Rng, Sim, SimDisk, for_seeds};

const SIZE: u64 = 256 << 10;
const BLOCK: u64 = 4096;

/// When a write to each block began and ended, by the number that it wrote.
#[derive(Clone, Copy, Debug)]
struct Written {
    first: u64,
    count: u64,
    number: u64,
    began: Duration,
    ended: Option<Duration>,
}

/// A snapshot and when it was taken.
#[derive(Clone, Debug)]
struct Taken {
    name: String,
    began: Duration,
    ended: Duration,
}

fn plain() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

fn new_image(random: &mut Rng, block: u64) -> Vec<u8> {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, plain(), Vec::new());
    let cluster_size = [4096_u64, 16_384][random.usize(..2)].max(block);
    let made = disk.clone();
    let options = CreateOptions { cluster_size, ..CreateOptions::new(SIZE) };
    sim.block_on(async move { qcow2::create(&made, &options).await }).expect("a new image");
    disk.content()
}

async fn write_some(
    sim: Sim,
    disk: Rc<Disk<SimDisk>>,
    log: Rc<RefCell<Vec<Written>>>,
    mut random: Rng,
) {
    for _ in 0..random.usize(1..30) {
        let first = random.u64(..SIZE / BLOCK);
        let count = random.u64(1..=6).min(SIZE / BLOCK - first);
        let number = log.borrow().len() as u64 + 1;
        let began = sim.clock().now();
        log.borrow_mut().push(Written { first, count, number, began, ended: None });
        let mut buffer = Buffer::new((count * BLOCK) as usize);
        for word in buffer.bytes_mut().chunks_exact_mut(8) {
            word.copy_from_slice(&number.to_be_bytes());
        }
        let durability = [Durability::None, Durability::Data][random.usize(..2)];
        let from = buffer.lend();
        let write = Request::Write { offset: first * BLOCK, from, durability };
        disk.submit(write).await.expect("no faults");
        log.borrow_mut()[number as usize - 1].ended = Some(sim.clock().now());
    }
}

/// The number that each block holds.
async fn numbers(disk: &Disk<SimDisk>) -> Vec<u64> {
    let mut buffer = Buffer::new(SIZE as usize);
    disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await.expect("a good disk");
    let blocks = buffer.bytes().chunks_exact(BLOCK as usize);
    let number = |block: &[u8]| {
        assert!(block.chunks_exact(8).all(|word| *word == block[..8]), "a torn block");
        u64::from_be_bytes(block[..8].try_into().expect("eight bytes"))
    };
    blocks.map(number).collect()
}

/// Whether a snapshot may hold these numbers.
fn judge(taken: &Taken, found: &[u64], log: &[Written]) -> Result<(), String> {
    for (block, &number) in (0..).zip(found) {
        let touches = |one: &&Written| (one.first..one.first + one.count).contains(&block);
        if number > 0 {
            let one = &log[number as usize - 1];
            if one.began > taken.ended {
                return Err(format!("{taken:?} holds the later {one:?}"));
            }
        }
        // Nothing that had ended, and was not written over since, may be missing.
        let ended = |one: &&Written| one.ended.is_some_and(|ended| ended < taken.began);
        for lost in log.iter().filter(touches).filter(ended) {
            let began_after = |one: &Written| one.ended.is_none_or(|end| end >= lost.began);
            let is_newer = number > 0 && began_after(&log[number as usize - 1]);
            if number != lost.number && !is_newer {
                return Err(format!("{taken:?} has lost {lost:?} in block {block}"));
            }
        }
    }
    Ok(())
}

fn snapshots_beside_writes(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config::random(&mut random);
    let content = new_image(&mut random, config.alignment.offset.into());
    let storage = SimDisk::new(&sim, config, content);
    let opened = storage.clone();
    let disk = sim
        .block_on(async move { Disk::open(opened, ImageFormat::Qcow2, Options::default()).await });
    let disk = Rc::new(disk.map_err(|error| error.to_string())?);
    let log = Rc::new(RefCell::new(Vec::new()));
    let writers: Vec<_> = (0..random.usize(1..4))
        .map(|_| sim.spawn(write_some(sim.clone(), disk.clone(), log.clone(), random.fork())))
        .collect();
    let (taker, clock) = (disk.clone(), sim.clone());
    let mut when = random.fork();
    let taking = sim.spawn(async move {
        let mut all = Vec::new();
        for index in 0..when.usize(1..4) {
            clock.sleep(Duration::from_micros(when.u64(..2000))).await;
            let (name, began) = (format!("s{index}"), clock.clock().now());
            taker.snapshots().create(&name).await.expect("no faults");
            all.push(Taken { name, began, ended: clock.clock().now() });
        }
        all
    });
    sim.run();
    let taken = taking.output().ok_or("the snapshots wait for ever")?;
    if writers.iter().any(|writer| writer.output().is_none()) {
        return Err("a writer waits for ever".into());
    }
    let closing = disk.clone();
    sim.block_on(async move { closing.close().await }).map_err(|error| error.to_string())?;
    let left = SimDisk::new(&sim, plain(), storage.content());
    let log = log.borrow().clone();
    sim.block_on(async move {
        let image = Qcow2::open(left.clone(), qcow2::OpenOptions::default()).await.expect("good");
        let report = qcow2::check(&image).await.expect("a good disk");
        if report.corruptions + report.leaks > 0 {
            return Err(format!("{report:?}"));
        }
        for one in taken {
            let view = Image::open_snapshot(
                left.clone(),
                ImageFormat::Qcow2,
                Options::default(),
                &one.name,
            )
            .await;
            judge(&one, &numbers(&Disk::new(view.expect("it is there"))).await, &log)?;
        }
        Ok(Report::default())
    })
}

#[test]
fn snapshots_taken_beside_writes_hold_what_had_completed() {
    let test = "snapshots_taken_beside_writes_hold_what_had_completed";
    for_seeds(env!("CARGO_PKG_NAME"), test, 600, snapshots_beside_writes);
}

/// Writes the second block of each of some new clusters, without FUA, and checks the bytes around
/// it.
async fn fill_some(disk: &Disk<SimDisk>, clusters: std::ops::Range<u64>, cluster_size: u64) {
    for cluster in clusters.clone() {
        let mut buffer = Buffer::new(BLOCK as usize);
        buffer.bytes_mut().fill(7);
        let (offset, from) = (cluster * cluster_size + BLOCK, buffer.lend());
        let durability = Durability::None;
        let write = Request::Write { offset, from, durability };
        disk.submit(write).await.expect("no faults any more");
    }
    let mut buffer = Buffer::new(cluster_size as usize);
    for cluster in clusters {
        let (offset, into) = (cluster * cluster_size, buffer.lend());
        disk.submit(Request::Read { offset, into }).await.expect("no faults any more");
        let wanted = |at: usize| if at / BLOCK as usize == 1 { 7 } else { 0 };
        let is_right = |(at, byte): (usize, &u8)| *byte == wanted(at);
        assert!(buffer.bytes().iter().enumerate().all(is_right), "in cluster {cluster}");
    }
}

#[test]
fn what_a_failed_snapshot_wrote_comes_to_light_nowhere() {
    for nth in 0.. {
        let sim = Sim::new(nth);
        let storage = SimDisk::new(&sim, plain(), Vec::new());
        let inner = storage.clone();
        let taken = sim.block_on(async move {
            let cluster_size = 16_384;
            let how = CreateOptions { cluster_size, ..CreateOptions::new(1 << 20) };
            qcow2::create(&inner, &how).await.expect("room");
            let disk = Disk::open(inner.clone(), ImageFormat::Qcow2, Options::default())
                .await
                .expect("a good image");
            fill_some(&disk, 0..8, cluster_size).await;
            disk.flush().await.expect("no faults yet");
            // From one write on all fail: one that does not prepare its tables is tried, too.
            for later in nth..nth + 200 {
                inner.fail(Fault::nth(later, errno::ENOSPC).of(OperationKind::Write));
            }
            let taken = disk.snapshots().create("one").await.is_ok();
            inner.clear_faults();
            // The last write of all decides which tables are active: after it failed, nothing goes
            // on.
            if !taken && disk.flush().await.is_ok() {
                fill_some(&disk, 8..40, cluster_size).await;
                disk.close().await.expect("no faults any more");
            }
            taken
        });
        if taken {
            assert!(nth > 4, "a snapshot takes more writes than {nth}");
            return;
        }
    }
}

/// Fills a disk with ones, over and over again, while snapshots of it come and go and others ask
/// for its block status: it never has a zero.
fn status_beside_changes(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let storage = SimDisk::new(&sim, plain(), new_image(&mut random, 1));
    let opened = storage.clone();
    let opening = async move { Disk::open(opened, ImageFormat::Qcow2, Options::default()).await };
    let disk = Rc::new(sim.block_on(opening).expect("a good image"));
    let fill = |disk: Rc<Disk<SimDisk>>| async move {
        for cluster in 0..SIZE / 16_384 {
            let mut buffer = Buffer::new(16_384);
            buffer.bytes_mut().fill(1);
            let (offset, from) = (cluster * 16_384, buffer.lend());
            let durability = Durability::None;
            let write = Request::Write { offset, from, durability };
            disk.submit(write).await.expect("no faults");
        }
    };
    sim.block_on(fill(disk.clone()));
    let changed = disk.clone();
    let changing = sim.spawn(async move {
        for _ in 0..4 {
            changed.snapshots().create("one").await.expect("no faults");
            fill(changed.clone()).await;
            changed.snapshots().delete("one").await.expect("no faults");
            changed.flush().await.expect("no faults");
        }
    });
    let asked = disk.clone();
    let asking = sim.spawn(async move {
        while changing.output().is_none() {
            let mut cache = BlockStatusCache::default();
            let mut rest = ByteRange::between(random.u64(..SIZE), SIZE);
            while !rest.is_empty() {
                let (status, length) =
                    asked.block_status(rest, &mut cache).await.expect("no faults");
                if status != BlockStatus::Data {
                    return Err(format!("{status:?} for {length} bytes at {}", rest.offset()));
                }
                rest = rest.skip(length);
            }
        }
        Ok(Report::default())
    });
    sim.run();
    asking.output().unwrap_or_else(|| Err("the questions never end".into()))
}

#[test]
fn block_status_never_says_zero_for_data_that_was_there_before_the_question() {
    let test = "block_status_never_says_zero_for_data_that_was_there_before_the_question";
    for_seeds(env!("CARGO_PKG_NAME"), test, 100, status_beside_changes);
}

/// As [`status_beside_changes`], of a disk whose every other part has space and was never written
/// to: a hole of the host file, beside clusters that snapshots leave as holes and take again.
/// Writes of one sector move the rest of a cluster into them.
fn status_beside_moved_clusters(seed: u64) -> Result<Report, String> {
    const PART: u64 = 16_384;
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let storage = SimDisk::new(&sim, plain(), Vec::new());
    let (made, opened) = (storage.clone(), storage);
    let cluster_size = [4096, 16_384][random.usize(..2)];
    let preallocation = Preallocation::Metadata;
    let options = CreateOptions { cluster_size, preallocation, ..CreateOptions::new(SIZE) };
    let opening = async move {
        qcow2::create(&made, &options).await.expect("a new image");
        Disk::open(opened, ImageFormat::Qcow2, Options::default()).await
    };
    let disk = Rc::new(sim.block_on(opening).expect("a good image"));
    let write = |disk: Rc<Disk<SimDisk>>, offset: u64, length: u64| async move {
        let mut buffer = Buffer::new(length as usize);
        buffer.bytes_mut().fill(1);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset, from, durability }).await.expect("no faults");
    };
    let full = || (0..SIZE / PART).step_by(2).map(|part| part * PART);
    for offset in full() {
        sim.block_on(write(disk.clone(), offset, PART));
    }
    let changed = disk.clone();
    let mut places = sim.fork_prng();
    let changing = sim.spawn(async move {
        for _ in 0..4 {
            changed.snapshots().create("one").await.expect("no faults");
            for cluster in (0..SIZE).step_by(cluster_size as usize) {
                if (cluster / PART).is_multiple_of(2) && places.bool() {
                    write(changed.clone(), cluster + 512 * places.u64(..8), 512).await;
                }
            }
            changed.snapshots().delete("one").await.expect("no faults");
            changed.flush().await.expect("no faults");
        }
    });
    let asking = sim.spawn(async move {
        while changing.output().is_none() {
            let mut cache = BlockStatusCache::default();
            let mut rest = ByteRange::between(random.u64(..SIZE), SIZE);
            while !rest.is_empty() {
                let (status, length) =
                    disk.block_status(rest, &mut cache).await.expect("no faults");
                let is_full = |at: u64| (at / PART).is_multiple_of(2);
                let end = rest.offset() + length;
                if status != BlockStatus::Data && (is_full(rest.offset()) || is_full(end - 1)) {
                    return Err(format!("{status:?} for {length} bytes at {}", rest.offset()));
                }
                rest = rest.skip(length);
            }
        }
        Ok(Report::default())
    });
    sim.run();
    asking.output().unwrap_or_else(|| Err("the questions never end".into()))
}

#[test]
fn block_status_never_says_zero_for_data_that_was_moved_into_a_hole() {
    let test = "block_status_never_says_zero_for_data_that_was_moved_into_a_hole";
    for_seeds(env!("CARGO_PKG_NAME"), test, 100, status_beside_moved_clusters);
}

#[test]
fn a_raw_disk_says_that_it_has_no_snapshots() {
    let sim = Sim::new(0);
    let disk = Disk::raw(SimDisk::new(&sim, plain(), vec![0; 4096]), Options::default()).unwrap();
    let error = sim.block_on(async move { disk.snapshots().create("one").await.unwrap_err() });
    assert_eq!(error.kind(), blockhouse_core::ErrorKind::Unsupported);
    assert!(error.to_string().contains("no snapshots"), "{error}");
}
