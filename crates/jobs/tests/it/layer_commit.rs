//! Commits of layers behind disks whose guests write: the guests notice nothing, what a crash
//! leaves is the disk, over what its headers name, and in the end the chain is one image shorter.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::errno;
use blockhouse_disk::{Disk, FlushPolicy, FurtherBase, Image, ImageFormat, LayerCommit, Options};
use blockhouse_engine::Clock;
use blockhouse_jobs::{JobControl, JobEnd, Stream};
use blockhouse_sim::{
    Fault, OperationKind, Report, Rng, Sim, SimDisk, add_late_operations, for_seeds, is_looked_at,
};

use crate::guests::{self, Model};
use crate::scene::{self, Layers, backing_name, clock, named};

/// The plan for a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Complete,
    /// It is cancelled after this time, and another one is started.
    Again(Duration),
    /// Writes to the base fail; then another one is started.
    Fail,
    /// A planted fault: flushes of the base do nothing.
    NoFlush,
}

struct Case {
    sim: Sim,
    plan: Plan,
    model: Rc<Model>,
    layers: Rc<Layers>,
    random: RefCell<Rng>,
}

impl Case {
    fn new(seed: u64, planted: Option<Plan>) -> Self {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let wait = Duration::from_micros(random.u64(..60_000));
        let plan = [Plan::Complete, Plan::Complete, Plan::Again(wait), Plan::Fail];
        let plan = planted.unwrap_or(plan[random.usize(..plan.len())]);
        let (model, content) = Model::new(random.u64(9..600), &mut random);
        let (mut making, own) = (random.fork(), sim.clone());
        let layers = sim.block_on(async move {
            scene::layers(&own, &mut making, &content).await.expect("layers")
        });
        Self { sim, plan, model, layers: Rc::new(layers), random: RefCell::new(random) }
    }

    /// Whether what a crash leaves now is the disk.
    fn check_crash(&self) -> Result<(), String> {
        let mut random = self.random.borrow_mut();
        let left = self.layers.storages.iter().map(|storage| storage.crash(&mut random));
        self.model.check(&self.model.answered(), &self.layers.recover(left.collect())?)
    }

    /// The end of the last job.
    fn start(&self) -> blockhouse_sim::Task<JobEnd> {
        let (plan, layers, clock) = (self.plan, Rc::clone(&self.layers), clock(&self.sim));
        let sim = self.sim.clone();
        self.sim.spawn(async move {
            let base = &layers.storages[layers.storages.len() - 1];
            let control = Arc::new(JobControl::default());
            let end = match plan {
                Plan::Complete | Plan::NoFlush => None,
                Plan::Again(wait) => {
                    let cancel = async {
                        sim.sleep(wait).await;
                        control.cancel();
                    };
                    let commit = commit(&layers, plan, &control, &clock);
                    Some(futures_util::future::join(commit, cancel).await.0)
                }
                Plan::Fail => {
                    base.fail(Fault::chance(0.3, errno::EIO).of(OperationKind::Write));
                    let end = commit(&layers, plan, &control, &clock).await;
                    base.clear_faults();
                    Some(end)
                }
            };
            match end {
                Some(end @ JobEnd::Completed { .. }) => end,
                _ => commit(&layers, plan, &Arc::default(), &clock).await,
            }
        })
    }
}

/// Commits the last layer but one into the last one.
async fn commit(
    layers: &Layers,
    plan: Plan,
    control: &Arc<JobControl>,
    clock: &Rc<dyn Clock>,
) -> JobEnd {
    let (disk, above) = (Arc::clone(&layers.disk), layers.above());
    let name = named("base", layers.base_format);
    let left_out = FurtherBase::new(&disk, above, 2, name).expect("layers");
    let flush = if plan == Plan::NoFlush { FlushPolicy::Ignore } else { FlushPolicy::Honor };
    let base = layers.storages[above + 2].clone();
    let base = Disk::open(base, layers.base_format, Options { flush, ..Options::default() });
    let upper = match above {
        0 => None,
        _ => Some(Arc::new(alone(&layers.storages[above]).await)),
    };
    let base = Arc::new(base.await.expect("a base"));
    let commit = LayerCommit::new(disk, left_out, upper, base).expect("memory");
    let begun = commit.begin(|| Ok(())).await;
    let commit = Rc::new(commit);
    let end = match begun {
        Ok(()) => {
            let (control, clock) = (Arc::clone(control), Rc::clone(clock));
            Stream::commit(Rc::clone(&commit), control, clock).run().await
        }
        Err(error) => JobEnd::Failed(error.to_string()),
    };
    let ended = commit.end().await;
    assert!(plan == Plan::Fail || ended.is_ok(), "{ended:?}");
    end
}

/// An image without its backing file.
async fn alone(storage: &SimDisk) -> Disk<SimDisk> {
    let image = Image::open(storage.clone(), ImageFormat::Qcow2, Options::default()).await;
    Disk::new(image.expect("an image"))
}

fn commit_of_the_middle(seed: u64) -> Result<Report, String> {
    commit_with(seed, None)
}

fn commit_with(seed: u64, planted: Option<Plan>) -> Result<Report, String> {
    let case = Case::new(seed, planted);
    let told = |why: String| format!("{:?}, {} above: {why}", case.plan, case.layers.above());
    let guests = guests::start_durable(&case.sim, &case.layers.disk, &case.model, 60);
    let mut late = Rng::with_seed(!seed);
    for storage in &case.layers.storages {
        add_late_operations(storage, &mut late);
    }
    let job = case.start();
    let (mut crashes, mut last) = (0, None);
    let look = || {
        let is_looked_at = is_looked_at(&mut case.random.borrow_mut(), 6);
        let now: Vec<_> = case.layers.storages.iter().map(SimDisk::counts).collect();
        if last.replace(now.clone()) != Some(now) && is_looked_at {
            crashes += 1;
            case.check_crash().map_err(|why| format!("a crash: {why}"))?;
        }
        Ok(())
    };
    let read = guests::run_to_end(&case.sim, (&case.layers.disk, &guests), &job, look);
    let now = case.model.answered();
    case.model.check(&now, &read.map_err(told)?).map_err(told)?;
    let left: Vec<_> = case.layers.storages.iter().map(SimDisk::content).collect();
    let name = backing_name(&left[case.layers.above()]);
    if name != b"base" {
        return Err(told(format!("it names {name:?}")));
    }
    case.model.check(&now, &case.layers.recover(left).map_err(told)?).map_err(told)?;
    Ok(Report { crashes, ..Report::default() })
}

#[test]
fn crash_at_every_point_of_a_commit_of_the_middle() {
    let test = "layer_commit::crash_at_every_point_of_a_commit_of_the_middle";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 40, commit_of_the_middle);
    eprintln!("{report:?}");
}

/// Whether the test would find what it is for.
#[test]
fn a_base_that_is_named_before_it_is_durable_is_caught_within_few_seeds() {
    let is_caught = (0..60).any(|seed| commit_with(seed, Some(Plan::NoFlush)).is_err());
    assert!(is_caught, "it is not caught");
}
