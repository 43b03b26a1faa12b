//! A qcow2 image on a device that a volume manager makes longer whenever it likes: its guests'
//! changes are held where there is no room, none fails, and all come to their end. A loss of power
//! at any moment keeps what a flush has covered. Of what was on the device before, and on what it
//! gets, nothing is ever read.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Unmap};
use blockhouse_disk::{Access, Disk, ImageFormat, OnFull, Options};
use blockhouse_format::qcow2::{self, CreateOptions, Qcow2, Switch};
use blockhouse_sim::{Config, Report, Rng, Sim, SimDisk, Size, for_seeds};
use parking_lot::Mutex;

/// Guests, and bytes of the disk that each has for itself.
const GUESTS: u64 = 4;
const SHARE: u64 = 64 << 10;
const STEPS: u8 = 12;
/// A byte of what was there before.
const STALE: u8 = 0xaa;
const SECTOR: usize = 512;
const LIMIT: Duration = Duration::from_secs(300);

/// The values that a sector may hold: its last one comes last. `None`: anything, after a discard.
#[derive(Clone)]
struct Sector(Vec<Option<u8>>);

/// The values that all sectors of one guest may hold.
type Model = Arc<Mutex<Vec<Sector>>>;

fn sectors_of(range: ByteRange) -> std::ops::Range<usize> {
    (range.offset() % SHARE) as usize / SECTOR
        ..(range.offset() % SHARE + range.length()) as usize / SECTOR
}

/// Of what guests do.
struct Counts {
    running: Cell<u64>,
    requests: Cell<u64>,
}

async fn guest(disk: Arc<Disk<SimDisk>>, first: u64, model: Model, mut random: Rng) {
    for number in 1..=STEPS {
        let start = random.u64(..SHARE / 512) * 512;
        let length = [512, 4096, 20_480][random.usize(..3)].min(SHARE - start);
        let range = ByteRange::between(first + start, first + start + length);
        let (durability, fallback, unmap) = (Durability::None, Fallback::Allowed, Unmap::Allowed);
        let durable = [durability, Durability::Data][random.usize(..2)];
        let (request, value) = match random.u8(..8) {
            0 => (Request::Discard { range, durability }, Some(None)),
            1 => (Request::WriteZeroes { range, unmap, fallback, durability }, Some(Some(0))),
            2 => (Request::Flush, None),
            _ => {
                let mut buffer = Buffer::new(length as usize);
                buffer.bytes_mut().fill(number);
                let (offset, from) = (range.offset(), buffer.lend());
                let durability = durable;
                (Request::Write { offset, from, durability }, Some(Some(number)))
            }
        };
        let is_durable = matches!(&request, Request::Write { durability: Durability::Data, .. });
        let is_flush = matches!(&request, Request::Flush);
        if let Some(value) = value {
            model.lock()[sectors_of(range)].iter_mut().for_each(|sector| sector.0.push(value));
        }
        disk.submit(request).await.unwrap_or_else(|error| panic!("a guest's request: {error}"));
        let settle = |sector: &mut Sector| drop(sector.0.drain(..sector.0.len() - 1));
        let mut model = model.lock();
        match (is_flush, is_durable) {
            (true, _) => model.iter_mut().for_each(settle),
            (_, true) => model[sectors_of(range)].iter_mut().for_each(settle),
            _ => {}
        }
    }
}

/// Makes the device longer at any time, until no guest runs.
async fn lengthen(
    sim: Sim,
    device: SimDisk,
    disk: Arc<Disk<SimDisk>>,
    counts: Rc<Counts>,
    block: u64,
) {
    let mut random = sim.fork_prng();
    let mut longer = 0;
    while counts.running.get() > 0 {
        sim.sleep(Duration::from_micros(random.u64(..4000))).await;
        if random.bool() {
            let bytes = (1 + random.u64(..32)) * 4096_u64.next_multiple_of(block);
            device.lengthen(&vec![STALE; bytes as usize]);
            longer += bytes;
            assert!(longer < 64 << 20, "held for ever: {} requests", disk.hold().count());
        }
        disk.hold().release();
    }
}

async fn compare(disk: &Disk<SimDisk>, models: &[Model], only_last: bool) {
    let mut buffer = Buffer::new((GUESTS * SHARE) as usize);
    disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await.expect("a read");
    let sectors: Vec<_> = models.iter().flat_map(|model| model.lock().clone()).collect();
    for (at, (bytes, Sector(known))) in buffer.bytes().chunks(SECTOR).zip(sectors).enumerate() {
        let known = if only_last { &known[known.len() - 1..] } else { &known[..] };
        for &byte in bytes {
            let is_known = known.iter().any(|one| one.is_none_or(|one| one == byte));
            assert!(is_known, "sector {at}: {byte}, not of {known:?}");
        }
    }
}

struct Scene {
    sim: Sim,
    device: SimDisk,
    models: Vec<Model>,
    counts: Rc<Counts>,
}

/// Has guests change the disk of a new image.
fn begin(seed: u64) -> Scene {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config { size: Size::Fixed, ..Config::random(&mut random) };
    let block = u64::from(config.alignment.offset).max(512);
    let cluster_size = [4096, 16_384, 65_536][random.usize(..3)].max(block);
    let extended_l2 = cluster_size >= 16_384 && random.bool();
    let options = CreateOptions {
        cluster_size,
        refcount_bits: [1, 16, 64][random.usize(..3)],
        extended_l2: if extended_l2 { Switch::On } else { Switch::Off },
        ..CreateOptions::new(GUESTS * SHARE)
    };
    let room = 6 * cluster_size.max(16_384) + random.u64(..SHARE);
    let device = SimDisk::new(&sim, config, vec![STALE; (room / block * block) as usize]);
    let zeros = vec![Sector(vec![Some(0)]); SHARE as usize / SECTOR];
    let models: Vec<Model> = (0..GUESTS).map(|_| Arc::new(Mutex::new(zeros.clone()))).collect();
    let counts = Rc::new(Counts { running: Cell::new(GUESTS), requests: Cell::new(0) });
    let opened = device.clone();
    let disk = sim.block_on(async move {
        qcow2::create(&opened, &options).await.expect("it fits");
        let options = Options { on_full: OnFull::Hold(LIMIT), ..Options::default() };
        let disk = Disk::open(opened, ImageFormat::Qcow2, options).await;
        Arc::new(disk.expect("the new image"))
    });
    for (model, first) in models.iter().zip((0..).step_by(SHARE as usize)) {
        let (disk, model, random) = (Arc::clone(&disk), Arc::clone(model), sim.fork_prng());
        let counts = Rc::clone(&counts);
        sim.spawn(async move {
            guest(disk, first, model, random).await;
            counts.running.set(counts.running.get() - 1);
            counts.requests.set(counts.requests.get() + u64::from(STEPS));
        });
    }
    let manager = lengthen(sim.clone(), device.clone(), Arc::clone(&disk), counts.clone(), block);
    let (last, last_models) = (Arc::clone(&disk), models.clone());
    sim.spawn(async move {
        manager.await;
        assert_eq!(last.hold().count(), 0);
        compare(&last, &last_models, true).await;
        last.close().await.expect("all has its place");
    });
    Scene { sim, device, models, counts }
}

/// Looks at what is left on the device.
fn judge(device: SimDisk, sim: &Sim, models: Vec<Model>, is_closed: bool) {
    let opened = device.clone();
    sim.block_on(async move {
        let image = Qcow2::open(opened, qcow2::OpenOptions::default()).await.expect("an image");
        let report = qcow2::check(&image).await.expect("a check");
        assert_eq!(report.corruptions, 0, "{:?}", report.problems);
        assert!(report.leaks == 0 || !is_closed, "{:?}", report.problems);
    });
    sim.block_on(async move {
        let disk = Disk::open(device, ImageFormat::Qcow2, Options::default()).await;
        compare(&disk.expect("an image"), &models, is_closed).await;
    });
}

fn explore(seed: u64) -> Result<Report, String> {
    let Scene { sim, device, models, counts } = begin(seed);
    let begun = sim.steps();
    sim.run();
    if counts.running.get() > 0 {
        return Err("guests wait for ever".into());
    }
    let is_full = u64::from(device.has_failed());
    let (requests, steps) = (counts.requests.get(), sim.steps());
    sim.drop_tasks();
    let next = Sim::new(seed);
    let mut random = next.fork_prng();
    judge(device.after_power_loss(&next, &mut random), &next, models, true);
    // The same once more, up to any step.
    let Scene { sim, device, models, .. } = begin(seed);
    sim.kill_at(random.u64(begun..steps));
    sim.run();
    let after = device.after_power_loss(&next, &mut random);
    sim.drop_tasks();
    judge(after, &next, models, false);
    Ok(Report { requests, failed: is_full, crashes: 2, ..Report::default() })
}

#[test]
fn changes_wait_for_a_device_that_becomes_longer() {
    let name = "changes_wait_for_a_device_that_becomes_longer";
    let report = for_seeds(env!("CARGO_PKG_NAME"), name, 600, explore);
    assert!(2 * report.failed > report.seeds, "there was room: {report:?}");
}

#[test]
fn a_held_change_fails_when_holding_ends() {
    let sim = Sim::new(1);
    let config = Config { size: Size::Fixed, ..Config::default() };
    let device = SimDisk::new(&sim, config, vec![STALE; 512 << 10]);
    let ending = sim.clone();
    sim.block_on(async move {
        qcow2::create(&device, &CreateOptions::new(1 << 30)).await.expect("it fits");
        let options = Options { on_full: OnFull::Hold(LIMIT), ..Options::default() };
        let disk = Disk::open(device, ImageFormat::Qcow2, options).await.expect("an image");
        let disk = Arc::new(disk);
        let write = |at: u64| {
            let (disk, mut buffer) = (Arc::clone(&disk), Buffer::new(65_536));
            async move {
                let (offset, from) = (at << 16, buffer.lend());
                let outcome =
                    disk.submit(Request::Write { offset, from, durability: Durability::None });
                let outcome = outcome.await;
                // The memory of a request is given back with its answer.
                assert!(!buffer.is_lent());
                outcome
            }
        };
        let mut at = 0;
        let held = loop {
            let task = ending.spawn(write(at));
            let outcome = loop {
                let outcome = task.output();
                if outcome.is_some() || disk.hold().count() > 0 {
                    break outcome;
                }
                ending.sleep(Duration::from_micros(100)).await;
            };
            match outcome {
                Some(outcome) => outcome.expect("there is room"),
                None => break task,
            }
            at += 1;
        };
        assert_eq!((disk.hold().count(), at > 0), (1, true));
        // Neither reads, nor writes to mapped clusters, nor what needs the whole image waits for
        // it.
        write(0).await.expect("it is mapped");
        disk.set_access(Access::ReadOnly).await.expect("nothing is in flight");
        disk.set_access(Access::ReadWrite).await.expect("it can be written to");
        disk.hold().end();
        let error = held.join().await.expect_err("there is no room");
        assert_eq!(error.errno(), blockhouse_core::errno::ENOSPC);
        assert!(write(at).await.is_err() && disk.hold().count() == 0);
        disk.close().await.expect("a flush");
    });
}
