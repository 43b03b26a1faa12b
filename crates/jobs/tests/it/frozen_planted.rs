//! Whether the tests of frozen disks would find what they are for: scratch disks that do not hold the old bytes when a
//! guest overwrites them, and disks that are frozen one after the other, have to be caught within few seeds.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_core::{
    Allocation, Buffer, ByteRange, Capabilities, Durability, IoVector, Request, Result, Storage,
    SyncMode, Unmap, WriteCache,
};
use blockhouse_disk::{Disk, Options};
use blockhouse_jobs::{FreezeOptions, FrozenDisk, freeze};
use blockhouse_sim::{Config, Rng, Sim, SimDisk};
use parking_lot::Mutex;

use crate::frozen::numbers_of_several;

const SIZE: u64 = 512 << 10;
const BLOCK: u64 = 4096;

/// What is done wrong with the old bytes.
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
    /// Their end is missing.
    Short,
}

/// A storage that is wrong in this way.
struct Broken {
    disk: SimDisk,
    policy: Policy,
    /// What is written with the next write.
    held: Mutex<Vec<(u64, Vec<u8>)>>,
    writes: AtomicU64,
}

impl Broken {
    fn new(sim: &Sim, random: &mut Rng, policy: Policy, content: Vec<u8>) -> Self {
        let config = Config { write_cache: WriteCache::Volatile, ..Config::random(random) };
        let disk = SimDisk::new(sim, config, content);
        Self { disk, policy, held: Mutex::default(), writes: AtomicU64::new(0) }
    }
}

impl Storage for Broken {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.disk.capabilities()
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        self.disk.read(offset, into).await
    }

    async fn write(&self, offset: u64, mut from: IoVector, durability: Durability) -> Result<()> {
        match self.policy {
            Policy::Right => {}
            Policy::Lost => return Ok(()),
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

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        self.disk.write_zeroes(range, unmap).await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        self.disk.discard(range).await
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        self.disk.flush(sync).await
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.disk.resize(size).await
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        self.disk.block_status(range).await
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        self.disk.prefetch(range).await
    }
}

/// Overwrites blocks of a disk for a while.
async fn overwrite(disk: Arc<Disk<Broken>>, sim: Sim, mut random: Rng) {
    for _ in 0..40 {
        let mut buffer = Buffer::new(BLOCK as usize);
        buffer.bytes_mut().fill(0xee);
        let offset = random.u64(..SIZE / BLOCK) * BLOCK;
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset, from, durability }).await.expect("a guest's write");
        sim.sleep(Duration::from_micros(random.u64(..400))).await;
    }
}

/// Where a frozen disk reads other bytes than it had when it was frozen, while a guest writes.
fn difference(policy: Policy, seed: u64) -> Option<u64> {
    let sim = Sim::new(seed);
    let (mut random, own) = (sim.fork_prng(), sim.clone());
    sim.block_on(async move {
        let sim = own;
        let content: Vec<u8> = (0..SIZE).map(|at| (at / 512) as u8 % 0xee).collect();
        let source = Broken::new(&sim, &mut random, Policy::Right, content.clone());
        let source = Arc::new(Disk::raw(source, Options::default()).expect("a disk"));
        let scratch = Broken::new(&sim, &mut random, policy, vec![0; SIZE as usize]);
        let scratch = Disk::raw(scratch, Options::default()).expect("a scratch disk");
        let options = FreezeOptions { scratch_limit: u64::MAX, timer: None };
        let frozen = FrozenDisk::new(Arc::clone(&source), scratch, options, Box::new(|_| {}));
        let frozen = Rc::new(frozen.expect("disks of one size"));
        freeze(&[&*frozen]).await;
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

#[test]
fn disks_that_are_frozen_one_after_the_other_are_found_out() {
    let found = (0..200).find(|&seed| {
        let numbers = numbers_of_several(seed, async |sim, disks, random| {
            for disk in disks {
                freeze(&[*disk]).await;
                sim.sleep(Duration::from_micros(random.u64(..3000))).await;
            }
        });
        numbers.is_err()
    });
    let seed = found.expect("it went unnoticed");
    eprintln!("one after the other: seed {seed}");
}
