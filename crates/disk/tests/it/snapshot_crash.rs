//! Crashes at every storage operation while snapshots are taken and deleted beside guests that
//! write, and either is cancelled: no image is corrupt, each snapshot is there as a whole or not at
//! all, and holds what had completed; nothing durable is lost. What is closed in order has no
//! leaks, also after changes that were cancelled.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Unmap};
use blockhouse_disk::{Disk, Image, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions, Qcow2, Switch, Version};
use blockhouse_sim::{Config, ImageState, Report, Rng, Sim, SimDisk, for_seeds};

use crate::crashed::jury::Jury;
use crate::crashed::plain_config;

const SECTOR: u64 = 512;
/// The sectors that guests write, and those behind them that they only make a mess of.
const WRITTEN: u64 = 256;
const SECTORS: u64 = 384;

static JURY: Jury = Jury::for_one_in(200);

/// A write: each word of these sectors is its number.
#[derive(Clone, Copy, Debug)]
struct Write {
    first: u64,
    count: u64,
    durability: Durability,
    began: Duration,
    ended: Option<Duration>,
}

/// A snapshot that was asked for.
#[derive(Clone, Debug)]
struct Asked {
    name: String,
    began: Duration,
    /// When the answer came, and whether it is taken.
    answered: Option<(Duration, bool)>,
    /// Whether its deletion has begun, and whether it is gone.
    deleted: Option<bool>,
}

#[derive(Clone, Default)]
struct Log {
    writes: Vec<Write>,
    asked: Vec<Asked>,
}

struct World {
    sim: Sim,
    disk: Disk<SimDisk>,
    log: RefCell<Log>,
}

fn create_options(block: u64, random: &mut Rng) -> CreateOptions {
    let cluster_size = [512, 512, 1024, 4096, 16_384][random.usize(..5)].max(block);
    let is_v2 = random.u8(..5) == 0;
    let switch = |on| if on { Switch::On } else { Switch::Off };
    CreateOptions {
        cluster_size,
        version: if is_v2 { Version::V2 } else { Version::V3 },
        refcount_bits: if is_v2 { 16 } else { [8, 16, 64][random.usize(..3)] },
        lazy_refcounts: switch(!is_v2 && random.u8(..4) == 0),
        extended_l2: switch(!is_v2 && cluster_size == 16_384 && random.bool()),
        ..CreateOptions::new(SECTORS * SECTOR)
    }
}

impl World {
    fn now(&self) -> Duration {
        self.sim.clock().now()
    }

    async fn write(&self, random: &mut Rng) {
        let first = random.u64(..WRITTEN);
        let limit = [4, 40][random.usize(..2)];
        let count = random.u64(1..=limit).min(WRITTEN - first);
        let durability = [Durability::None, Durability::Data][random.usize(..2)];
        let number = {
            let log = &mut self.log.borrow_mut().writes;
            log.push(Write { first, count, durability, began: self.now(), ended: None });
            log.len()
        };
        let mut buffer = Buffer::new((count * SECTOR) as usize);
        for word in buffer.bytes_mut().chunks_exact_mut(8) {
            word.copy_from_slice(&(number as u64).to_be_bytes());
        }
        let (offset, from) = (first * SECTOR, buffer.lend());
        let write = Request::Write { offset, from, durability };
        self.disk.submit(write).await.expect("no faults");
        self.log.borrow_mut().writes[number - 1].ended = Some(self.now());
    }

    /// Writes, zeros and discards past the checked part, which no check reads.
    async fn scribble(&self, random: &mut Rng) {
        let first = random.u64(WRITTEN..SECTORS);
        let length = random.u64(1..=SECTORS - first) * SECTOR;
        let (offset, durability) = (first * SECTOR, Durability::None);
        let mut buffer = Buffer::new(length as usize);
        buffer.bytes_mut().fill(0xee);
        let request = match random.u8(..3) {
            0 => Request::Write { offset, from: buffer.lend(), durability },
            1 => {
                Request::Discard { range: ByteRange::between(offset, offset + length), durability }
            }
            _ => zeros(ByteRange::between(offset, offset + length), random),
        };
        self.disk.submit(request).await.expect("no faults");
    }

    async fn guest(self: Rc<Self>, mut random: Rng) {
        for _ in 0..random.usize(1..25) {
            match random.u8(..8) {
                0 => self.disk.flush().await.expect("no faults"),
                1..3 => self.scribble(&mut random).await,
                _ => self.write(&mut random).await,
            }
        }
    }

    async fn take(&self, random: &mut Rng) {
        let (number, began) = (self.log.borrow().asked.len(), self.now());
        let name = format!("s{number}");
        let asked = Asked { name: name.clone(), began, answered: None, deleted: None };
        self.log.borrow_mut().asked.push(asked);
        let patience = patience(random);
        let is_cancelled = || self.now() - began > patience;
        let taken = self.disk.snapshots().create_unless(&name, is_cancelled).await;
        let taken = taken.expect("no faults");
        self.log.borrow_mut().asked[number].answered = Some((self.now(), taken.is_some()));
    }

    async fn delete(&self, number: usize, random: &mut Rng) {
        let name = {
            let one = &mut self.log.borrow_mut().asked[number];
            let is_there = matches!(one.answered, Some((_, true))) && one.deleted.is_none();
            if !is_there {
                return;
            }
            one.deleted = Some(false);
            one.name.clone()
        };
        let (began, patience) = (self.now(), patience(random));
        let is_cancelled = || self.now() - began > patience;
        let deleted = self.disk.snapshots().delete_unless(&name, is_cancelled).await;
        let is_gone = deleted.expect("no faults").is_some();
        self.log.borrow_mut().asked[number].deleted = is_gone.then_some(true);
    }

    async fn snapshots(self: Rc<Self>, mut random: Rng) {
        for _ in 0..random.usize(1..6) {
            self.sim.clock().sleep(Duration::from_micros(random.u64(..2000))).await;
            let count = self.log.borrow().asked.len();
            match random.u8(..2) {
                0 if count > 0 => self.delete(random.usize(..count), &mut random).await,
                _ => self.take(&mut random).await,
            }
        }
    }
}

/// How long the caller waits for a change of the snapshots.
fn patience(random: &mut Rng) -> Duration {
    match random.u8(..3) {
        0 => Duration::from_micros(random.u64(..3000)),
        _ => Duration::MAX,
    }
}

fn zeros(range: ByteRange, random: &mut Rng) -> Request {
    let unmap = [Unmap::Allowed, Unmap::Forbidden][random.usize(..2)];
    let (durability, fallback) = (Durability::None, Fallback::Allowed);
    Request::WriteZeroes { range, unmap, fallback, durability }
}

/// Whether sectors hold what they may hold at a moment: every write up to `began` that `must` be
/// there, none that began after `ended`.
fn judge(
    found: &[u8],
    log: &[Write],
    (began, ended): (Duration, Duration),
    must: impl Fn(&Write) -> bool,
) -> Result<(), String> {
    for (sector, bytes) in (0..WRITTEN).zip(found.chunks_exact(SECTOR as usize)) {
        if bytes.chunks_exact(8).any(|word| *word != bytes[..8]) {
            return Err(format!("a torn sector {sector}"));
        }
        let number = u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let touches = |one: &&Write| (one.first..one.first + one.count).contains(&sector);
        let write = match number {
            0 => None,
            number => Some(log.get(number - 1).filter(touches)),
        };
        if write.is_some_and(|write| write.is_none_or(|write| write.began > ended)) {
            return Err(format!("sector {sector} holds {number}"));
        }
        let write = write.flatten();
        for lost in log.iter().filter(touches).filter(|one| must(one)) {
            let is_old = lost.ended.is_some_and(|ended| ended < began);
            let is_newer = |one: &Write| one.ended.is_none_or(|end| end >= lost.began);
            if is_old && !write.is_some_and(is_newer) {
                return Err(format!("sector {sector} holds {number} and has lost {lost:?}"));
            }
        }
    }
    Ok(())
}

async fn read_all(disk: &Disk<SimDisk>) -> Result<Vec<u8>, String> {
    let mut buffer = Buffer::new((SECTORS * SECTOR) as usize);
    let read = Request::Read { offset: 0, into: buffer.lend() };
    disk.submit(read).await.map_err(|error| format!("cannot be read: {error}"))?;
    Ok(buffer.bytes().to_vec())
}

/// The fault of the image that was left at this time.
fn recover(image: Vec<u8>, state: ImageState, log: &Log, now: Duration) -> Result<Vec<u8>, String> {
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain_config(), image);
    let log = log.clone();
    sim.block_on(async move {
        let opened = Qcow2::open(storage.clone(), qcow2::OpenOptions::default()).await;
        let opened = opened.map_err(|error| format!("cannot be opened: {error}"))?;
        let report = qcow2::check(&opened).await.map_err(|error| error.to_string())?;
        if report.corruptions > 0 || (state == ImageState::Closed && report.leaks > 0) {
            return Err(format!("{state:?}: {} leaks, {:?}", report.leaks, report.problems));
        }
        let there = opened.snapshots().list().await.map_err(|error| error.to_string())?;
        drop(opened);
        for one in &log.asked {
            let is_there = there.iter().any(|snapshot| snapshot.name == one.name);
            let is_wrong = match (one.answered, one.deleted) {
                (Some((_, false)), _) | (_, Some(true)) => is_there,
                (Some((_, true)), None) => !is_there,
                (None, _) | (_, Some(false)) => false,
            };
            if is_wrong {
                return Err(format!("{one:?}, and it is {is_there} that it is there"));
            }
            if !is_there {
                continue;
            }
            let (format, options) = (ImageFormat::Qcow2, Options::default());
            let view = Image::open_snapshot(storage.clone(), format, options, &one.name).await;
            let view = view.map_err(|error| format!("{one:?}: {error}"))?;
            let found = read_all(&Disk::new(view)).await?;
            let ended = one.answered.map_or(now, |(answered, _)| answered);
            judge(&found, &log.writes, (one.began, ended), |_| true)
                .map_err(|why| format!("{one:?}: {why}"))?;
        }
        let disk = Disk::open(storage, ImageFormat::Qcow2, Options::default()).await;
        let found = read_all(&disk.map_err(|error| error.to_string())?).await?;
        let must = |one: &Write| state == ImageState::Closed || one.durability != Durability::None;
        judge(&found, &log.writes, (now, now), must).map_err(|why| format!("the disk: {why}"))?;
        Ok(found)
    })
}

fn explore(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config::random(&mut random);
    let options = create_options(config.alignment.offset.into(), &mut random);
    let fresh = SimDisk::new(&sim, plain_config(), Vec::new());
    let made = fresh.clone();
    sim.block_on(async move { qcow2::create(&made, &options).await }).expect("a new image");
    let storage = SimDisk::new(&sim, config, fresh.content());
    let opened = storage.clone();
    let disk = sim
        .block_on(async move { Disk::open(opened, ImageFormat::Qcow2, Options::default()).await })
        .map_err(|error| error.to_string())?;
    let world = Rc::new(World { sim: sim.clone(), disk, log: RefCell::default() });
    let mut tasks: Vec<_> = (0..random.usize(1..4))
        .map(|_| sim.spawn(World::guest(Rc::clone(&world), random.fork())))
        .collect();
    for _ in 0..random.usize(1..3) {
        tasks.push(sim.spawn(World::snapshots(Rc::clone(&world), random.fork())));
    }
    let mut report = Report::default();
    let mut last = (0, 0);
    while sim.step() {
        let counts = storage.counts();
        if counts == last || random.u8(..4) != 0 {
            continue;
        }
        last = counts;
        let (left, log) = (storage.crash(&mut random), world.log.borrow().clone());
        let found = recover(left.clone(), ImageState::Crashed, &log, world.now())?;
        report.crashes += 1;
        if random.u32(..).is_multiple_of(JURY.one_in()) {
            JURY.ask(&left, None, ImageState::Crashed, &found)?;
        }
    }
    if tasks.iter().any(|task| task.output().is_none()) {
        return Err("somebody waits for ever".to_owned());
    }
    let closing = Rc::clone(&world);
    sim.block_on(async move { closing.disk.close().await }).map_err(|error| error.to_string())?;
    let log = world.log.borrow().clone();
    let found = recover(storage.content(), ImageState::Closed, &log, world.now())?;
    if random.u32(..).is_multiple_of(JURY.one_in()) {
        JURY.ask(&storage.content(), None, ImageState::Closed, &found)?;
    }
    Ok(report)
}

#[test]
fn crash_at_every_point_of_snapshots_beside_guests() {
    let test = "crash_at_every_point_of_snapshots_beside_guests";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 150, explore);
    eprintln!("{report:?}, qemu-img was shown {}", JURY.asked());
}
