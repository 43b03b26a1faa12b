//! Disks that are frozen while guests write to them: what is read is what they held at that moment,
//! whatever the guests, the scratch disk and the order of all operations do.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_core::sync::Condvar;
use blockhouse_core::{
    Allocation, Buffer, ByteRange, Durability, Fallback, Request, Result, Unmap, errno,
};
use blockhouse_disk::{Disk, Options};
use blockhouse_engine::ClockSleep;
use blockhouse_jobs::{FreezeOptions, FrozenDisk, freeze};
use blockhouse_sim::{Config, Fault, Latency, OperationKind, Report, Rng, Sim, SimDisk, for_seeds};

use crate::guests::{self, Model, SECTOR};
use crate::scene::{self, Scene};

/// The plan for a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Complete,
    /// The scratch disk may have this much.
    Fill(u64),
    /// Operations of the scratch disk fail.
    Fail,
}

/// A disk that is about to be frozen.
struct Prepared {
    frozen: Arc<FrozenDisk<SimDisk>>,
    scratch: SimDisk,
    /// How many times a failure was told.
    told: Arc<AtomicU64>,
}

fn prepare(sim: &Sim, random: &mut Rng, source: &Scene, scratch_limit: u64) -> Prepared {
    let size = source.disk.size();
    let scratch_size = FrozenDisk::<SimDisk>::scratch_size(size);
    let scratch = SimDisk::new(sim, Config::random(random), vec![0; scratch_size as usize]);
    let disk = Disk::raw(scratch.clone(), Options::default()).expect("a scratch disk");
    let told = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&told);
    let teller = Box::new(move |_: &str| _ = count.fetch_add(1, Ordering::SeqCst));
    // Few bytes, so that all limits are reached.
    let max_index_bytes = [0, 200, 1 << 20][random.usize(..3)];
    let options = FreezeOptions { scratch_limit, memory: 128 << 10, max_index_bytes, timer: None };
    let frozen = FrozenDisk::new(Arc::clone(&source.disk), disk, options, teller);
    let frozen = Arc::new(frozen.expect("a scratch disk of the right size"));
    drop(sim.spawn(frozen.write_behind()));
    Prepared { frozen, scratch, told }
}

/// Reads a disk in parts of any length and order, some of them several times.
async fn read_all(
    sim: &Sim,
    frozen: &FrozenDisk<SimDisk>,
    size: u64,
    random: &mut Rng,
) -> Result<Vec<u8>> {
    let mut bytes = vec![0; size as usize];
    let mut parts = Vec::new();
    let mut rest = ByteRange::between(0, size);
    while !rest.is_empty() {
        parts.push(rest.truncate(random.u64(1..150_000)));
        rest = rest.skip(parts.last().map_or(0, |part| part.length()));
    }
    parts.extend_from_within(..parts.len() / 2);
    random.shuffle(&mut parts);
    for part in parts {
        let mut buffer = Buffer::new(part.length() as usize);
        frozen.read(part.offset(), buffer.lend()).await?;
        bytes[part.offset() as usize..part.end() as usize].copy_from_slice(buffer.bytes());
        sim.sleep(Duration::from_micros(random.u64(..2000))).await;
    }
    Ok(bytes)
}

/// Where block status says that there is nothing, there was nothing.
async fn check_status(frozen: &FrozenDisk<SimDisk>, bytes: &[u8]) -> Result<(), String> {
    let mut rest = ByteRange::between(0, bytes.len() as u64);
    while !rest.is_empty() {
        let status = frozen.block_status(rest).await;
        let Ok((allocation, length)) = status else { return Ok(()) };
        let part = rest.truncate(length);
        let bytes = &bytes[part.offset() as usize..part.end() as usize];
        if part.is_empty() || allocation == Allocation::Hole && bytes.iter().any(|byte| *byte != 0)
        {
            return Err(format!("{allocation:?} at {part:?}"));
        }
        rest = rest.skip(length);
    }
    Ok(())
}

struct Case {
    sim: Sim,
    random: Rng,
    plan: Plan,
    disks: Vec<(Scene, Rc<Model>)>,
}

async fn case(sim: Sim, mut random: Rng) -> Case {
    let plans = [Plan::Complete, Plan::Complete, Plan::Fill(random.u64(..200_000)), Plan::Fail];
    let plan = plans[random.usize(..plans.len())];
    let mut disks = Vec::new();
    for _ in 0..random.usize(1..=3) {
        let (model, content) = Model::new(random.u64(1..=12) * 72, &mut random);
        let scene = scene::disk(&sim, &mut random, &content).await.expect("a disk");
        disks.push((scene, model));
    }
    Case { sim, random, plan, disks }
}

impl Case {
    async fn run(mut self) -> Result<(), String> {
        let guests = self
            .disks
            .iter()
            .flat_map(|(scene, model)| guests::start(&self.sim, &scene.disk, model, u64::MAX));
        let guests: Vec<_> = guests.collect();
        self.pause().await;
        let limit = if let Plan::Fill(limit) = self.plan { limit } else { u64::MAX };
        let (sim, random) = (&self.sim, &mut self.random);
        let prepared = self.disks.iter().map(|(scene, _)| prepare(sim, random, scene, limit));
        let prepared: Vec<_> = prepared.collect();
        let frozen: Vec<_> = prepared.iter().map(|one| &*one.frozen).collect();
        let since: Vec<_> = self.disks.iter().map(|(_, model)| model.answered()).collect();
        freeze(&frozen).await.expect("no limit");
        let until: Vec<_> = self.disks.iter().map(|(_, model)| model.written()).collect();
        self.pause().await;
        if self.plan == Plan::Fail {
            let probability = [0.02, 0.3][self.random.usize(..2)];
            prepared[0].scratch.fail(Fault::chance(probability, errno::EIO));
        }
        let mut outcome = Ok(());
        for (index, one) in prepared.iter().enumerate() {
            let span = (&*since[index], &*until[index]);
            outcome = outcome.and(self.judge(index, one, span).await);
        }
        drop(prepared);
        self.disks.iter().for_each(|(_, model)| model.is_over.set(true));
        for guest in guests {
            // The guest ends well, whether the backup did or not.
            guest.join().await.map_err(|error| format!("a guest has an error: {error}"))?;
        }
        for (scene, model) in &self.disks {
            let bytes = guests::read(&scene.disk).await.map_err(|error| error.to_string())?;
            model.check(&model.answered(), &bytes)?;
        }
        outcome
    }

    async fn pause(&mut self) {
        self.sim.sleep(Duration::from_micros(self.random.u64(..20_000))).await;
    }

    async fn judge(
        &mut self,
        index: usize,
        Prepared { frozen, told, .. }: &Prepared,
        (since, until): (&[usize], &[usize]),
    ) -> Result<(), String> {
        let (scene, model) = &self.disks[index];
        let size = scene.disk.size();
        match read_all(&self.sim, frozen, size, &mut self.random).await {
            Ok(bytes) => {
                model.check_between(since, until, &bytes)?;
                check_status(frozen, &bytes).await?;
            }
            Err(_) if frozen.failure().is_some() => {}
            // A read of the scratch disk fails alone.
            Err(_) if self.plan == Plan::Fail => {}
            Err(error) => return Err(format!("cannot be read: {error}")),
        }
        let has_failed = frozen.failure().is_some();
        if told.load(Ordering::SeqCst) != u64::from(has_failed) {
            return Err("a failure is told once".into());
        }
        match (self.plan, has_failed) {
            (Plan::Complete, true) => Err(format!("it failed: {:?}", frozen.failure())),
            (Plan::Fill(limit), false) if frozen.scratch_used() > limit => {
                Err(format!("{} bytes are in use", frozen.scratch_used()))
            }
            _ => Ok(()),
        }
    }
}

#[test]
fn a_frozen_disk_is_what_it_was() {
    let test = "frozen::a_frozen_disk_is_what_it_was";
    for_seeds(env!("CARGO_PKG_NAME"), test, 60, |seed| {
        let sim = Sim::new(seed);
        let (random, own) = (sim.fork_prng(), sim.clone());
        let outcome = sim.block_on(async move { case(own, random).await.run().await });
        outcome.map(|()| Report::default())
    });
}

/// An image without data, whose clusters have `cluster_size` bytes, is frozen; then its guest
/// writes here and there.
async fn freeze_holes(sim: &Sim, cluster_size: u64, random: &mut Rng) -> Result<(), String> {
    let size = (3 * cluster_size).clamp(256 << 10, 4 << 20) + random.u64(..9) * SECTOR;
    let scene = scene::empty(sim, size, cluster_size).await.map_err(|error| error.to_string())?;
    let Prepared { frozen, .. } = prepare(sim, random, &scene, u64::MAX);
    freeze(&[&frozen]).await.expect("no limit");
    for _ in 0..random.u64(1..40) {
        let offset = random.u64(..size / SECTOR) * SECTOR;
        let length = (random.u64(1..=24) * SECTOR).min(size - offset);
        let mut buffer = Buffer::new(length as usize);
        buffer.bytes_mut().fill(1);
        let (from, durability) = (buffer.lend(), Durability::None);
        let write = Request::Write { offset, from, durability };
        scene.disk.submit(write).await.map_err(|error| error.to_string())?;
    }
    let mut rest = ByteRange::between(0, size);
    while !rest.is_empty() {
        let status = frozen.block_status(rest).await.map_err(|error| error.to_string())?;
        if status.0 != Allocation::Hole {
            return Err(format!("clusters of {cluster_size}: {:?} at {rest}", status.0));
        }
        rest = rest.skip(status.1);
    }
    let read = read_all(sim, &frozen, size, random).await.map_err(|error| error.to_string())?;
    if read.iter().all(|byte| *byte == 0) {
        Ok(())
    } else {
        Err(format!("clusters of {cluster_size}: not what it was"))
    }
}

#[test]
fn a_hole_of_any_cluster_size_stays_one_in_the_frozen_disk() {
    let test = "frozen::a_hole_of_any_cluster_size_stays_one_in_the_frozen_disk";
    for_seeds(env!("CARGO_PKG_NAME"), test, 2, |seed| {
        for bits in 9..=21 {
            let sim = Sim::new(seed);
            let (mut random, own) = (sim.fork_prng(), sim.clone());
            sim.block_on(async move { freeze_holes(&own, 1 << bits, &mut random).await })?;
        }
        Ok(Report::default())
    });
}

/// Time that passes for a timer, which is not of the simulation's thread.
#[derive(Default)]
struct Seconds {
    passed: AtomicU64,
    changed: Condvar,
}

/// Zeros 48 MiB of a disk whose reads take so long, with a timer of 30 seconds. How long the guest
/// waited, and why the backup has failed.
fn zero_slowly(seed: u64, latency: Duration) -> (Duration, Option<String>) {
    const LENGTH: u64 = 48 << 20;
    let sim = Sim::new(seed);
    let own = sim.clone();
    sim.block_on(async move {
        let sim = own;
        let latency = Latency::fixed(latency.as_micros() as u64, 0);
        let config = Config { latency, ..Config::default() };
        let source = SimDisk::new(&sim, config, vec![7; LENGTH as usize]);
        let source = Arc::new(Disk::raw(source, Options::default()).expect("a disk"));
        let scratch = SimDisk::new(&sim, Config::default(), vec![0; LENGTH as usize]);
        let scratch = Disk::raw(scratch, Options::default()).expect("a scratch disk");
        let seconds = Arc::new(Seconds::default());
        let (ticking, own) = (Arc::clone(&seconds), sim.clone());
        let ticks = sim.spawn(async move {
            loop {
                own.sleep(Duration::from_secs(1)).await;
                ticking.passed.fetch_add(1, Ordering::SeqCst);
                ticking.changed.notify_all();
            }
        });
        let timer = Box::new(move || -> ClockSleep {
            let seconds = Arc::clone(&seconds);
            let end = seconds.passed.load(Ordering::SeqCst) + 30;
            Box::pin(async move {
                let is_over = || (seconds.passed.load(Ordering::SeqCst) >= end).then_some(());
                seconds.changed.wait_until(is_over).await;
            })
        });
        let (scratch_limit, memory, max_index_bytes) = (u64::MAX, 8 << 20, 1 << 20);
        let options = FreezeOptions { scratch_limit, memory, max_index_bytes, timer: Some(timer) };
        let frozen = FrozenDisk::new(Arc::clone(&source), scratch, options, Box::new(|_| ()));
        let frozen = frozen.expect("a scratch disk of the right size");
        drop(sim.spawn(frozen.write_behind()));
        freeze(&[&frozen]).await.expect("no limit");
        let began = sim.clock().now();
        let (unmap, fallback) = (Unmap::Allowed, Fallback::Allowed);
        let (range, durability) = (ByteRange::between(0, LENGTH), Durability::None);
        let zeros = Request::WriteZeroes { range, unmap, fallback, durability };
        source.submit(zeros).await.expect("the guest's own request");
        drop(ticks);
        (sim.clock().now() - began, frozen.failure().map(ToOwned::to_owned))
    })
}

#[test]
fn a_long_change_is_saved_in_parallel_for_as_long_as_it_gets_on() {
    // 192 reads, each of which takes 4 seconds.
    let (waited, failure) = zero_slowly(1, Duration::from_secs(4));
    assert_eq!(failure, None);
    assert!(waited > Duration::from_secs(30) && waited < Duration::from_secs(200), "{waited:?}");
}

#[test]
fn a_disk_that_does_not_answer_is_named_in_place_of_the_scratch_file() {
    // The simulation may have the process stand still until the disk answers.
    let mut all = (0..8).filter_map(|seed| zero_slowly(seed, Duration::from_secs(100)).1);
    let failure = all.next().expect("nothing is saved in time");
    assert!(failure.contains("the disk itself did not answer in time"), "{failure}");
}

/// For how long guests wait whose changes fill a scratch disk, and some more, which takes an hour
/// to give its space back.
fn fill_slowly_discarded(seed: u64) -> Duration {
    const LENGTH: usize = 1 << 20;
    let sim = Sim::new(seed);
    let own = sim.clone();
    sim.block_on(async move {
        let sim = own;
        let source = SimDisk::new(&sim, Config::default(), vec![7; LENGTH]);
        let source = Arc::new(Disk::raw(source, Options::default()).expect("a disk"));
        let size = FrozenDisk::<SimDisk>::scratch_size(LENGTH as u64);
        let scratch = SimDisk::new(&sim, Config::default(), vec![0; size as usize]);
        scratch.fail(Fault::late(0, Duration::from_secs(3600)).of(OperationKind::Discard));
        let scratch = Disk::raw(scratch, Options::default()).expect("a scratch disk");
        let (scratch_limit, memory, max_index_bytes) = (256 << 10, 128 << 10, 1 << 20);
        let options = FreezeOptions { scratch_limit, memory, max_index_bytes, timer: None };
        let frozen = FrozenDisk::new(Arc::clone(&source), scratch, options, Box::new(|_| ()));
        let frozen = frozen.expect("a scratch disk of the right size");
        drop(sim.spawn(frozen.write_behind()));
        freeze(&[&frozen]).await.expect("no limit");
        let (began, mut more) = (sim.clock().now(), 4);
        for offset in (0..LENGTH as u64).step_by(4096) {
            let mut buffer = Buffer::new(4096);
            let (from, durability) = (buffer.lend(), Durability::None);
            let write = Request::Write { offset, from, durability };
            source.submit(write).await.expect("the guest's own request");
            match frozen.failure() {
                Some(_) if more == 0 => return sim.clock().now() - began,
                Some(_) => more -= 1,
                None => {}
            }
        }
        panic!("the scratch disk has room for all");
    })
}

#[test]
fn no_change_waits_until_a_full_scratch_disk_has_given_its_space_back() {
    // The simulation may have the process stand still until it has.
    let shortest = (0..16).map(fill_slowly_discarded).min().expect("some");
    assert!(shortest < Duration::from_secs(60), "{shortest:?}");
}

/// A number in the first bytes of a disk.
async fn write_number(disk: &Disk<SimDisk>, number: u64) -> Result<()> {
    let mut buffer = Buffer::new(SECTOR as usize);
    buffer.bytes_mut()[..8].copy_from_slice(&number.to_be_bytes());
    let (from, durability) = (buffer.lend(), Durability::None);
    disk.submit(Request::Write { offset: 0, from, durability }).await
}

/// Freezes several disks to which one writer gives numbers in turn, in the way of `freeze_all`, and
/// reads the numbers.
///
/// # Errors
/// In words, where they are not those of one moment.
pub fn numbers_of_several(
    seed: u64,
    freeze_all: impl AsyncFnOnce(&Sim, &[&FrozenDisk<SimDisk>], &mut Rng) + 'static,
) -> Result<(), String> {
    let sim = Sim::new(seed);
    let (mut random, own) = (sim.fork_prng(), sim.clone());
    let numbers: Result<Vec<u64>> = sim.block_on(async move {
        let sim = own;
        let mut scenes = Vec::new();
        for _ in 0..random.usize(2..=4) {
            scenes.push(scene::disk(&sim, &mut random, &vec![0; 72 * SECTOR as usize]).await?);
        }
        let disks: Vec<_> = scenes.iter().map(|scene| Arc::clone(&scene.disk)).collect();
        let writer = sim.spawn(async move {
            for number in 1.. {
                for disk in &disks {
                    write_number(disk, number).await.expect("a write");
                }
            }
        });
        sim.sleep(Duration::from_micros(random.u64(..20_000))).await;
        let prepared: Vec<_> =
            scenes.iter().map(|scene| prepare(&sim, &mut random, scene, u64::MAX).frozen).collect();
        let frozen: Vec<_> = prepared.iter().map(|one| &**one).collect();
        freeze_all(&sim, &frozen, &mut random).await;
        sim.sleep(Duration::from_micros(random.u64(..20_000))).await;
        let mut numbers = Vec::new();
        for frozen in &prepared {
            let mut buffer = Buffer::new(8);
            frozen.read(0, buffer.lend()).await?;
            numbers.push(u64::from_be_bytes(buffer.bytes().try_into().expect("8 bytes")));
        }
        drop(writer);
        Ok(numbers)
    });
    let numbers = numbers.map_err(|error| error.to_string())?;
    let is_in_order = numbers.is_sorted_by(|a, b| a >= b);
    if is_in_order && numbers[0] - numbers[numbers.len() - 1] <= 1 {
        Ok(())
    } else {
        Err(format!("the disks have the numbers {numbers:?}"))
    }
}

#[test]
fn several_disks_are_frozen_at_one_moment() {
    let test = "frozen::several_disks_are_frozen_at_one_moment";
    for_seeds(env!("CARGO_PKG_NAME"), test, 60, |seed| {
        let at_once = async |_: &Sim, disks: &[&FrozenDisk<SimDisk>], _: &mut Rng| {
            freeze(disks).await.expect("no limit");
        };
        numbers_of_several(seed, at_once).map(|()| Report::default())
    });
}
