//! Mirrors under guests that write, with errors, crashes and reordering: the guest notices nothing,
//! and what is left of the target has the mark, or everything that was answered.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::errno;
use blockhouse_jobs::{Completion, CopyMode, JobControl, JobEnd, JobStage, Mirror, MirrorOptions};
use blockhouse_sim::{Fault, Report, Rng, Sim, add_late_operations, for_seeds, is_looked_at};

use crate::guests::{self, Model, SECTOR};
use crate::scene::{self, Scene, clock, recover};

/// How a mark begins; users may look for it.
const MARK: &[u8] = b"blockhouse: mirror not complete\n";

/// No mirror takes as many steps of the simulation.
const MAX_STEPS: u64 = 2_000_000;

/// The plan for a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Complete,
    Cancel,
    Fail,
}

struct Case {
    sim: Sim,
    random: Rng,
    plan: Plan,
    options: MirrorOptions,
    completion: Completion,
    model: Rc<Model>,
    source: Scene,
    target: Scene,
    /// The target's content before.
    before: Vec<u8>,
}

fn case(seed: u64) -> Case {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    // Blocks of 4096 bytes and stripes of guests fit.
    let sectors = random.u64(1..=4) * 72;
    let (model, content) = Model::new(sectors, &mut random);
    let is_target_zero = random.bool();
    let junk = if is_target_zero { 0 } else { 0x5a };
    let before = vec![junk; (sectors * SECTOR) as usize];
    let plan = [Plan::Complete, Plan::Complete, Plan::Fail, Plan::Cancel][random.usize(..4)];
    let mode = [CopyMode::Auto, CopyMode::Background, CopyMode::WriteBlocking][random.usize(..3)];
    let granularity = [4096, 8192, 65536][random.usize(..3)];
    let backlog = [1, 4096, 16 << 10, 4 << 20][random.usize(..4)];
    let options = MirrorOptions { is_target_zero, mode, granularity, backlog };
    let completion = [Completion::Switch, Completion::HandOver][random.usize(..2)];
    let (mut making, own) = (random.fork(), sim.clone());
    let empty = before.clone();
    let (source, target) = sim.block_on(async move {
        let source = scene::disk(&own, &mut making, &content).await.expect("a source");
        (source, scene::disk(&own, &mut making, &empty).await.expect("a target"))
    });
    Case { sim, random, plan, options, completion, model, source, target, before }
}

/// Looks at what crashes leave of the target.
struct Jury<'a> {
    case: &'a Case,
    control: &'a JobControl,
    random: RefCell<Rng>,
    /// The answered writes when the mark was there last.
    since: RefCell<Vec<usize>>,
    /// How many times it had been postponed when it was asked to complete last.
    postponed_before: Cell<u64>,
}

impl Jury<'_> {
    /// Comes after each step.
    fn note_stage(&self) {
        if self.control.stage() != JobStage::Completing {
            self.postponed_before.set(self.control.postponements());
        }
    }

    /// Whether the target may look complete while the guest goes on with the source: users are told
    /// not to use it until the job is ready again.
    fn may_get_old(&self) -> bool {
        self.control.stage() == JobStage::Completing
            && self.control.postponements() > self.postponed_before.get()
            && self.control.why_postponed().contains("do not use the mirror")
    }

    fn look(&self) -> Result<(), String> {
        if self.may_get_old() {
            return Ok(());
        }
        let Case { target, model, before, .. } = self.case;
        let left = target.storage.crash(&mut self.random.borrow_mut());
        let found = recover(left, target.format)?;
        // Before the mark, the target is what it was. Later the guest may have written the same to
        // its first sector.
        let is_early = matches!(self.control.stage(), JobStage::Running);
        let has_its_first = found[..SECTOR as usize] == before[..SECTOR as usize];
        // A job that was cancelled early enough has written nothing.
        let is_unchanged = (is_early && has_its_first) || found == *before;
        if found.starts_with(MARK) || is_unchanged {
            *self.since.borrow_mut() = model.answered();
            return Ok(());
        }
        model.check(&self.since.borrow(), &found)
    }
}

fn mirror(seed: u64) -> Result<Report, String> {
    let mut case = case(seed);
    let control = Arc::new(JobControl::default());
    let job = start(&case, &control);
    let guests = guests::start(&case.sim, &case.source.disk, &case.model, 100);
    let wait = Duration::from_micros(case.random.u64(..60_000));
    if case.plan == Plan::Fail {
        let probability = [0.002, 0.02, 0.2][case.random.usize(..3)];
        case.target.storage.fail(Fault::chance(probability, errno::EIO));
    }
    let mut late = Rng::with_seed(!seed);
    for storage in [&case.source.storage, &case.target.storage] {
        add_late_operations(storage, &mut late);
    }
    steer(&case, &control, wait);
    let random = RefCell::new(case.random.fork());
    let since = RefCell::new(case.model.answered());
    let postponed_before = Cell::default();
    let jury = Jury { case: &case, control: &control, random, since, postponed_before };
    let mut crashes = 0;
    let mut violation = None;
    let mut steps = 0_u64;
    let mut last = None;
    let end = loop {
        if let Some(end) = job.output() {
            break end;
        }
        steps += 1;
        if !case.sim.step() || steps > MAX_STEPS {
            return Err(format!("{:?}: it waits for ever: {:?}", case.plan, control.stage()));
        }
        jury.note_stage();
        let now = (case.target.storage.counts(), case.source.storage.counts());
        // Often enough for each moment to be met by some seed.
        let is_looked_at = is_looked_at(&mut jury.random.borrow_mut(), 4);
        if last.replace(now) != Some(now) && is_looked_at && violation.is_none() {
            crashes += 1;
            let when =
                format!("a crash at {:?} while {:?}", case.sim.clock().now(), control.stage());
            violation = jury.look().err().map(|why| format!("{when}: {why}"));
        }
    };
    case.model.is_over.set(true);
    let sim = case.sim.clone();
    for guest in guests {
        let outcome = sim.block_on(async move { guest.join().await });
        match outcome {
            Ok(()) => {}
            // Only a disk that was handed over refuses.
            Err(error) if error.to_string().contains("was moved to") => {}
            // It goes on with the target, which fails.
            Err(_) if case.plan == Plan::Fail && matches!(end, JobEnd::Completed { .. }) => {}
            Err(error) => return Err(format!("a guest has an error: {error}")),
        }
    }
    judge(&case, &jury, &end, violation)?;
    Ok(Report { crashes, ..Report::default() })
}

fn start(case: &Case, control: &Arc<JobControl>) -> blockhouse_sim::Task<JobEnd> {
    let (source, target) = (Arc::clone(&case.source.disk), Arc::clone(&case.target.disk));
    let (clock, control, options) = (clock(&case.sim), Arc::clone(control), case.options);
    let told = Arc::clone(&control);
    case.sim.spawn(async move {
        let mirror = Mirror::new(source, target, options, control, clock);
        let end = mirror.expect("disks that fit").run().await;
        told.end(end.clone());
        end
    })
}

/// Asks for what the plan wants, after a while.
fn steer(case: &Case, control: &Arc<JobControl>, wait: Duration) {
    let (sim, plan, completion) = (case.sim.clone(), case.plan, case.completion);
    let control = Arc::clone(control);
    drop(case.sim.spawn(async move {
        sim.sleep(wait).await;
        if plan == Plan::Cancel {
            control.cancel();
        }
        control.pause();
        sim.sleep(Duration::from_micros(100)).await;
        control.resume();
        scene::complete(&control, completion).await;
    }));
}

fn judge(
    case: &Case,
    jury: &Jury<'_>,
    end: &JobEnd,
    violation: Option<String>,
) -> Result<(), String> {
    let told = |why: String| format!("{:?}, {:?}, {end:?}: {why}", case.plan, case.options);
    let now = case.model.answered();
    let content = |scene: &Scene| {
        let disk = Arc::clone(&scene.disk);
        case.sim.block_on(async move { guests::read(&disk).await }).map_err(|e| e.to_string())
    };
    case.target.storage.clear_faults();
    // The guest's disk, on either image.
    case.model.check(&now, &content(&case.source)?).map_err(told)?;
    match (case.plan, end) {
        (Plan::Fail | Plan::Complete, JobEnd::Completed { .. }) => {
            violation.map_or(Ok(()), |why| Err(told(why)))?;
            let disk = Arc::clone(&case.source.disk);
            let flushed = case.sim.block_on(async move { disk.flush().await });
            if case.plan == Plan::Complete {
                flushed.map_err(|error| error.to_string())?;
                case.model.check(&now, &content(&case.target)?).map_err(told)?;
                jury.look().map_err(|why| told(format!("a crash at the end: {why}")))?;
            }
        }
        (Plan::Cancel, JobEnd::Cancelled) => {
            violation.map_or(Ok(()), |why| Err(told(why)))?;
            jury.look().map_err(told)?;
        }
        (Plan::Fail, JobEnd::Failed(why)) if why.contains("do not use the mirror") => {}
        // The simulation may have the process stand still for longer than the guest may wait.
        (plan, JobEnd::Failed(why)) if plan == Plan::Fail || why.contains("takes longer") => {
            let found = content(&case.target)?;
            let is_unmarked = !found.starts_with(MARK)
                && found[..SECTOR as usize] != case.before[..SECTOR as usize];
            if is_unmarked {
                return Err(told("the target looks complete".into()));
            }
        }
        _ => return Err(told("another end than planned".into())),
    }
    Ok(())
}

#[test]
fn crash_at_every_point_of_a_mirror() {
    let test = "mirror::crash_at_every_point_of_a_mirror";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 40, mirror);
    eprintln!("{report:?}");
}

#[test]
fn a_job_tells_how_far_it_is() {
    let case = case(7);
    let control = Arc::new(JobControl::default());
    let job = start(&case, &control);
    let known = Arc::clone(&control);
    case.sim.block_on(async move {
        assert_eq!(known.next_stage(&JobStage::Running).await, JobStage::Ready);
        let progress = known.progress();
        assert_eq!((progress.remaining, progress.total), (0, progress.copied));
        assert!(progress.copied > 0);
        assert!(known.complete(Completion::Switch) && !known.complete(Completion::HandOver));
        assert!(matches!(known.ended().await, JobEnd::Completed { .. }));
        assert!(!known.cancel() && !known.complete(Completion::Switch));
    });
    assert!(matches!(job.output(), Some(JobEnd::Completed { .. })));
}
