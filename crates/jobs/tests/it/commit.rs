//! Commits of overlays whose guests write: the guests notice nothing, what a crash leaves is the
//! disk (overlay and base together, or the base alone once that is recorded), and the base alone
//! has everything in the end.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, errno};
use blockhouse_disk::{Disk, FlushPolicy, Options};
use blockhouse_jobs::{Completion, CopyMode, JobControl, JobEnd, Mirror};
use blockhouse_sim::{
    Fault, OperationKind, Report, Rng, Sim, SimDisk, add_late_operations, for_seeds, is_looked_at,
};

use crate::guests::{self, Model};
use crate::scene::{self, Overlay, clock, recover, recover_overlay};

/// No commit takes as many steps of the simulation.
const MAX_STEPS: u64 = 2_000_000;

/// Operations that change the base.
const CHANGES: [OperationKind; 4] = [
    OperationKind::Write,
    OperationKind::DurableWrite,
    OperationKind::WriteZeroes,
    OperationKind::Flush,
];

/// The plan for a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Complete,
    Cancel,
    /// Changes of the base fail.
    Fail,
    /// The disk cannot be recorded as moved.
    FailRecord,
}

/// The planted faults of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    Nothing,
    /// It is recorded that the base is the disk before that has everything.
    EarlyRecord,
    /// Flushes of the base do nothing.
    NoFlush,
}

struct Case {
    sim: Sim,
    plan: Plan,
    planted: Planted,
    mode: CopyMode,
    model: Rc<Model>,
    overlay: Overlay,
    /// Whether it is recorded that the base is the disk.
    is_recorded: Rc<Cell<bool>>,
    random: RefCell<Rng>,
}

impl Case {
    fn new(seed: u64, planted: Planted) -> Self {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let plan = match random.u8(..8) {
            0 => Plan::Cancel,
            1 => Plan::Fail,
            2 => Plan::FailRecord,
            _ => Plan::Complete,
        };
        let sectors = random.u64(9..600);
        let (model, content) = Model::new(sectors, &mut random);
        let mode =
            [CopyMode::Auto, CopyMode::Background, CopyMode::WriteBlocking][random.usize(..3)];
        let (mut making, own) = (random.fork(), sim.clone());
        let overlay = sim.block_on(async move {
            scene::overlay(&own, &mut making, &content).await.expect("an overlay")
        });
        let (is_recorded, random) = (Rc::default(), RefCell::new(random));
        let plan = if planted == Planted::Nothing { plan } else { Plan::Complete };
        Self { sim, plan, planted, mode, model, overlay, is_recorded, random }
    }

    /// Whether what a crash leaves now is the disk.
    fn check_crash(&self) -> Result<(), String> {
        let Overlay { storage, base, base_format, .. } = &self.overlay;
        let mut random = self.random.borrow_mut();
        let below = base.crash(&mut random);
        let found = if self.is_recorded.get() {
            recover(below, *base_format)?
        } else {
            recover_overlay(storage.crash(&mut random), below, *base_format)?
        };
        self.model.check(&self.model.answered(), &found)
    }

    fn start(&self, control: &Arc<JobControl>) -> blockhouse_sim::Task<JobEnd> {
        let Overlay { disk, base, base_format, .. } = &self.overlay;
        let (disk, storage, format) = (Arc::clone(disk), base.clone(), *base_format);
        let (plan, planted, mode, clock) = (self.plan, self.planted, self.mode, clock(&self.sim));
        self.is_recorded.set(planted == Planted::EarlyRecord);
        let (recorded, control) = (Rc::clone(&self.is_recorded), Arc::clone(control));
        let probability = [0.002, 0.02, 0.2][self.random.borrow_mut().usize(..3)];
        self.sim.spawn(async move {
            let flush = match planted {
                Planted::NoFlush => FlushPolicy::Ignore,
                _ => FlushPolicy::Honor,
            };
            let options = Options { flush, ..Options::default() };
            let base = Disk::open(storage.clone(), format, options).await.expect("a base");
            if base.size() < disk.size() {
                base.resize(disk.size()).await.expect("a longer base");
            }
            disk.jobs().attach_base(Arc::new(base)).await.expect("a base that fits");
            disk.jobs().settle_base().await.expect("no limit");
            if plan == Plan::Fail {
                for kind in CHANGES {
                    storage.fail(Fault::chance(probability, errno::EIO).of(kind));
                }
            }
            let job = Mirror::commit(disk, mode, Arc::clone(&control), clock);
            let forgotten = Rc::clone(&recorded);
            let record = move || {
                recorded.set(plan != Plan::FailRecord);
                let outcome = match plan {
                    Plan::FailRecord => Err(Error::new(ErrorKind::Io, "no record")),
                    _ => Ok(()),
                };
                Box::pin(std::future::ready(outcome)) as _
            };
            let job = job.expect("disks that fit").before_switch(record);
            let end = job.source_kept(move || forgotten.set(false)).run().await;
            control.end(end.clone());
            end
        })
    }

    /// Asks for what the plan wants, after a while.
    fn steer(&self, control: &Arc<JobControl>) {
        let (sim, plan) = (self.sim.clone(), self.plan);
        let wait = Duration::from_micros(self.random.borrow_mut().u64(..60_000));
        let control = Arc::clone(control);
        drop(self.sim.spawn(async move {
            sim.sleep(wait).await;
            if plan == Plan::Cancel {
                control.cancel();
            }
            scene::complete(&control, Completion::Switch).await;
        }));
    }

    fn read(&self, disk: &Arc<Disk<SimDisk>>) -> Result<Vec<u8>, String> {
        let disk = Arc::clone(disk);
        self.sim.block_on(async move { guests::read(&disk).await }).map_err(|e| e.to_string())
    }

    fn judge(&self, end: &JobEnd) -> Result<(), String> {
        let now = self.model.answered();
        self.overlay.base.clear_faults();
        self.model.check(&now, &self.read(&self.overlay.disk)?)?;
        let is_complete = matches!(end, JobEnd::Completed { .. });
        if is_complete != self.overlay.disk.is_replaced() || is_complete != self.is_recorded.get() {
            return Err("what is recorded is not the disk".into());
        }
        match (self.plan, end) {
            (Plan::Complete, JobEnd::Completed { .. })
            | (Plan::Cancel, JobEnd::Cancelled)
            | (Plan::FailRecord, JobEnd::Failed(_)) => {}
            // The disk has had failed flushes.
            (Plan::Fail, _) => return Ok(()),
            // The simulation may have the process stand still for longer than the guest may wait.
            (_, JobEnd::Failed(why)) if why.contains("takes longer") => {}
            _ => return Err("another end than planned".into()),
        }
        let disk = Arc::clone(&self.overlay.disk);
        let closed = self.sim.block_on(async move { disk.close().await });
        closed.map_err(|error| error.to_string())?;
        self.check_crash().map_err(|why| format!("after it was closed: {why}"))
    }
}

fn commit(seed: u64) -> Result<Report, String> {
    commit_with(seed, Planted::Nothing)
}

fn commit_with(seed: u64, planted: Planted) -> Result<Report, String> {
    let case = Case::new(seed, planted);
    let told = |why: String| format!("{:?}, {:?}: {why}", case.plan, case.mode);
    let control = Arc::new(JobControl::default());
    let guests = guests::start_durable(&case.sim, &case.overlay.disk, &case.model, 60);
    let mut late = Rng::with_seed(!seed);
    for storage in [&case.overlay.storage, &case.overlay.base] {
        add_late_operations(storage, &mut late);
    }
    let job = case.start(&control);
    case.steer(&control);
    let (mut crashes, mut steps, mut last) = (0, 0_u64, None);
    let (mut ended, mut outcomes) = (None, vec![None; guests.len()]);
    let end = loop {
        ended = ended.or_else(|| job.output());
        for (guest, outcome) in guests.iter().zip(&mut outcomes) {
            let told = || guest.output().map(|end| end.map_err(|error| error.to_string()));
            *outcome = outcome.take().or_else(told);
        }
        // The guests go on for a while.
        if let Some(end) = &ended
            && outcomes.iter().all(Option::is_some)
        {
            break end.clone();
        }
        steps += 1;
        if !case.sim.step() || steps > MAX_STEPS {
            return Err(told(format!("it waits for ever: {:?}", control.stage())));
        }
        let now = (case.overlay.storage.counts(), case.overlay.base.counts());
        // Often enough for each moment to be met by some seed.
        let is_looked_at = is_looked_at(&mut case.random.borrow_mut(), 6);
        if last.replace(now) != Some(now) && is_looked_at {
            crashes += 1;
            let when = format!("a crash while {:?}", control.stage());
            case.check_crash().map_err(|why| told(format!("{when}: {why}")))?;
        }
    };
    for outcome in outcomes.into_iter().flatten() {
        match outcome {
            Ok(()) => {}
            // It goes on with the base, which fails.
            Err(_) if case.plan == Plan::Fail && matches!(end, JobEnd::Completed { .. }) => {}
            Err(error) => return Err(told(format!("a guest has an error: {error}"))),
        }
    }
    case.judge(&end).map_err(|why| told(format!("{end:?}: {why}")))?;
    Ok(Report { crashes, ..Report::default() })
}

#[test]
fn crash_at_every_point_of_a_commit() {
    let test = "commit::crash_at_every_point_of_a_commit";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 40, commit);
    eprintln!("{report:?}");
}

/// Whether the test would find what it is for.
#[test]
fn faults_that_are_planted_are_caught_within_few_seeds() {
    for planted in [Planted::EarlyRecord, Planted::NoFlush] {
        let is_caught = (0..60).any(|seed| commit_with(seed, planted).is_err());
        assert!(is_caught, "{planted:?} is not caught");
    }
}

#[test]
fn a_cancelled_commit_is_made_again() {
    let case = Case::new(11, Planted::Nothing);
    let Overlay { disk, base, base_format, .. } = &case.overlay;
    let (disk, storage, format) = (Arc::clone(disk), base.clone(), *base_format);
    let (sim, clock) = (case.sim.clone(), clock(&case.sim));
    let ends = case.sim.block_on(async move {
        let base = Disk::open(storage, format, Options::default()).await.expect("a base");
        if base.size() < disk.size() {
            base.resize(disk.size()).await.expect("a longer base");
        }
        disk.jobs().attach_base(Arc::new(base)).await.expect("a base that fits");
        disk.jobs().settle_base().await.expect("no limit");
        let mut ends = Vec::new();
        for is_cancelled in [true, false] {
            let control = Arc::new(JobControl::default());
            let mode = CopyMode::Auto;
            let job =
                Mirror::commit(Arc::clone(&disk), mode, Arc::clone(&control), Rc::clone(&clock));
            if is_cancelled {
                assert!(control.cancel());
            }
            control.complete(Completion::Switch);
            ends.push(job.expect("disks that fit").run().await);
            sim.sleep(Duration::from_millis(1)).await;
        }
        ends
    });
    assert!(matches!(ends[..], [JobEnd::Cancelled, JobEnd::Completed { .. }]), "{ends:?}");
    let found = recover(case.overlay.base.content(), case.overlay.base_format).unwrap();
    assert_eq!(case.model.check(&case.model.answered(), &found), Ok(()));
}
