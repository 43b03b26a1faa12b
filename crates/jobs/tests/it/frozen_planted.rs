//! Whether the tests of frozen disks would find what they are for: scratch disks that do not hold
//! the old bytes when a guest overwrites them, and disks that are frozen one after the other, have
//! to be caught within few seeds.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_core::sync::Condvar;
use blockhouse_core::{Buffer, Durability, IoVector, Request, Result, Storage, WriteCache};
use blockhouse_disk::{Disk, Options};
use blockhouse_jobs::{CopyTimer, FreezeOptions, FrozenDisk, freeze};
use blockhouse_sim::{Config, Rng, Sim, SimDisk, forward_storage};
use futures_util::future::select;
use parking_lot::Mutex;

use crate::frozen::numbers_of_several;

const SIZE: u64 = 512 << 10;
const BLOCK: u64 = 4096;
/// For old bytes that the scratch disk has not got yet: less than the disk has.
const MEMORY: u64 = 128 << 10;

/// The planted faults with the old bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    /// Nothing: the wrapper itself changes no outcome.
    Right,
    /// They are written after the guest's write.
    Late,
    /// They are never written.
    Lost,
    /// An error of the scratch disk is taken for a success, now and then.
    ErrorIgnored,
    /// The end is missing.
    Short,
    /// The write never ends.
    Hangs,
}

/// A storage that is wrong in this way.
struct Broken {
    disk: SimDisk,
    policy: Policy,
    /// The bytes that are written with the next write.
    held: Mutex<Vec<(u64, Vec<u8>)>>,
    writes: AtomicU64,
}

impl Broken {
    /// A new disk with this content.
    fn disk(sim: &Sim, random: &mut Rng, policy: Policy, content: Vec<u8>) -> SimDisk {
        let config = Config { write_cache: WriteCache::Volatile, ..Config::random(random) };
        let disk = SimDisk::new(sim, config, content);
        let (held, writes) = (Mutex::default(), AtomicU64::new(0));
        SimDisk::wrapping(Self { disk, policy, held, writes })
    }
}

impl Storage for Broken {
    forward_storage!(disk: name, capabilities, size, read, write_zeroes, discard, flush, resize, block_status, prefetch);

    async fn write(&self, offset: u64, mut from: IoVector, durability: Durability) -> Result<()> {
        match self.policy {
            Policy::Right => {}
            Policy::Lost => return Ok(()),
            Policy::Hangs => std::future::pending().await,
            Policy::ErrorIgnored if self.writes.fetch_add(1, Ordering::Relaxed) % 8 == 7 => {
                return Ok(());
            }
            Policy::ErrorIgnored => {}
            Policy::Short => {
                let half = from.len() as u64 / 2;
                let unit = u64::from(self.capabilities().alignment.offset);
                let _rest = from.split_off((half / unit * unit) as usize);
            }
            Policy::Late => {
                let mut bytes = vec![0; from.len()];
                from.copy_to(&mut bytes);
                let earlier = std::mem::replace(&mut *self.held.lock(), vec![(offset, bytes)]);
                for (offset, bytes) in earlier {
                    let mut buffer = Buffer::new(bytes.len());
                    buffer.bytes_mut().copy_from_slice(&bytes);
                    self.disk.write(offset, buffer.lend(), durability).await?;
                }
                return Ok(());
            }
        }
        self.disk.write(offset, from, durability).await
    }
}

/// Overwrites blocks of a disk for a while.
async fn overwrite(disk: Arc<Disk<SimDisk>>, sim: Sim, mut random: Rng) {
    for _ in 0..40 {
        let mut buffer = Buffer::new(BLOCK as usize);
        buffer.bytes_mut().fill(0xee);
        let offset = random.u64(..SIZE / BLOCK) * BLOCK;
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset, from, durability }).await.expect("a guest's write");
        sim.sleep(Duration::from_micros(random.u64(..400))).await;
    }
}

fn byte_of_content(at: u64) -> u8 {
    (at / 512) as u8 % 0xee
}

fn content() -> Vec<u8> {
    (0..SIZE).map(byte_of_content).collect()
}

/// A disk with this content, and what it was when it was frozen: just now.
async fn freeze_one(
    sim: &Sim,
    random: &mut Rng,
    policy: Policy,
    timer: Option<CopyTimer>,
) -> (Arc<Disk<SimDisk>>, Rc<FrozenDisk<SimDisk>>) {
    let source = Broken::disk(sim, random, Policy::Right, content());
    let source = Arc::new(Disk::raw(source, Options::default()).expect("a disk"));
    let scratch = Broken::disk(sim, random, policy, vec![0; SIZE as usize]);
    let scratch = Disk::raw(scratch, Options::default()).expect("a scratch disk");
    let (scratch_limit, max_index_bytes) = (u64::MAX, 1 << 20);
    let options = FreezeOptions { scratch_limit, memory: MEMORY, max_index_bytes, timer };
    let frozen = FrozenDisk::new(Arc::clone(&source), scratch, options, Box::new(|_| {}));
    let frozen = Rc::new(frozen.expect("disks of one size"));
    drop(sim.spawn(frozen.write_behind()));
    freeze(&[&*frozen]).await.expect("no limit");
    (source, frozen)
}

/// Where a frozen disk reads other bytes than it had when it was frozen, while a guest writes.
fn difference(policy: Policy, seed: u64) -> Option<u64> {
    let sim = Sim::new(seed);
    let (mut random, own) = (sim.fork_prng(), sim.clone());
    sim.block_on(async move {
        let sim = own;
        let (source, frozen) = freeze_one(&sim, &mut random, policy, None).await;
        let content = content();
        let guest = sim.spawn(overwrite(Arc::clone(&source), sim.clone(), random.fork()));
        let mut found = None;
        for _ in 0..60 {
            let offset = random.u64(..SIZE / BLOCK) * BLOCK;
            let mut buffer = Buffer::new(BLOCK as usize);
            frozen.read(offset, buffer.lend()).await.expect("no failure");
            if buffer.bytes() != &content[offset as usize..(offset + BLOCK) as usize] {
                found = Some(offset);
            }
            sim.sleep(Duration::from_micros(random.u64(..400))).await;
        }
        guest.join().await;
        found
    })
}

#[test]
fn old_bytes_that_are_not_saved_are_found_out() {
    for policy in [Policy::Late, Policy::Lost, Policy::ErrorIgnored, Policy::Short] {
        let found = (0..50).find_map(|seed| Some((seed, difference(policy, seed)?)));
        let Some((seed, offset)) = found else { panic!("{policy:?} went unnoticed") };
        eprintln!("{policy:?}: seed {seed}, at offset {offset}");
    }
}

#[test]
fn the_wrapper_itself_changes_nothing() {
    for seed in 0..30 {
        assert_eq!(difference(Policy::Right, seed), None, "seed {seed}");
    }
}

/// Writes a block of a disk.
async fn write(disk: &Disk<SimDisk>, block: u64) {
    let mut buffer = Buffer::new(BLOCK as usize);
    buffer.bytes_mut().fill(0xee);
    let (offset, from, durability) = (block * BLOCK, buffer.lend(), Durability::None);
    disk.submit(Request::Write { offset, from, durability }).await.expect("a guest's write");
}

async fn is_as_it_was(frozen: &FrozenDisk<SimDisk>, block: u64) -> Result<bool> {
    let mut buffer = Buffer::new(BLOCK as usize);
    frozen.read(block * BLOCK, buffer.lend()).await?;
    let start = block * BLOCK;
    Ok((start..).zip(buffer.bytes()).all(|(at, byte)| *byte == byte_of_content(at)))
}

/// Time that is up when the test says so.
#[derive(Default)]
struct Alarm {
    is_up: AtomicBool,
    changed: Condvar,
}

#[test]
fn a_scratch_disk_that_hangs_is_waited_for_when_memory_is_full_until_time_is_up() {
    for seed in 0..20 {
        let sim = Sim::new(seed);
        let (mut random, own) = (sim.fork_prng(), sim.clone());
        sim.block_on(async move {
            let sim = own;
            let alarm = Arc::new(Alarm::default());
            let bell = Arc::clone(&alarm);
            let timer: CopyTimer = Box::new(move || {
                let alarm = Arc::clone(&bell);
                let is_up = move || alarm.is_up.load(Ordering::SeqCst).then_some(());
                let alarm = Arc::clone(&bell);
                Box::pin(async move { alarm.changed.wait_until(is_up).await })
            });
            let (disk, frozen) = freeze_one(&sim, &mut random, Policy::Hangs, Some(timer)).await;
            let written = Rc::new(Cell::new(0));
            let (count, guest_disk) = (Rc::clone(&written), Arc::clone(&disk));
            let guest = sim.spawn(async move {
                for block in 0..SIZE / BLOCK {
                    write(&guest_disk, block).await;
                    count.set(block + 1);
                }
            });
            for _ in 0..10_000 {
                sim.sleep(Duration::from_millis(1)).await;
            }
            assert_eq!((written.get(), frozen.failure()), (MEMORY / BLOCK, None), "seed {seed}");
            alarm.is_up.store(true, Ordering::SeqCst);
            alarm.changed.notify_all();
            guest.join().await;
            let failure = frozen.failure().expect("it has failed").to_owned();
            assert!(failure.contains("did not answer in time"), "{failure}");
            for block in [7, 40, 127] {
                is_as_it_was(&frozen, block).await.expect_err("nothing newer is read");
            }
        });
    }
}

#[test]
fn changes_that_are_dropped_leave_nothing_newer_and_hold_nothing_off() {
    for seed in 0..60 {
        let sim = Sim::new(seed);
        let (mut random, own) = (sim.fork_prng(), sim.clone());
        sim.block_on(async move {
            let sim = own;
            let (disk, frozen) = freeze_one(&sim, &mut random, Policy::Right, None).await;
            for _ in 0..200 {
                let block = random.u64(..SIZE / BLOCK);
                let patience = sim.sleep(Duration::from_micros(random.u64(..300)));
                select(pin!(write(&disk, block)), pin!(patience)).await;
                let block = random.u64(..SIZE / BLOCK);
                let is_right = is_as_it_was(&frozen, block).await.expect("no failure");
                assert!(is_right, "seed {seed}, block {block}");
            }
            for block in 0..SIZE / BLOCK {
                write(&disk, block).await;
            }
            for block in 0..SIZE / BLOCK {
                let is_right = is_as_it_was(&frozen, block).await.expect("no failure");
                assert!(is_right, "seed {seed}, block {block}");
            }
        });
    }
}

#[test]
fn a_writer_that_ends_early_holds_nothing_off() {
    let sim = Sim::new(1);
    let (mut random, own) = (sim.fork_prng(), sim.clone());
    sim.block_on(async move {
        let sim = own;
        let (disk, frozen) = freeze_one(&sim, &mut random, Policy::Hangs, None).await;
        let second = frozen.write_behind();
        for block in 0..MEMORY / BLOCK {
            write(&disk, block).await;
        }
        let full = sim.spawn(async move { write(&disk, 100).await });
        sim.sleep(Duration::from_secs(60)).await;
        assert_eq!(frozen.failure(), None);
        drop(second);
        full.join().await;
        is_as_it_was(&frozen, 100).await.expect_err("nothing newer is read");
    });
}

#[test]
fn disks_that_are_frozen_one_after_the_other_are_found_out() {
    let found = (0..200).find(|&seed| {
        let numbers = numbers_of_several(seed, async |sim, disks, random| {
            for disk in disks {
                freeze(&[*disk]).await.expect("no limit");
                sim.sleep(Duration::from_micros(random.u64(..3000))).await;
            }
        });
        numbers.is_err()
    });
    let seed = found.expect("it went unnoticed");
    eprintln!("one after the other: seed {seed}");
}
