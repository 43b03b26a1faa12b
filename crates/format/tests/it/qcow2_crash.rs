//! Crashes after every storage operation of random workloads on images: what is left behind has no
//! corruption, every sector shows only what was written to it, and nothing that was flushed is
//! lost.
//!
//! At the same moments the process dies instead, while the storage's cache and the redo log stay:
//! then nothing that ended is lost.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::Duration;

use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, Extent, ExtentState, Fua, Result, Storage,
    SyncMode, Unmap, errno,
};
use blockhouse_format::qcow2::{
    Access, Backing, CheckReport, CreateOptions, OpenOptions, Qcow2, Version, check, create,
};
use blockhouse_format::{Abort, Intent, Replay};
use blockhouse_sim::{Config, Fault, OperationKind, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::{has_qemu, read, read_host};

const SECTOR: u64 = 512;

/// The values that a sector may show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    /// The bytes of the write with this number.
    Written(u64),
    Zeros,
    /// The content before, or zeros.
    Discarded,
}

/// The history of each sector, oldest first.
#[derive(Default)]
struct Sector {
    history: Vec<Value>,
    /// How many of the history have ended well, one after the other.
    ended: usize,
    /// Values older than this must not be seen after a crash.
    stable: usize,
    /// Changes that failed or were dropped: they may happen or not, at any time. They are no part
    /// of the history, because what was there before them may still be there after all that
    /// follows.
    floating: Vec<Value>,
}

/// The loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The bytes that are not durable.
    PowerLoss,
    /// The memory of the process.
    ProcessDeath,
}

impl Sector {
    fn begin(&mut self, value: Value) {
        self.history.push(value);
    }

    fn end_well(&mut self) {
        self.ended = self.history.len();
    }

    /// The change that began last with this value failed or was dropped.
    fn give_up(&mut self, value: Value) {
        let begun = self.history.iter().rposition(|&other| other == value).expect("it began");
        self.history.remove(begun);
        self.floating.push(value);
    }

    fn permits(&self, found: Value, end: End) -> bool {
        // A discard may leave the bytes that it found.
        let kept = match end {
            End::PowerLoss => self.stable,
            End::ProcessDeath => self.ended,
        };
        let stable = &self.history[..kept];
        let oldest = stable.iter().rposition(|&value| value != Value::Discarded);
        let mut recent = self.history[oldest.unwrap_or(0)..].iter().chain(&self.floating);
        let is_first = oldest.is_none() && found == Value::Zeros;
        is_first
            || recent.any(|&value| {
                value == found || (value == Value::Discarded && found == Value::Zeros)
            })
    }
}

/// One run: an image on a simulated disk, and what is known of its sectors.
struct World {
    sim: Sim,
    disk: SimDisk,
    image: Qcow2<SimDisk>,
    redo_log: Option<Arc<Vec<AtomicU64>>>,
    sectors: RefCell<Vec<Sector>>,
    writes: Cell<u64>,
    unit: u64,
    impatience: f64,
    may_fail: bool,
    /// Whether some of the crashes are shown to qemu-img.
    asks_qemu: bool,
    has_one_client: bool,
    report: RefCell<Report>,
}

fn sector_bytes(sector: u64, write: u64) -> Vec<u8> {
    [(sector + 1).to_be_bytes(), write.to_be_bytes()].concat().repeat(SECTOR as usize / 16)
}

/// The value in a sector, unless that was never written to it.
fn value_of(sector: u64, bytes: &[u8]) -> Option<Value> {
    if bytes.iter().all(|&byte| byte == 0) {
        return Some(Value::Zeros);
    }
    let write = u64::from_be_bytes(bytes[8..16].try_into().unwrap());
    (bytes == sector_bytes(sector, write)).then_some(Value::Written(write))
}

impl World {
    fn any_range(&self, random: &mut Rng) -> ByteRange {
        let size = self.image.size() / self.unit;
        let start = random.u64(..size);
        let length = match random.u8(..4) {
            0 => random.u64(1..=size),
            1 => random.u64(1..=self.image.cluster_size().div_ceil(self.unit) * 3),
            _ => random.u64(1..=4),
        };
        ByteRange::between(start * self.unit, (start + length).min(size) * self.unit)
    }

    async fn client(self: Rc<Self>, count: usize, mut random: Rng) {
        for _ in 0..count {
            if random.u8(..4) == 0 {
                self.sim.sleep(Duration::from_micros(random.u64(..200))).await;
            }
            match random.u8(..12) {
                0..2 => self.flush(&mut random).await,
                2 => {
                    let _ = self.patiently(self.image.sync_metadata(), &mut random).await;
                }
                3 | 4 => self.read(&mut random).await,
                _ => self.change(&mut random).await,
            }
        }
    }

    /// Reads as slowly as the disk is; whatever is changed meanwhile, no sector shows another's
    /// data.
    async fn read(&self, random: &mut Rng) {
        let range = self.any_range(random);
        let guard = self.image.begin_read();
        let outcome = self.patiently(read(&self.image, range, 0), random).await;
        drop(guard);
        let Some(Ok(bytes)) = outcome else { return };
        for (sector, bytes) in (range.offset() / SECTOR..).zip(bytes.chunks_exact(SECTOR as usize))
        {
            assert!(value_of(sector, bytes).is_some(), "a foreign sector {sector}");
        }
    }

    async fn flush(&self, random: &mut Rng) {
        let ended: Vec<_> = self.sectors.borrow().iter().map(|sector| sector.ended).collect();
        let sync = if random.bool() { SyncMode::Data } else { SyncMode::Full };
        if let Some(Ok(())) = self.patiently(self.image.flush(sync), random).await
            && self.has_one_client
        {
            for (sector, ended) in self.sectors.borrow_mut().iter_mut().zip(ended) {
                sector.stable = sector.stable.max(ended);
            }
        }
    }

    async fn change(&self, random: &mut Rng) {
        let range = self.any_range(random);
        let number = self.writes.get() + 1;
        self.writes.set(number);
        let unmap = if random.bool() { Unmap::Allowed } else { Unmap::Forbidden };
        let (value, intent) = match random.u8(..8) {
            0 => (Value::Discarded, Intent::Discard),
            1 | 2 => (Value::Zeros, Intent::Zero(unmap)),
            _ => (Value::Written(number), Intent::Write),
        };
        let affected = || range.offset() / SECTOR..range.end() / SECTOR;
        for sector in affected() {
            self.sectors.borrow_mut()[sector as usize].begin(value);
        }
        let outcome = self.patiently(self.carry_out(range, intent, number), random).await;
        let ended_well = matches!(outcome, Some(Ok(())));
        for index in affected() {
            let sector = &mut self.sectors.borrow_mut()[index as usize];
            if ended_well {
                sector.end_well();
            } else {
                sector.give_up(value);
            }
        }
    }

    /// As an I/O path would, one extent after the other.
    async fn carry_out(&self, range: ByteRange, intent: Intent, number: u64) -> Result<()> {
        let mut rest = range;
        while !rest.is_empty() {
            let extent = self.image.map(rest, intent).await?;
            rest = rest.skip(extent.guest.length());
            let prepared = Prepared { image: &self.image, extent, moving: Cell::new(false) };
            let data = match (extent.state, intent) {
                (ExtentState::Mapped { .. }, Intent::Discard) => Durability::None,
                (ExtentState::Mapped { host }, _) => {
                    self.store(&prepared, host, intent, number).await?
                }
                _ => Durability::Data,
            };
            std::mem::forget(prepared);
            self.image.link(extent, data).await?;
        }
        Ok(())
    }

    async fn store(
        &self,
        prepared: &Prepared<'_>,
        host: u64,
        intent: Intent,
        number: u64,
    ) -> Result<Durability> {
        let Extent { guest, alloc_range: whole, .. } = prepared.extent;
        let (image, storage) = (&self.image, self.image.storage());
        let head = ByteRange::between(whole.offset(), guest.offset());
        let tail = ByteRange::between(guest.end(), whole.end());
        let mut bytes = read(image, head, 0).await?;
        for sector in guest.offset() / SECTOR..guest.end() / SECTOR {
            match intent {
                Intent::Write => bytes.extend(sector_bytes(sector, number)),
                _ => bytes.resize(bytes.len() + SECTOR as usize, 0),
            }
        }
        bytes.extend(read(image, tail, 0).await?);
        let mut buffer = Buffer::new(bytes.len());
        buffer.bytes_mut().copy_from_slice(&bytes);
        // A durable write that fails is a failed flush for all that lies around it; the flush
        // tracker remembers that, and this test has no tracker.
        let may_be_durable = storage.capabilities().fua == Fua::Native && !self.may_fail;
        let durability = if may_be_durable && number.is_multiple_of(3) {
            Durability::Data
        } else {
            Durability::None
        };
        prepared.moving.set(true);
        let outcome = storage.write(host - head.length(), buffer.lend(), durability).await;
        prepared.moving.set(false);
        outcome.map(|()| durability)
    }

    /// The outcome, or `None` if it was dropped.
    async fn patiently<T>(
        &self,
        operation: impl Future<Output = Result<T>>,
        random: &mut Rng,
    ) -> Option<Result<T>> {
        if random.f64() >= self.impatience {
            let outcome = operation.await;
            self.report.borrow_mut().requests += 1;
            self.report.borrow_mut().failed += u64::from(outcome.is_err());
            return Some(outcome);
        }
        self.report.borrow_mut().cancelled += 1;
        let mut operation = pin!(operation);
        let mut alarm = pin!(self.sim.sleep(Duration::from_micros(random.u64(..300))));
        poll_fn(|context| match operation.as_mut().poll(context) {
            Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
            Poll::Pending => alarm.as_mut().poll(context).map(|()| None),
        })
        .await
    }

    /// Checks what a crash now may leave behind.
    fn crash(&self, random: &mut Rng) -> Result<(), String> {
        self.lose_power(random)?;
        match &self.redo_log {
            Some(log) => self.die(log),
            None => Ok(()),
        }
    }

    fn lose_power(&self, random: &mut Rng) -> Result<(), String> {
        let left = self.disk.crash(random);
        let (report, bytes) = recover(left.clone(), None)?;
        if report.corruptions > 0 {
            return Err(format!("the image is corrupt: {:?}", report.problems));
        }
        self.report.borrow_mut().crashes += 1;
        if self.asks_qemu && random.u8(..20) == 0 {
            ask_qemu(&left)?;
        }
        self.compare(&bytes, End::PowerLoss)
    }

    /// The process dies, and the next one replays its log.
    fn die(&self, log: &[AtomicU64]) -> Result<(), String> {
        let log: Vec<_> = log.iter().map(|word| AtomicU64::new(word.load(Relaxed))).collect();
        let (report, bytes) = recover(self.disk.content(), Some(log))?;
        if report.corruptions > 0 {
            return Err(format!("the image is corrupt after a replay: {:?}", report.problems));
        }
        self.compare(&bytes, End::ProcessDeath)
    }

    fn compare(&self, bytes: &[u8], end: End) -> Result<(), String> {
        let sectors = self.sectors.borrow();
        for (index, bytes) in bytes.chunks_exact(SECTOR as usize).enumerate() {
            let Some(value) = value_of(index as u64, bytes) else {
                return Err(format!("sector {index} shows what was never written to it"));
            };
            let sector = &sectors[index];
            if self.has_one_client && !sector.permits(value, end) {
                return Err(format!(
                    "{end:?}: sector {index} shows {value:?} of {:?}, ended {}, stable {}, floating {:?}",
                    sector.history, sector.ended, sector.stable, sector.floating
                ));
            }
        }
        Ok(())
    }
}

/// A prepared extent, given back when it is dropped.
struct Prepared<'a> {
    image: &'a Qcow2<SimDisk>,
    extent: Extent,
    moving: Cell<bool>,
}

impl Drop for Prepared<'_> {
    fn drop(&mut self) {
        // Reading the old content leaves nothing in flight that could hurt.
        let why = if self.moving.get() { Abort::InFlight } else { Abort::Ended };
        self.image.abort(self.extent, why);
    }
}

/// Opens what a crash left behind, with the redo log if that is left, too: what a check finds, and
/// the guest's bytes.
fn recover(
    left: Vec<u8>,
    redo_log: Option<Vec<AtomicU64>>,
) -> Result<(CheckReport, Vec<u8>), String> {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, Config::default(), left);
    let opened = sim.block_on(async move {
        let header = read_host(&disk, 72, 8).await?;
        // A dirty image gets its refcounts when it is opened for writing.
        let is_dirty = header[7] & 1 == 1;
        let access =
            if is_dirty || redo_log.is_some() { Access::ReadWrite } else { Access::ReadOnly };
        let options = OpenOptions { access, ..OpenOptions::default() };
        let image = Qcow2::open(disk, options).await?;
        if let Some(log) = redo_log
            && let Replay::Refused { why } = image.redo().replay(&log).await?
        {
            return Err(Error::new(ErrorKind::InvalidInput, format!("the log is refused: {why}")));
        }
        let report = check(&image).await?;
        let all = ByteRange::between(0, image.size());
        let bytes = read(&image, all, 0).await?;
        Ok::<_, blockhouse_core::Error>((report, bytes))
    });
    opened.map_err(|error| format!("what was left behind: {error}"))
}

/// QEMU finds leaks at most, unless the image says itself that its refcounts are late.
fn ask_qemu(left: &[u8]) -> Result<(), String> {
    const IS_DIRTY: usize = 79;
    if left[7] >= 3 && left[IS_DIRTY] & 1 == 1 {
        return Ok(());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image.qcow2");
    std::fs::write(&image, left).expect("a file");
    std::fs::write(folder.path().join("base"), []).expect("a file");
    let output = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&image).output();
    let output = output.expect("qemu-img");
    match output.status.code() {
        Some(0 | 3) => Ok(()),
        _ => Err(format!("qemu-img check: {output:?}")),
    }
}

/// A new image that suits the disk.
fn new_image(config: &Config, random: &mut Rng) -> Vec<u8> {
    let block = u64::from(config.alignment.offset);
    let cluster_size = [512, 512, 1024, 4096, 16_384][random.usize(..5)].max(block);
    let is_v2 = random.u8(..5) == 0;
    let size = (random.u64(8..=120) * 4096).max(2 * block);
    let options = CreateOptions {
        cluster_size,
        version: if is_v2 { Version::V2 } else { Version::V3 },
        refcount_bits: if is_v2 { 16 } else { [1, 16, 64, 64][random.usize(..4)] },
        lazy_refcounts: (!is_v2 && random.u8(..4) == 0).into(),
        extended_l2: (!is_v2 && cluster_size == 16_384 && random.bool()).into(),
        // The part behind reads as zeros here: it counts that zeros must be said.
        backing: (random.u8(..4) == 0)
            .then(|| Backing { name: b"base".to_vec(), format: Some("raw".into()) }),
        ..CreateOptions::new(size)
    };
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move { create(&made, &options).await }).expect("a new image");
    disk.content()
}

/// Lets operations fail. Flushes fail only where no other operation runs at the same time: the
/// flush tracker, which is not here, is what distrusts a flush that runs beside a failing one.
fn add_faults(disk: &SimDisk, is_alone: bool, random: &mut Rng) {
    let kinds = [OperationKind::Read, OperationKind::Write, OperationKind::Discard];
    let flushes = [OperationKind::DurableWrite, OperationKind::Flush];
    let flushes = flushes.into_iter().filter(|_| is_alone);
    for kind in kinds.into_iter().chain(flushes) {
        if random.u8(..3) == 0 {
            let errno = if random.bool() { errno::ENOSPC } else { errno::EIO };
            disk.fail(Fault::chance([0.01, 0.1][random.usize(..2)], errno).of(kind));
        }
    }
}

fn explore(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    // FUA is emulated by the flush tracker, and this test has no tracker.
    let config = Config { refuses_fua: false, ..Config::random(&mut random) };
    let content = new_image(&config, &mut random);
    let disk = SimDisk::new(&sim, config.clone(), content);
    let opened = disk.clone();
    let mut options = OpenOptions::default();
    if random.bool() {
        // So small that slices come and go, and rounds make room.
        options.cache_size = 0;
    }
    if random.bool() {
        // A change that frees more than an eighth of the file runs a writeback.
        options.min_waiting_frees = 0;
    }
    let image = sim.block_on(async move { Qcow2::open(opened, options).await });
    let image = image.map_err(|error| error.to_string())?;
    let redo_log = random.bool().then(|| {
        // Some so short that changes wait for room.
        let records = [120, 1000][random.usize(..2)];
        let words = std::iter::repeat_with(AtomicU64::default).take(8 + 4 * records);
        Arc::new(words.collect::<Vec<_>>())
    });
    if let Some(log) = redo_log.clone() {
        image.redo().attach(log);
    }
    let clients = random.usize(1..=4);
    let world = Rc::new(World {
        sim: sim.clone(),
        disk: disk.clone(),
        sectors: RefCell::new((0..image.size() / SECTOR).map(|_| Sector::default()).collect()),
        image,
        redo_log,
        writes: Cell::new(0),
        unit: u64::from(config.alignment.offset).max(SECTOR),
        impatience: [0.0, 0.0, 0.2][random.usize(..3)],
        may_fail: random.u8(..3) == 0,
        asks_qemu: seed.is_multiple_of(10) && has_qemu(),
        has_one_client: clients == 1,
        report: RefCell::default(),
    });
    if world.may_fail {
        add_faults(&disk, clients == 1 && world.impatience == 0.0, &mut random);
    }
    let tasks: Vec<_> = (0..clients)
        .map(|_| sim.spawn(world.clone().client(random.usize(1..=12), random.fork())))
        .collect();
    let mut last = None;
    while sim.step() {
        let moment = disk.counts();
        if last.replace(moment) != Some(moment) {
            world.crash(&mut random).map_err(|what| format!("{what}; {config:?}"))?;
        }
    }
    let stuck = tasks.iter().filter(|task| task.output().is_none()).count();
    if stuck > 0 {
        return Err(format!("{stuck} clients wait for ever; {config:?}"));
    }
    finish(&world, &disk, &mut random)?;
    Ok(*world.report.borrow())
}

/// Closes the image, with a crash at every operation: unless something failed or was dropped,
/// nothing leaks.
fn finish(world: &Rc<World>, disk: &SimDisk, random: &mut Rng) -> Result<(), String> {
    disk.clear_faults();
    let closing = Rc::clone(world);
    let closed = world.sim.spawn(async move { closing.image.close().await });
    let mut last = None;
    while world.sim.step() {
        let moment = disk.counts();
        if last.replace(moment) != Some(moment) {
            world.crash(random).map_err(|what| format!("{what}, while it was closed"))?;
        }
    }
    let closed = closed.output().ok_or("closing waits for ever")?;
    let was_smooth = world.report.borrow().cancelled == 0;
    match closed {
        Ok(()) => {
            let (report, _) = recover(disk.content(), None)?;
            if report.corruptions > 0 || (was_smooth && report.leaks > 0) {
                return Err(format!("after closing: {report:?}"));
            }
            Ok(())
        }
        // Also where no request failed: a writeback that runs beside the requests tells the next
        // that asks.
        Err(error) if world.may_fail || !was_smooth => {
            let is_remembered = matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace);
            if is_remembered { Ok(()) } else { Err(format!("closing: {error:?}")) }
        }
        Err(error) => Err(format!("closing: {error:?}")),
    }
}

#[test]
fn crash_at_every_operation() {
    for_seeds(env!("CARGO_PKG_NAME"), "crash_at_every_operation", 1500, explore);
}

#[test]
fn a_discard_after_a_failed_write_may_leave_what_was_there_before_both() {
    let mut sector = Sector::default();
    sector.begin(Value::Written(1));
    sector.end_well();
    sector.begin(Value::Written(2));
    sector.give_up(Value::Written(2));
    sector.begin(Value::Discarded);
    sector.end_well();
    for end in [End::PowerLoss, End::ProcessDeath] {
        for found in [Value::Written(1), Value::Written(2), Value::Zeros] {
            assert!(sector.permits(found, end), "{found:?} after {end:?}");
        }
        assert!(!sector.permits(Value::Written(3), end));
    }
}
