//! Streams of overlays whose guests write: the guests notice nothing, what a crash leaves is the
//! disk, over its base as long as the header names that, and in the end it needs no base.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::errno;
use blockhouse_disk::{Access, Backing, Disk, FurtherBase, Image, ImageFormat, Options};
use blockhouse_engine::Clock;
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_jobs::{Completion, JobControl, JobEnd, Stream};
use blockhouse_sim::{
    Config, Fault, OperationKind, Report, Rng, Sim, SimDisk, add_late_operations, for_seeds,
    is_looked_at,
};

use crate::copy_on_read;
use crate::guests::{self, Model};
use crate::scene::{self, Overlay, backing_name, clock, named, names_base, recover};

/// No stream takes as many steps of the simulation.
const MAX_STEPS: u64 = 2_000_000;

/// The plan for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Complete,
    /// It is cancelled, and another one is started.
    Again,
    /// Reads of the base fail while it runs; then another one is started.
    FailRead,
    /// The overlay's host has no space left while it runs; then another one is started.
    FullHost,
    /// Reads of the base fail for some time, and it tries again by itself.
    Outage,
}

/// Each as likely as it is often.
const PLANS: &[Plan] =
    &[Plan::Complete, Plan::Complete, Plan::Again, Plan::FailRead, Plan::FullHost, Plan::Outage];

impl Plan {
    /// The fault while the first stream runs. Guests would read or change the failing ranges, too:
    /// they are not there yet.
    fn fault(self, overlay: &Overlay) -> Option<(SimDisk, Fault)> {
        let fault = |errno, kind| Fault::chance(0.3, errno).of(kind);
        match self {
            Self::Complete | Self::Again => None,
            Self::FailRead | Self::Outage => {
                Some((overlay.base.clone(), fault(errno::EIO, OperationKind::Read)))
            }
            Self::FullHost => {
                Some((overlay.storage.clone(), fault(errno::ENOSPC, OperationKind::Write)))
            }
        }
    }
}

struct Case {
    sim: Sim,
    plan: Plan,
    model: Rc<Model>,
    overlay: Overlay,
    random: RefCell<Rng>,
}

impl Case {
    fn new(seed: u64) -> Self {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let plan = PLANS[random.usize(..PLANS.len())];
        let (model, content) = Model::new(random.u64(9..600), &mut random);
        let (mut making, own) = (random.fork(), sim.clone());
        let overlay = sim.block_on(async move {
            scene::overlay(&own, &mut making, &content).await.expect("an overlay")
        });
        Self { sim, plan, model, overlay, random: RefCell::new(random) }
    }

    /// Whether what a crash leaves now is the disk.
    fn check_crash(&self) -> Result<(), String> {
        let left = self.overlay.storage.crash(&mut self.random.borrow_mut());
        self.model.check(&self.model.answered(), &self.overlay.recover(left)?)
    }

    /// The end of the last job.
    fn start(&self) -> blockhouse_sim::Task<JobEnd> {
        let (sim, disk) = (self.sim.clone(), Arc::clone(&self.overlay.disk));
        let fault = self.plan.fault(&self.overlay);
        let (plan, clock) = (self.plan, clock(&self.sim));
        let mut random = self.random.borrow_mut().fork();
        let own = self.sim.clone();
        own.spawn(async move {
            if plan == Plan::Again {
                let control = Arc::new(JobControl::default());
                let stream = begin(&disk, &control, &clock).await;
                let wait = Duration::from_micros(random.u64(..60_000));
                let cancel = async {
                    sim.sleep(wait).await;
                    control.cancel();
                };
                let (end, ()) = futures_util::future::join(stream.run(), cancel).await;
                if matches!(end, JobEnd::Completed { .. }) {
                    return end;
                }
                assert_eq!(end, JobEnd::Cancelled);
            }
            if let Some((storage, fault)) = fault {
                storage.fail(fault);
                if plan == Plan::Outage {
                    let time = Duration::from_secs(random.u64(..100));
                    let outage = async {
                        sim.sleep(time).await;
                        storage.clear_faults();
                    };
                    let control = Arc::new(JobControl::default());
                    let stream = begin(&disk, &control, &clock).await.try_again();
                    return futures_util::future::join(stream.run(), outage).await.0;
                }
                let control = Arc::new(JobControl::default());
                let end = begin(&disk, &control, &clock).await.run().await;
                storage.clear_faults();
                if matches!(end, JobEnd::Completed { .. }) {
                    return end;
                }
            }
            let control = Arc::new(JobControl::default());
            control.complete(Completion::Switch);
            begin(&disk, &control, &clock).await.run().await
        })
    }

    fn read(&self, disk: &Arc<Disk<SimDisk>>) -> Result<Vec<u8>, String> {
        let disk = Arc::clone(disk);
        self.sim.block_on(async move { guests::read(&disk).await }).map_err(|e| e.to_string())
    }
}

async fn begin(
    disk: &Arc<Disk<SimDisk>>,
    control: &Arc<JobControl>,
    clock: &Rc<dyn Clock>,
) -> Stream<SimDisk> {
    let guard = disk.jobs().begin_populating().await.expect("an overlay without snapshots");
    Stream::new(Arc::clone(disk), guard, Arc::clone(control), Rc::clone(clock))
}

fn stream(seed: u64) -> Result<Report, String> {
    let case = Case::new(seed);
    let told = |why: String| format!("{:?}: {why}", case.plan);
    let start = || guests::start_durable(&case.sim, &case.overlay.disk, &case.model, 60);
    let is_used = case.plan.fault(&case.overlay).is_none();
    let mut guests = if is_used { start() } else { Vec::new() };
    let mut late = Rng::with_seed(!seed);
    for storage in [&case.overlay.storage, &case.overlay.base] {
        add_late_operations(storage, &mut late);
    }
    let job = case.start();
    let mut outcomes: Vec<Option<Result<(), String>>> = vec![None; guests.len()];
    let (mut crashes, mut steps, mut last, mut ended) = (0, 0_u64, None, None);
    let end: JobEnd = loop {
        ended = ended.or_else(|| job.output());
        for (guest, outcome) in guests.iter().zip(&mut outcomes) {
            let told = || guest.output().map(|end| end.map_err(|error| error.to_string()));
            *outcome = outcome.take().or_else(told);
        }
        if let Some(end) = &ended
            && outcomes.iter().all(Option::is_some)
        {
            if guests.is_empty() {
                guests = start();
                outcomes = vec![None; guests.len()];
                continue;
            }
            break end.clone();
        }
        steps += 1;
        if !case.sim.step() || steps > MAX_STEPS {
            return Err(told("it waits for ever".into()));
        }
        // Often enough for each moment to be met by some seed.
        let is_looked_at = is_looked_at(&mut case.random.borrow_mut(), 6);
        let now = case.overlay.storage.counts();
        if last.replace(now) != Some(now) && is_looked_at {
            crashes += 1;
            case.check_crash().map_err(|why| told(format!("a crash: {why}")))?;
        }
    };
    if let Some(error) = outcomes.into_iter().flatten().find_map(Result::err) {
        return Err(told(format!("a guest has an error: {error}")));
    }
    if !matches!(end, JobEnd::Completed { .. }) {
        return Err(told(format!("{end:?}")));
    }
    let now = case.model.answered();
    case.model.check(&now, &case.read(&case.overlay.disk)?).map_err(told)?;
    let disk = Arc::clone(&case.overlay.disk);
    let closed = case.sim.block_on(async move { disk.close().await });
    closed.map_err(|error| told(error.to_string()))?;
    let left = case.overlay.storage.content();
    if names_base(&left) {
        return Err(told("it names its base still".into()));
    }
    case.model.check(&now, &recover(left, ImageFormat::Qcow2)?).map_err(told)?;
    Ok(Report { crashes, ..Report::default() })
}

#[test]
fn crash_at_every_point_of_a_stream() {
    let test = "stream::crash_at_every_point_of_a_stream";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 40, stream);
    eprintln!("{report:?}");
}

/// An overlay without data over a base of 32 MiB.
async fn overlay_of_nothing(sim: &Sim) -> (Arc<Disk<SimDisk>>, SimDisk) {
    const SIZE: u64 = 32 << 20;
    let base = SimDisk::new(sim, Config::default(), vec![7; SIZE as usize]);
    let backing = Backing { name: b"base".to_vec(), format: Some("raw".into()) };
    let image = CreateOptions { backing: Some(backing), ..CreateOptions::new(SIZE) };
    let storage = SimDisk::new(sim, Config::default(), Vec::new());
    qcow2::create(&storage, &image).await.expect("an image");
    let image = Image::open(storage, ImageFormat::Qcow2, Options::default()).await;
    let read_only = Options { access: Access::ReadOnly, ..Options::default() };
    let below = Image::raw(base.clone(), read_only).expect("a base");
    (Arc::new(Disk::new(image.expect("an overlay").with_backing(&below))), base)
}

#[test]
fn parts_that_cannot_be_read_hold_up_no_others() {
    let sim = Sim::new(3);
    let own = sim.clone();
    sim.block_on(async move {
        let sim = own;
        let (disk, base) = overlay_of_nothing(&sim).await;
        base.fail(Fault::chance(0.3, errno::EIO).of(OperationKind::Read));
        let (control, clock) = (Arc::new(JobControl::default()), clock(&sim));
        let stream = begin(&disk, &control, &clock).await.try_again();
        let known = Arc::clone(&control);
        let watch = async {
            let mut least = disk.size();
            for _ in 0..90 {
                sim.sleep(Duration::from_millis(100)).await;
                let remaining = known.progress().remaining;
                assert!(remaining == 0 || remaining <= least, "{remaining} after {least}");
                least = if remaining == 0 { least } else { remaining };
            }
            // Before the first pause is over all has been tried.
            assert!(least <= disk.size() * 6 / 10, "{least} bytes are left");
            base.clear_faults();
        };
        let (end, ()) = futures_util::future::join(stream.run(), watch).await;
        assert!(matches!(end, JobEnd::Completed { .. }), "{end:?}");
        assert_eq!(guests::read(&disk).await.expect("the disk")[..3], [7; 3]);
    });
}

/// A disk over two backing files becomes one over the lower one, while guests change it and jobs
/// are cancelled: what a crash leaves is the disk, over what its header names. Half of the disks
/// copy on read, from the lower one when the job has ended.
fn stream_to_base(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let (model, content) = Model::new(random.u64(9..600), &mut random);
    let (mut making, own) = (random.fork(), sim.clone());
    let options = Options { copy_on_read: seed.is_multiple_of(2), ..Options::default() };
    let made = async move { scene::chain(&own, &mut making, &content, options).await };
    let chain = sim.block_on(made).map_err(|error| error.to_string())?;
    let base = FurtherBase::new(&chain.disk, 0, 2, named("base", chain.base_format));
    let base = base.map_err(|error| error.to_string())?;
    let guests = guests::start_durable(&sim, &chain.disk, &model, 60);
    let (disk, own, clock) = (Arc::clone(&chain.disk), sim.clone(), clock(&sim));
    let (known, reading) = (Rc::clone(&model), random.fork());
    let cancelled_after = random.bool().then(|| Duration::from_micros(random.u64(..60_000)));
    let job = sim.spawn(async move {
        if let Some(wait) = cancelled_after {
            let control = Arc::new(JobControl::default());
            let stream = begin(&disk, &control, &clock).await.down_to(base.clone());
            let cancel = async {
                own.sleep(wait).await;
                control.cancel();
            };
            let (end, ()) = futures_util::future::join(stream.run(), cancel).await;
            if matches!(end, JobEnd::Completed { .. }) {
                return end;
            }
        }
        let end = begin(&disk, &Arc::default(), &clock).await.down_to(base).run().await;
        match copy_on_read::read_on(own, disk, known, reading).await {
            Ok(()) => end,
            Err(why) => JobEnd::Failed(why),
        }
    });
    let (mut crashes, mut last) = (0, None);
    let look = || {
        let is_looked_at = is_looked_at(&mut random, 6);
        let now = chain.storage.counts();
        if last.replace(now) != Some(now) && is_looked_at {
            crashes += 1;
            let left = chain.recover(chain.storage.crash(&mut random))?;
            model.check(&model.answered(), &left).map_err(|why| format!("a crash: {why}"))?;
        }
        Ok(())
    };
    let read = guests::run_to_end(&sim, (&chain.disk, &guests), &job, look)?;
    let left = chain.storage.content();
    if backing_name(&left) != b"base" {
        return Err(format!("it names {:?}", backing_name(&left)));
    }
    model.check(&model.answered(), &read)?;
    model.check(&model.answered(), &chain.recover(left)?)?;
    Ok(Report { crashes, ..Report::default() })
}

#[test]
fn crash_at_every_point_of_a_stream_to_a_base() {
    let test = "stream::crash_at_every_point_of_a_stream_to_a_base";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 40, stream_to_base);
    eprintln!("{report:?}");
}
