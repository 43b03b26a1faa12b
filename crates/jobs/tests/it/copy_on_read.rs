//! Overlays that copy on read, whose guests write and read: a read gets what was written, also
//! where the overlay's host is full, what a crash leaves is the disk, and what was read or
//! announced once is not fetched again. Half of them are streamed meanwhile.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Request, errno};
use blockhouse_disk::{Disk, ExportKind, Options};
use blockhouse_jobs::{JobControl, JobEnd, Stream};
use blockhouse_sim::{
    Fault, OperationKind, Report, Rng, Sim, SimDisk, Task, for_seeds, is_looked_at,
};

use crate::guests::{self, Model, SECTOR};
use crate::scene::{self, Overlay, clock};

/// No run takes as many steps of the simulation.
const MAX_STEPS: u64 = 2_000_000;
/// Reads of a reader.
const READS: u64 = 40;
const READERS: usize = 2;

struct Case {
    sim: Sim,
    model: Rc<Model>,
    overlay: Overlay,
    random: RefCell<Rng>,
}

impl Case {
    fn new(seed: u64) -> Self {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let (model, content) = Model::new(random.u64(9..600), &mut random);
        let (mut making, own) = (random.fork(), sim.clone());
        let overlay = sim.block_on(async move {
            let options = Options { copy_on_read: true, ..Options::default() };
            scene::overlay_with(&own, &mut making, &content, options).await.expect("an overlay")
        });
        Self { sim, model, overlay, random: RefCell::new(random) }
    }

    fn check_crash(&self) -> Result<(), String> {
        let left = self.overlay.storage.crash(&mut self.random.borrow_mut());
        self.model.check(&self.model.answered(), &self.overlay.recover(left)?)
    }

    fn start_reader(&self) -> Task<Result<(), String>> {
        let (sim, disk) = (self.sim.clone(), Arc::clone(&self.overlay.disk));
        let (model, random) = (Rc::clone(&self.model), self.random.borrow_mut().fork());
        let own = self.sim.clone();
        own.spawn(read_on(sim, disk, model, random))
    }

    /// Streams the disk.
    fn start_stream(&self) -> Task<Result<(), String>> {
        let (disk, clock) = (Arc::clone(&self.overlay.disk), clock(&self.sim));
        self.sim.spawn(async move {
            let guard = disk.jobs().begin_populating().await.map_err(|error| error.to_string())?;
            match Stream::new(disk, guard, Arc::new(JobControl::default()), clock).run().await {
                JobEnd::Completed { .. } => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
    }
}

/// Reads random ranges, each of which must have what was written.
pub async fn read_on(
    sim: Sim,
    disk: Arc<Disk<SimDisk>>,
    model: Rc<Model>,
    mut random: Rng,
) -> Result<(), String> {
    let sectors = disk.size() / SECTOR;
    for _ in 0..READS {
        let first = random.u64(..sectors);
        let count = random.u64(1..=(sectors - first).min(60));
        let mut buffer = Buffer::new((count * SECTOR) as usize);
        let range = ByteRange::between(first * SECTOR, (first + count) * SECTOR);
        if random.bool() {
            match disk.submit_from(ExportKind::Nbd, Request::Prefetch { range }).await {
                Err(error) if error.errno() != errno::ENOSPC => return Err(error.to_string()),
                _ => {}
            }
        }
        let since = model.answered();
        let request = Request::Read { offset: first * SECTOR, into: buffer.lend() };
        disk.submit_from(ExportKind::Nbd, request).await.map_err(|error| error.to_string())?;
        model.check_read(first, (&since, &model.written()), buffer.bytes())?;
        sim.sleep(Duration::from_micros(random.u64(..300))).await;
    }
    Ok(())
}

fn copy_on_read(seed: u64) -> Result<Report, String> {
    let case = Case::new(seed);
    // Where the host is full, guests only read.
    let is_full = seed % 4 == 3;
    let (mut guests, mut tasks) = (Vec::new(), Vec::new());
    if is_full {
        let fault = Fault::chance(0.5, errno::ENOSPC).of(OperationKind::Write);
        case.overlay.storage.fail(fault);
    } else {
        guests = guests::start_durable(&case.sim, &case.overlay.disk, &case.model, 40);
        if seed.is_multiple_of(2) {
            tasks.push(case.start_stream());
        }
    }
    tasks.extend((0..READERS).map(|_| case.start_reader()));
    let mut outcomes: Vec<Option<Result<(), String>>> = vec![None; guests.len() + tasks.len()];
    let (mut crashes, mut steps, mut last) = (0, 0_u64, None);
    while !outcomes.iter().all(Option::is_some) {
        let of_guests = guests.iter().map(|guest| {
            guest.output().map(|end: blockhouse_core::Result<()>| end.map_err(|e| e.to_string()))
        });
        let all = of_guests.chain(tasks.iter().map(Task::output));
        outcomes.iter_mut().zip(all).for_each(|(known, new)| *known = known.take().or(new));
        steps += 1;
        if steps > MAX_STEPS || (!case.sim.step() && !outcomes.iter().all(Option::is_some)) {
            return Err("it waits for ever".into());
        }
        let now = case.overlay.storage.counts();
        let is_looked_at = is_looked_at(&mut case.random.borrow_mut(), 6);
        if last.replace(now) != Some(now) && is_looked_at {
            crashes += 1;
            case.check_crash().map_err(|why| format!("a crash: {why}"))?;
        }
    }
    outcomes.into_iter().flatten().collect::<Result<(), _>>()?;
    case.overlay.storage.clear_faults();
    check_fetched_once(&case)?;
    let disk = Arc::clone(&case.overlay.disk);
    let closed = case.sim.block_on(async move { disk.close().await });
    closed.map_err(|error| error.to_string())?;
    case.check_crash().map_err(|why| format!("after it was closed: {why}"))?;
    Ok(Report { crashes, ..Report::default() })
}

/// Whether reading all of the disk asks nothing of the base, when it was read or announced before.
fn check_fetched_once(case: &Case) -> Result<(), String> {
    let size = case.overlay.disk.size();
    let submit = |request| {
        let disk = Arc::clone(&case.overlay.disk);
        let done =
            case.sim.block_on(async move { disk.submit_from(ExportKind::Nbd, request).await });
        done.map_err(|error| error.to_string())
    };
    let read = || {
        let mut buffer = Buffer::new(size as usize);
        submit(Request::Read { offset: 0, into: buffer.lend() })?;
        case.model.check(&case.model.answered(), buffer.bytes())
    };
    if case.random.borrow_mut().bool() {
        submit(Request::Prefetch { range: ByteRange::between(0, size) })?
    } else {
        read()?
    }
    let before = case.overlay.base.counts();
    read()?;
    if case.overlay.base.counts() != before {
        return Err("the base is read again".into());
    }
    Ok(())
}

#[test]
fn crash_at_every_point_of_copies_on_read() {
    let test = "copy_on_read::crash_at_every_point_of_copies_on_read";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 40, copy_on_read);
    eprintln!("{report:?}");
}
