//! Processes that serve the same disks one after the other, and end in any way at any moment.
//!
//! A process dies, or the power is lost, at a chosen step, which may be during start or close. A
//! step is a storage operation that starts or ends, or a store into the memory that outlives
//! processes. The next process starts with the disks and memory that are left. It must find every
//! answered change after a death, and every durable change after a loss of power, however earlier
//! processes ended. Then its guests continue.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result};
use fastrand::Rng;

use crate::guests::{Guests, Limits, Record};
use crate::model::{Model, Remains};
use crate::workload::{PLAIN_FAULTS, RARE_FAULTS, add_faults, add_late_operations};
use crate::{
    Config, Faults, ImageState, Report, Sim, SimDisk, SimMemory, SystemUnderTest, Workload,
};

/// A service that is started again when its process has ended.
pub trait Service: 'static {
    /// The system that a started process serves.
    type System: SystemUnderTest;

    /// How many words of memory outlive a process.
    fn memory_words(&self) -> usize;

    /// Whether every answered change outlives the process, and not only the durable ones.
    fn keeps_answered(&self) -> bool;

    /// Starts a process. It gets the disks and the memory as the last one left them.
    fn start(&self, host: Host) -> impl Future<Output = Result<Self::System>> + 'static;

    /// Whether the host's disk is a device without space for what a start may have to write. Only
    /// then may the start of a process fail with ENOSPC.
    fn is_full(&self, _host: &Host) -> bool {
        false
    }

    /// Checks that the images of the [`Host`]'s disks, in their order, are consistent. A
    /// [closed](ImageState::Closed) image must have no leaks either.
    ///
    /// # Errors
    /// The inconsistency, in words.
    fn check(&self, images: &[Vec<u8>], state: ImageState) -> std::result::Result<(), String>;
}

/// The host of a process: the simulation is the process, the rest outlives it.
#[derive(Clone)]
pub struct Host {
    /// The process.
    pub sim: Sim,
    /// The disk with the image.
    pub disk: SimDisk,
    /// Other disks that belong to it, such as a data file.
    pub others: Vec<SimDisk>,
    /// Memory of [`Service::memory_words`] words. A loss of power and an orderly end clear it to
    /// zeros.
    pub memory: Arc<SimMemory>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Died,
    LostPower,
    Closed,
}

/// Explores processes that serve the images that `prepare` makes; `seed` decides all choices.
/// `prepare` gets the disk's properties and the guest's bytes, and returns the service and its
/// images. The first image holds these bytes.
///
/// # Errors
/// The first violation of the model, in words.
pub fn explore_restarts<T: Service>(
    seed: u64,
    workload: &Workload,
    prepare: impl FnOnce(&Config, Vec<u8>, &mut Rng) -> (T, Vec<Vec<u8>>),
) -> std::result::Result<Report, String> {
    let mut random = Rng::with_seed(seed);
    let mut config = Config::random(&mut random);
    let size = workload.any_size(&mut random);
    let (model, content) = Model::new(size);
    let (service, mut images) = prepare(&config, content, &mut random);
    let data = images.split_off(1);
    let mut image = images.remove(0);
    let others_config = config.clone();
    let is_device = workload.any_device(&mut config, &mut image, size, &mut random);
    let sim = Sim::new(random.u64(..));
    let host = Host {
        disk: SimDisk::new(&sim, config.clone(), image),
        others: data
            .into_iter()
            .map(|data| SimDisk::new(&sim, others_config.clone(), data))
            .collect(),
        memory: Arc::new(SimMemory::new(&sim, service.memory_words())),
        sim,
    };
    let record = Rc::new(RefCell::new(Record::new(model)));
    let block = u64::from(config.alignment.offset);
    let late = Rng::with_seed(!seed);
    let mut run = Run { service, workload, is_device, block, random, late, record };
    match run.live_all(host) {
        Ok(()) => Ok(run.record.borrow().report),
        Err(violation) => Err(format!(
            "{violation}\non {size} bytes of {config:?}\n{}",
            run.record.borrow().history
        )),
    }
}

struct Run<'a, T> {
    service: T,
    workload: &'a Workload,
    is_device: bool,
    block: u64,
    random: Rng,
    /// PRNG for slow operations and rare faults, separate so that it does not change other choices.
    late: Rng,
    record: Rc<RefCell<Record>>,
}

impl<T: Service> Run<'_, T> {
    /// Runs one process after the other. The last one has no faults and is not killed.
    fn live_all(&mut self, mut host: Host) -> std::result::Result<(), String> {
        let count = self.random.usize(1..self.workload.processes.max(2));
        let mut last_log = Vec::new();
        for left in (0..=count).rev() {
            let outcome = self.live(&host, left == 0);
            let now = host.sim.clock().now();
            let end = match outcome {
                Ok(end) => end,
                Err(violation) => {
                    self.record.borrow_mut().history.note(now, "the violation");
                    host.sim.drop_tasks();
                    let log = host.disk.take_log();
                    return Err(format!(
                        "{violation}\noperations of the process before: {last_log:?}\n\
                         operations: {log:?}"
                    ));
                }
            };
            last_log = host.disk.take_log();
            let step = host.sim.steps();
            self.record.borrow_mut().history.note(now, format!("process {end:?} at step {step}"));
            host = self.end(host, end);
        }
        Ok(())
    }

    /// The host as the next process finds it.
    fn end(&mut self, host: Host, end: End) -> Host {
        host.sim.kill();
        let sim = Sim::new(self.random.u64(..));
        let random = &mut self.random;
        let mut next = |disk: &SimDisk| match end {
            End::LostPower => disk.after_power_loss(&sim, random),
            End::Died | End::Closed => disk.after_death(&sim, random),
        };
        let (disk, others) = (next(&host.disk), host.others.iter().map(&mut next).collect());
        let memory = match end {
            End::Died => host.memory.after_death(&sim),
            End::LostPower | End::Closed => SimMemory::new(&sim, self.service.memory_words()),
        };
        host.sim.drop_tasks();
        let mut record = self.record.borrow_mut();
        match end {
            End::Died => record.report.deaths += 1,
            End::LostPower => record.report.crashes += 1,
            End::Closed => {}
        }
        record.model.end_process(match end {
            End::LostPower => Remains::Stable,
            End::Died if !self.service.keeps_answered() => Remains::Durable,
            End::Died | End::Closed => Remains::Answered,
        });
        Host { sim, disk, others, memory: Arc::new(memory) }
    }

    /// The life of one process. `Err` is a violation.
    fn live(&mut self, host: &Host, is_last: bool) -> std::result::Result<End, String> {
        if !is_last {
            let limit = 1 << self.random.u32(..=10);
            host.sim.kill_at(self.random.u64(..limit));
        }
        let has_faults =
            self.workload.faults == Faults::Sometimes && !is_last && self.random.u8(..4) == 0;
        for disk in [&host.disk].into_iter().chain(&host.others) {
            if has_faults {
                add_faults(disk, &PLAIN_FAULTS, &mut self.random);
                add_faults(disk, &RARE_FAULTS, &mut self.late);
            }
            add_late_operations(disk, &mut self.late);
        }
        let limits = Limits {
            block: self.block,
            may_fail: has_faults || self.is_device,
            cancel_probability: self.workload.any_cancellation(&mut self.random),
        };
        let Some(guests) = self.start(host, limits, has_faults)? else {
            return Ok(self.any_violent_end());
        };
        let mut tasks = guests.spawn(self.workload, &mut self.random);
        if self.random.u8(..4) == 0 {
            tasks.push(host.sim.spawn(Rc::clone(&guests).maintain_task(self.random.fork())));
        }
        self.crash_sometimes(host, &guests)?;
        if host.sim.is_dead() {
            return Ok(self.any_violent_end());
        }
        let stuck = tasks.iter().filter(|task| task.output().is_none()).count();
        if stuck > 0 {
            return Err(format!("{stuck} tasks wait for ever"));
        }
        if !is_last && self.random.bool() {
            return Ok(self.any_violent_end());
        }
        self.close(host, &guests, limits)
    }

    /// Starts a process. `None` if it died during the start, or failed for a permitted reason: a
    /// planned fault, or a full device.
    fn start(
        &mut self,
        host: &Host,
        limits: Limits,
        has_faults: bool,
    ) -> std::result::Result<Option<Rc<Guests<T::System>>>, String> {
        self.service.check(&host.contents(), ImageState::Crashed)?;
        let starting = host.sim.spawn(self.service.start(host.clone()));
        host.sim.run();
        let system = match (starting.output(), host.sim.is_dead()) {
            (_, true) => return Ok(None),
            (None, false) => return Err("a start waits for ever".into()),
            (Some(Err(_)), false) if has_faults => return Ok(None),
            (Some(Err(error)), false) if self.lacks_room(host, &error) => return Ok(None),
            (Some(Err(error)), false) => return Err(format!("cannot start: {error}")),
            (Some(Ok(system)), false) => system,
        };
        let guests = Rc::new(Guests::new(system, &host.sim, limits, &self.record));
        let reader = Rc::clone(&guests);
        let reading = host.sim.spawn(async move { reader.read_all().await });
        host.sim.run();
        let found = match (reading.output(), host.sim.is_dead()) {
            (_, true) => return Ok(None),
            (None, false) => return Err("a read waits for ever".into()),
            (Some(Err(_)), false) if has_faults => return Ok(None),
            (Some(found), false) => found.map_err(|error| format!("cannot be read: {error}"))?,
        };
        self.record.borrow_mut().model.begin_process(&found)?;
        self.service.check(&host.contents(), ImageState::Crashed)?;
        Ok(Some(guests))
    }

    fn lacks_room(&self, host: &Host, error: &Error) -> bool {
        self.is_device && error.kind() == ErrorKind::NoSpace && self.service.is_full(host)
    }

    /// Runs until nothing more happens, or the process dies. At some random steps, checks what a
    /// loss of power would leave.
    fn crash_sometimes(
        &mut self,
        host: &Host,
        guests: &Guests<T::System>,
    ) -> std::result::Result<(), String> {
        while host.sim.step() {
            let mut record = self.record.borrow_mut();
            if let Some(violation) = record.violation.take() {
                return Err(violation);
            }
            if self.random.u8(..64) == 0 && !host.sim.is_dead() {
                let image = host.disk.crash(&mut self.random);
                let found = guests.system.recover(image, ImageState::Crashed)?;
                record.model.check_crash(&found)?;
                record.report.crashes += 1;
            }
        }
        match self.record.borrow_mut().violation.take() {
            Some(violation) => Err(violation),
            None => Ok(()),
        }
    }

    /// An orderly end, unless the process dies meanwhile.
    fn close(
        &mut self,
        host: &Host,
        guests: &Rc<Guests<T::System>>,
        limits: Limits,
    ) -> std::result::Result<End, String> {
        let closing = Rc::clone(guests);
        let closed = host.sim.spawn(async move { closing.system.close().await });
        self.crash_sometimes(host, guests)?;
        match (closed.output(), host.sim.is_dead()) {
            (_, true) => return Ok(self.any_violent_end()),
            (None, false) => return Err("closing waits for ever".into()),
            // The process ends even though its close failed.
            (Some(Err(_)), false) if limits.may_fail => return Ok(self.any_violent_end()),
            (Some(outcome), false) => {
                outcome.map_err(|error| format!("closing failed: {error}"))?
            }
        }
        let mut record = self.record.borrow_mut();
        let flushing = record.model.begin_flush();
        record.model.flushed(&flushing);
        // Processes that died before may have left leaks.
        self.service.check(&host.contents(), ImageState::Crashed)?;
        Ok(End::Closed)
    }

    fn any_violent_end(&mut self) -> End {
        if self.random.u8(..3) == 0 { End::LostPower } else { End::Died }
    }
}

impl Host {
    /// The bytes that reads of the disks see.
    fn contents(&self) -> Vec<Vec<u8>> {
        [&self.disk].into_iter().chain(&self.others).map(SimDisk::content).collect()
    }
}
