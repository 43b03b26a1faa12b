//! Random requests against anything built on a simulated disk, and a crash at every point.
//!
//! Several tasks send reads, writes of any alignment, zero writes, discards and flushes, and cancel
//! some of them by dropping their futures. After each step of the simulation that started or ended
//! an operation or a request, the image that a crash would leave is checked against the model.
//! Every read is checked too. At the end no request may still wait.

use std::cell::RefCell;
use std::rc::Rc;

use blockhouse_core::errno;
use fastrand::Rng;

use crate::guests::{Guests, Limits, Record};
use crate::model::Model;
use crate::workload::{PLAIN_FAULTS, RARE_FAULTS, SYNC_FAULTS, add_faults, add_late_operations};
use crate::{
    Config, Fault, Faults, ImageState, OperationKind, Report, Sim, SimDisk, SystemUnderTest,
    Workload,
};

/// Explores the system that `build` makes on a random disk. `seed` decides all choices.
///
/// # Errors
/// The first violation of the model, in words.
pub fn explore<T: SystemUnderTest>(
    seed: u64,
    workload: &Workload,
    build: impl FnOnce(SimDisk, &mut Rng) -> T,
) -> std::result::Result<Report, String> {
    let as_it_is = |_: &Config, content, _: &mut Rng| content;
    explore_image(seed, workload, as_it_is, |_, disk, random| build(disk, random))
}

/// As [`explore`], for a disk with an image format: `encode` turns the guest's bytes into the
/// image. `build` may run the simulation.
///
/// # Errors
/// The errors of [`explore`].
pub fn explore_image<T: SystemUnderTest>(
    seed: u64,
    workload: &Workload,
    encode: impl FnOnce(&Config, Vec<u8>, &mut Rng) -> Vec<u8>,
    build: impl FnOnce(&Sim, SimDisk, &mut Rng) -> T,
) -> std::result::Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let mut config = Config::random(&mut random);
    let size = workload.any_size(&mut random);
    let (model, content) = Model::new(size);
    let mut image = encode(&config, content, &mut random);
    let is_device = workload.any_device(&mut config, &mut image, size, &mut random);
    let disk = SimDisk::new(&sim, config.clone(), image);
    let has_faults = workload.faults == Faults::Sometimes && random.bool();
    let system = build(&sim, disk.clone(), &mut random);
    let limits = Limits {
        block: u64::from(config.alignment.offset),
        may_fail: has_faults || is_device,
        cancel_probability: workload.any_cancellation(&mut random),
    };
    let record = Rc::new(RefCell::new(Record::new(model)));
    let guests = Rc::new(Guests::new(system, &sim, limits, &record));
    let run = Run { guests, sim: sim.clone(), record };
    if has_faults {
        let kinds = [PLAIN_FAULTS.as_slice(), &SYNC_FAULTS].concat();
        add_faults(&disk, &kinds, &mut random);
        run.others().iter().for_each(|disk| add_faults(disk, &kinds, &mut random));
    }
    let mut late = Rng::with_seed(!seed);
    for disk in [disk.clone()].into_iter().chain(run.others()) {
        if has_faults {
            add_faults(&disk, &RARE_FAULTS, &mut late);
        }
        add_late_operations(&disk, &mut late);
    }
    let tasks = run.guests.spawn(workload, &mut random);
    let outcome = run.crash_everywhere(&disk, &mut random);
    let may_close_fail = workload.faults == Faults::Sometimes;
    let stuck = tasks.iter().filter(|task| task.output().is_none()).count();
    let outcome = match outcome {
        Ok(()) if stuck > 0 => Err(format!("{stuck} tasks wait for ever; {config:?}")),
        outcome => outcome.and_then(|()| run.close(&disk, &mut random, may_close_fail)),
    };
    match outcome {
        Ok(()) => Ok(run.record.borrow().report),
        Err(violation) => Err(format!(
            "{violation}\nat {:?} on {size} bytes of {config:?}\nrequests:\n{}operations: {:?}",
            sim.clock().now(),
            run.record.borrow().history,
            disk.take_log()
        )),
    }
}

struct Run<T> {
    guests: Rc<Guests<T>>,
    sim: Sim,
    record: Rc<RefCell<Record>>,
}

impl<T: SystemUnderTest> Run<T> {
    fn others(&self) -> Vec<SimDisk> {
        self.guests.system.others()
    }

    /// Runs to the end. After every step that may have changed the disk or a request, checks what a
    /// crash would leave.
    fn crash_everywhere(&self, disk: &SimDisk, random: &mut Rng) -> Result<(), String> {
        let mut last = None;
        let others = self.others();
        while self.sim.step() {
            let mut record = self.record.borrow_mut();
            if let Some(violation) = record.violation.take() {
                return Err(violation);
            }
            let counts: Vec<_> = others.iter().map(SimDisk::counts).collect();
            let moment = (disk.counts(), counts, record.report.requests + record.report.cancelled);
            if last.as_ref() == Some(&moment) {
                continue;
            }
            last = Some(moment);
            let found = self.guests.system.recover(disk.crash(random), ImageState::Crashed)?;
            record.model.check_crash(&found)?;
            record.report.crashes += 1;
        }
        Ok(())
    }

    /// Closes the system after a clean run, and checks the image that it leaves. If the close of a
    /// storage fails, the system must report the failure, and the image must be complete.
    fn close(&self, disk: &SimDisk, random: &mut Rng, may_fail: bool) -> Result<(), String> {
        if !self.record.borrow().is_clean_run {
            return Ok(());
        }
        let others = self.others();
        for disk in [disk].into_iter().chain(&others) {
            disk.clear_faults();
            if may_fail && random.u8(..4) == 0 {
                disk.fail(Fault::nth(0, errno::EIO).of(OperationKind::Close));
            }
        }
        let guests = Rc::clone(&self.guests);
        let closed = self.sim.spawn(async move {
            guests.system.close().await.map_err(|error| format!("closing failed: {error:?}"))
        });
        self.crash_everywhere(disk, random)?;
        let is_any = |has: fn(&SimDisk) -> bool| has(disk) || others.iter().any(has);
        match closed.output().ok_or("closing waits for ever")? {
            // A sync of background work failed, and no request has reported that.
            Err(_) if is_any(SimDisk::has_failed_sync) => return Ok(()),
            Err(_) if is_any(SimDisk::has_failed_close) => {}
            Ok(()) if is_any(SimDisk::has_failed_close) => {
                return Err("a close that failed was not told".into());
            }
            closed => closed?,
        }
        let found = self.guests.system.recover(disk.crash(random), ImageState::Closed)?;
        let model = &mut self.record.borrow_mut().model;
        let flushing = model.begin_flush();
        model.flushed(&flushing);
        model.check_crash(&found)
    }
}
