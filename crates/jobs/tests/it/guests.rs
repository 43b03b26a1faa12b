//! Guests that write to a disk all the time, and what the disk has to hold.
//!
//! Each sector is written by one guest alone, as a whole, with a number that no other write has. So
//! a sector is right if it has the last number that was answered, or a later one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Result, Unmap};
use blockhouse_disk::{Disk, ExportKind};
use blockhouse_jobs::JobEnd;
use blockhouse_sim::{Rng, Sim, SimDisk, Task};

pub const SECTOR: u64 = 512;
/// No job takes as many steps of the simulation.
const MAX_STEPS: u64 = 2_000_000;
/// Guests. Sector n is written by guest n / 3 % 3, so that they share granules and blocks.
const GUESTS: u64 = 3;
/// Sectors of one guest that follow each other.
const STRIPE: u64 = 3;

/// The content of a disk's sectors: the numbers that were written, zero for zeros.
pub struct Model {
    sectors: RefCell<Vec<Sector>>,
    next: Cell<u32>,
    /// Whether guests are to end.
    pub is_over: Cell<bool>,
}

/// The numbers written to a sector in order, of which the first that may be there still, and the
/// last that was answered.
#[derive(Clone)]
struct Sector {
    written: Vec<u32>,
    answered: usize,
    /// Whether it was discarded since: then it may hold anything.
    is_discarded: bool,
    /// Whether it ever was.
    was_discarded: bool,
}

impl Model {
    /// Of a disk with random content, which is returned.
    pub fn new(sectors: u64, random: &mut Rng) -> (Rc<Self>, Vec<u8>) {
        let mut bytes = Vec::new();
        let mut next = 1;
        let is_data = random.u8(1..=4);
        let hole_start = random.u64(..sectors);
        let hole = hole_start..random.u64(hole_start..=sectors);
        let sectors = (0..sectors).map(|sector| {
            let is_data = random.u8(..4) < is_data && !hole.contains(&sector);
            let number = if is_data { next } else { 0 };
            next += 1;
            bytes.extend(content(number));
            Sector { written: vec![number], answered: 0, is_discarded: false, was_discarded: false }
        });
        let sectors = RefCell::new(sectors.collect());
        let (next, is_over) = (Cell::new(next), Cell::new(false));
        (Rc::new(Self { sectors, next, is_over }), bytes)
    }

    /// The answers until now, for [`check`](Self::check).
    pub fn answered(&self) -> Vec<usize> {
        self.sectors.borrow().iter().map(|sector| sector.answered).collect()
    }

    /// The last changes that were asked for, answered or not, for
    /// [`check_between`](Self::check_between).
    pub fn written(&self) -> Vec<usize> {
        self.sectors.borrow().iter().map(|sector| sector.written.len() - 1).collect()
    }

    /// Whether a disk holds in each sector what was answered at `since`, or something later, and
    /// nothing that was asked for after `until`.
    pub fn check_between(
        &self,
        since: &[usize],
        until: &[usize],
        bytes: &[u8],
    ) -> std::result::Result<(), String> {
        let sectors = self.sectors.borrow();
        for (index, found) in bytes.chunks(SECTOR as usize).enumerate() {
            let allowed = &sectors[index].written[since[index]..=until[index]];
            if !allowed.iter().any(|number| content(*number) == found) {
                let number = u32::from_be_bytes(found[..4].try_into().unwrap());
                return Err(format!("sector {index} has {number}, not one of {allowed:?}"));
            }
        }
        Ok(())
    }

    /// Whether a disk holds in each sector what was answered at `since`, or something later.
    pub fn check(&self, since: &[usize], bytes: &[u8]) -> std::result::Result<(), String> {
        for (index, (sector, since)) in self.sectors.borrow().iter().zip(since).enumerate() {
            let start = index * SECTOR as usize;
            let Some(found) = bytes.get(start..start + SECTOR as usize) else {
                return Err(format!("it ends before sector {index}"));
            };
            let is_known = !sector.is_discarded;
            if is_known && !sector.written[*since..].iter().any(|number| content(*number) == found)
            {
                let number = u32::from_be_bytes(found[..4].try_into().unwrap());
                return Err(format!(
                    "sector {index} has {number}, not one of {:?}",
                    &sector.written[*since..]
                ));
            }
        }
        Ok(())
    }

    /// As [`check_between`](Self::check_between), of the bytes that were read from sector `first`
    /// on.
    pub fn check_read(
        &self,
        first: u64,
        (since, until): (&[usize], &[usize]),
        bytes: &[u8],
    ) -> std::result::Result<(), String> {
        let sectors = self.sectors.borrow();
        for (index, found) in (first as usize..).zip(bytes.chunks(SECTOR as usize)) {
            let allowed = &sectors[index].written[since[index]..=until[index]];
            let is_known = !sectors[index].was_discarded;
            if is_known && !allowed.iter().any(|number| content(*number) == found) {
                let number = u32::from_be_bytes(found[..4].try_into().unwrap());
                return Err(format!("sector {index} has {number}, not one of {allowed:?}"));
            }
        }
        Ok(())
    }

    fn begin(&self, first: u64, count: u64, number: u32) {
        let mut sectors = self.sectors.borrow_mut();
        for index in first..first + count {
            sectors[index as usize].written.push(number);
        }
    }

    fn discard(&self, first: u64, count: u64) {
        let mut sectors = self.sectors.borrow_mut();
        for index in first..first + count {
            let sector = &mut sectors[index as usize];
            (sector.is_discarded, sector.was_discarded) = (true, true);
        }
    }

    fn end(&self, first: u64, count: u64) {
        let mut sectors = self.sectors.borrow_mut();
        for index in first..first + count {
            let sector = &mut sectors[index as usize];
            sector.answered = sector.written.len() - 1;
            sector.is_discarded = false;
        }
    }
}

fn content(number: u32) -> Vec<u8> {
    number.to_be_bytes().repeat(SECTOR as usize / 4)
}

/// The habits of guests.
#[derive(Clone, Copy, Debug)]
struct Habits {
    /// Changes of each guest, at most.
    requests: u64,
    /// Whether every change is durable when it is answered.
    is_durable: bool,
    /// Whether they discard, too.
    discards: bool,
}

/// Starts all guests: each makes up to `requests` changes, all of which must succeed.
pub fn start(
    sim: &Sim,
    disk: &Arc<Disk<SimDisk>>,
    model: &Rc<Model>,
    requests: u64,
) -> Vec<Task<Result<()>>> {
    start_all(sim, disk, model, Habits { requests, is_durable: false, discards: false })
}

/// As [`start`], with changes that are durable when they are answered, and discards among them.
pub fn start_durable(
    sim: &Sim,
    disk: &Arc<Disk<SimDisk>>,
    model: &Rc<Model>,
    requests: u64,
) -> Vec<Task<Result<()>>> {
    start_all(sim, disk, model, Habits { requests, is_durable: true, discards: true })
}

fn start_all(
    sim: &Sim,
    disk: &Arc<Disk<SimDisk>>,
    model: &Rc<Model>,
    habits: Habits,
) -> Vec<Task<Result<()>>> {
    let guest = |guest| {
        let (sim, disk, model) = (sim.clone(), Arc::clone(disk), Rc::clone(model));
        let random = sim.fork_prng();
        let own = sim.clone();
        own.spawn(run(sim, disk, model, (guest, habits), random))
    };
    (0..GUESTS).map(guest).collect()
}

async fn run(
    sim: Sim,
    disk: Arc<Disk<SimDisk>>,
    model: Rc<Model>,
    (guest, habits): (u64, Habits),
    mut random: Rng,
) -> Result<()> {
    let sectors = disk.size() / SECTOR;
    let pause = random.u64(1..500);
    for _ in 0..habits.requests {
        if model.is_over.get() {
            break;
        }
        let stripe = random.u64(..sectors / STRIPE / GUESTS) * GUESTS + guest;
        let first = stripe * STRIPE + random.u64(..STRIPE);
        let count = random.u64(1..=STRIPE - first % STRIPE);
        let range = ByteRange::between(first * SECTOR, (first + count) * SECTOR);
        let durability = if habits.is_durable {
            Durability::Data
        } else {
            [Durability::None, Durability::Data][random.usize(..2)]
        };
        if habits.discards && random.u8(..8) == 0 {
            model.discard(first, count);
            disk.submit_from(ExportKind::Nbd, Request::Discard { range, durability }).await?;
            continue;
        }
        let is_zero = random.u8(..4) == 0;
        let number = if is_zero { 0 } else { model.next.replace(model.next.get() + 1) };
        model.begin(first, count, number);
        if is_zero {
            let (unmap, fallback) = (Unmap::Allowed, Fallback::Allowed);
            let request = Request::WriteZeroes { range, unmap, fallback, durability };
            disk.submit_from(ExportKind::Nbd, request).await?;
        } else {
            let mut buffer = Buffer::new(range.length() as usize);
            buffer.bytes_mut().copy_from_slice(&content(number).repeat(count as usize));
            let (offset, from) = (range.offset(), buffer.lend());
            let request = Request::Write { offset, from, durability };
            disk.submit_from(ExportKind::Nbd, request).await?;
        }
        model.end(first, count);
        if random.u8(..8) == 0 {
            disk.flush().await?;
        }
        sim.sleep(Duration::from_micros(random.u64(..=pause))).await;
    }
    Ok(())
}

/// All bytes of a disk.
pub async fn read(disk: &Disk<SimDisk>) -> Result<Vec<u8>> {
    let mut buffer = Buffer::new(disk.size() as usize);
    disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await?;
    Ok(buffer.bytes().to_vec())
}

/// Steps of the simulation until guests and a job have ended, with a look at what each leaves. The
/// read disk, which is closed then.
pub fn run_to_end(
    sim: &Sim,
    (disk, guests): (&Arc<Disk<SimDisk>>, &[Task<Result<()>>]),
    job: &Task<JobEnd>,
    mut look: impl FnMut() -> std::result::Result<(), String>,
) -> std::result::Result<Vec<u8>, String> {
    let (mut end, mut outcomes) = (None, vec![None; guests.len()]);
    for _ in 0..MAX_STEPS {
        end = end.or_else(|| job.output());
        for (guest, outcome) in guests.iter().zip(&mut outcomes) {
            let told = || guest.output().map(|end| end.map_err(|error| error.to_string()));
            *outcome = outcome.take().or_else(told);
        }
        if end.is_some() && outcomes.iter().all(Option::is_some) {
            outcomes.into_iter().flatten().collect::<std::result::Result<(), _>>()?;
            if !matches!(end, Some(JobEnd::Completed { .. })) {
                return Err(format!("{end:?}"));
            }
            let disk = Arc::clone(disk);
            let read = sim.block_on(async move {
                let read = read(&disk).await;
                disk.close().await.and(read)
            });
            return read.map_err(|error| error.to_string());
        }
        if !sim.step() {
            break;
        }
        look()?;
    }
    Err("it waits for ever".into())
}
