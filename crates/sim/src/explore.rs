//! Random requests against anything built on a simulated disk, and a crash at every point.
//!
//! Several tasks send reads, writes of any alignment, zero writes, discards and flushes, and cancel
//! some of them by dropping their futures. After each step of the simulation that started or ended an
//! operation or a request, an image of what a crash would leave behind is compared with the model; and
//! so is every read. At the end no request may be left waiting.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use blockhouse_core::{
    Buffer, ByteRange, Durability, ErrorKind, Fallback, Request, Result, Unmap, errno,
};
use fastrand::Rng;

use crate::history::History;
use crate::model::{Change, Model, WriteKind};
use crate::{Config, Fault, OperationKind, Sim, SimDisk, Size};

/// A system under test: it turns a guest's requests into operations on a simulated disk.
pub trait SystemUnderTest: 'static {
    /// Carries out one request.
    fn submit(&self, request: Request) -> impl Future<Output = Result<()>>;

    /// The durability that every change has, whatever its request says.
    fn min_durability(&self) -> Durability;

    /// Makes the disk longer; new bytes read as zeros. Durable when it returns.
    fn grow(&self, size: u64) -> impl Future<Output = Result<()>>;

    /// Brings everything to a durable end: nothing is asked any more.
    fn close(&self) -> impl Future<Output = Result<()>>;

    /// The disks that it uses besides the one that it was built on, and that crash at the same moment.
    fn others(&self) -> Vec<SimDisk>;

    /// The guest's bytes as found in `image`, which was left in `state`.
    fn recover(&self, image: Vec<u8>, state: ImageState) -> std::result::Result<Vec<u8>, String>;
}

/// How an image was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageState {
    /// By a crash.
    Crashed,
    /// Closed, after no request had failed or was cancelled.
    Closed,
}

/// The bounds of an exploration; the seed chooses within them.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Tasks that send requests, at most.
    pub tasks: usize,
    /// Requests of each task, at most.
    pub requests: usize,
    /// Whether operations may fail.
    pub faults: Faults,
    /// Whether requests may be cancelled.
    pub cancellation: Cancellation,
    /// Sectors of the disk, at most.
    pub sectors: usize,
    /// Whether the disk may grow.
    pub growth: Growth,
    /// Whether it may be a device.
    pub devices: Devices,
}

/// Whether the disk becomes longer meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// It does not.
    Never,
    /// In a quarter of the runs it does.
    Sometimes,
}

/// Whether operations of the disk fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    /// They do not.
    Never,
    /// In half of the runs some do.
    Sometimes,
}

/// Whether futures of requests are dropped before they are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancellation {
    /// They are not.
    Never,
    /// In half of the runs some are.
    Sometimes,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            tasks: 5,
            requests: 12,
            faults: Faults::Sometimes,
            cancellation: Cancellation::Sometimes,
            sectors: 40,
            growth: Growth::Sometimes,
            devices: Devices::Never,
        }
    }
}

/// Whether the disk is a device of fixed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// It is a file.
    Never,
    /// In a third of the runs it is a device, with little room after the image and anything in it.
    Sometimes,
}

/// What an exploration has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requests that came to their end.
    pub requests: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests whose future was dropped.
    pub cancelled: u64,
    /// Crashes that were checked.
    pub crashes: u64,
}

impl Report {
    /// The sum of two.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            failed: self.failed + other.failed,
            cancelled: self.cancelled + other.cancelled,
            crashes: self.crashes + other.crashes,
        }
    }
}

/// Explores what `build` makes of a random disk, as `seed` decides.
///
/// # Errors
/// In words, the first violation of the model.
pub fn explore<T: SystemUnderTest>(
    seed: u64,
    workload: &Workload,
    build: impl FnOnce(SimDisk, &mut Rng) -> T,
) -> std::result::Result<Report, String> {
    let as_it_is = |_: &Config, content, _: &mut Rng| content;
    explore_image(seed, workload, as_it_is, |_, disk, random| build(disk, random))
}

/// As [`explore`], for a disk that holds the guest's bytes in the form that `encode` gives them.
/// `build` may run the simulation.
///
/// # Errors
/// As [`explore`].
pub fn explore_image<T: SystemUnderTest>(
    seed: u64,
    workload: &Workload,
    encode: impl FnOnce(&Config, Vec<u8>, &mut Rng) -> Vec<u8>,
    build: impl FnOnce(&Sim, SimDisk, &mut Rng) -> T,
) -> std::result::Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let mut config = Config::random(&mut random);
    let most_sectors = [workload.sectors.div_ceil(5), workload.sectors][random.usize(..2)];
    let size = random.usize(2..=most_sectors.max(2)) * 512;
    let (model, content) = Model::new(size);
    let mut image = encode(&config, content, &mut random);
    let is_device = workload.devices == Devices::Sometimes && random.u8(..3) == 0;
    if is_device {
        config.size = Size::Fixed;
        // Room for some, all, or more than all of the disk once more.
        let length = (image.len() + random.usize(..2 * size)).next_multiple_of(4096);
        image.resize_with(length, || random.u8(..));
    }
    let disk = SimDisk::new(&sim, config.clone(), image);
    let has_faults = workload.faults == Faults::Sometimes && random.bool();
    let run = Rc::new(Run {
        system: build(&sim, disk.clone(), &mut random),
        sim: sim.clone(),
        size: Cell::new(size as u64),
        block: u64::from(config.alignment.offset),
        may_fail: has_faults || is_device,
        cancel_probability: match workload.cancellation {
            Cancellation::Sometimes if random.bool() => [0.05, 0.4][random.usize(..2)],
            _ => 0.0,
        },
        state: RefCell::new(State {
            model,
            report: Report::default(),
            history: History::default(),
            violation: None,
            is_clean_run: true,
        }),
    });
    if has_faults {
        add_faults(&disk, &mut random);
        run.system.others().iter().for_each(|disk| add_faults(disk, &mut random));
    }
    let mut tasks: Vec<_> = (0..random.usize(1..=workload.tasks))
        .map(|_| {
            let count = random.usize(1..=workload.requests);
            sim.spawn(run.clone().guest_task(count, random.fork()))
        })
        .collect();
    if workload.growth == Growth::Sometimes && random.u8(..4) == 0 {
        tasks.push(sim.spawn(run.clone().grow_task(random.fork())));
    }
    let outcome = run.crash_everywhere(&disk, &mut random);
    let stuck = tasks.iter().filter(|task| task.output().is_none()).count();
    let outcome = match outcome {
        Ok(()) if stuck > 0 => Err(format!("{stuck} tasks wait for ever; {config:?}")),
        outcome => outcome.and_then(|()| run.close(&disk, &mut random)),
    };
    match outcome {
        Ok(()) => Ok(run.state.borrow().report),
        Err(violation) => Err(format!(
            "{violation}\nat {:?} on {size} bytes of {config:?}\nrequests:\n{}operations: {:?}",
            sim.clock().now(),
            run.state.borrow().history,
            disk.take_log()
        )),
    }
}

fn add_faults(disk: &SimDisk, random: &mut Rng) {
    let kinds = [
        OperationKind::Read,
        OperationKind::Write,
        OperationKind::DurableWrite,
        OperationKind::WriteZeroes,
        OperationKind::Discard,
        OperationKind::Flush,
    ];
    let chance = [0.02, 0.2][random.usize(..2)];
    for kind in kinds {
        if random.bool() {
            let errno = if random.u8(..4) == 0 { errno::ENOSPC } else { errno::EIO };
            disk.fail(Fault::chance(chance, errno).of(kind));
        }
    }
}

struct Run<T> {
    system: T,
    sim: Sim,
    /// What it has for certain.
    size: Cell<u64>,
    block: u64,
    /// Whether the disk was given reasons to fail.
    may_fail: bool,
    /// The probability that a request is cancelled.
    cancel_probability: f64,
    state: RefCell<State>,
}

struct State {
    model: Model,
    report: Report,
    history: History,
    violation: Option<String>,
    /// Whether no request was cancelled, and none failed but those that were refused.
    is_clean_run: bool,
}

impl<T: SystemUnderTest> Run<T> {
    /// Runs to the end and crashes after every step that might matter.
    fn crash_everywhere(&self, disk: &SimDisk, random: &mut Rng) -> Result<(), String> {
        let mut last = None;
        let others = self.system.others();
        while self.sim.step() {
            let mut state = self.state.borrow_mut();
            if let Some(violation) = state.violation.take() {
                return Err(violation);
            }
            let counts: Vec<_> = others.iter().map(SimDisk::counts).collect();
            let moment = (disk.counts(), counts, state.report.requests + state.report.cancelled);
            if last.as_ref() == Some(&moment) {
                continue;
            }
            last = Some(moment);
            let found = self.system.recover(disk.crash(random), ImageState::Crashed)?;
            state.model.check_crash(&found)?;
            state.report.crashes += 1;
        }
        Ok(())
    }

    /// Closes the system after a clean run, and checks the image that it leaves.
    fn close(self: &Rc<Self>, disk: &SimDisk, random: &mut Rng) -> Result<(), String> {
        if !self.state.borrow().is_clean_run {
            return Ok(());
        }
        disk.clear_faults();
        self.system.others().iter().for_each(SimDisk::clear_faults);
        let run = Rc::clone(self);
        let closed = self.sim.spawn(async move {
            run.system.close().await.map_err(|error| format!("closing failed: {error:?}"))
        });
        self.crash_everywhere(disk, random)?;
        closed.output().ok_or("closing waits for ever")??;
        let found = self.system.recover(disk.crash(random), ImageState::Closed)?;
        let model = &mut self.state.borrow_mut().model;
        let flushing = model.begin_flush();
        model.flushed(&flushing);
        model.check_crash(&found)
    }

    /// Makes the disk longer once or twice.
    async fn grow_task(self: Rc<Self>, mut random: Rng) {
        for _ in 0..random.u8(1..=2) {
            self.sim.sleep(Duration::from_micros(random.u64(..1000))).await;
            let size = self.size.get() + random.u64(1..=16) * 512;
            let growth = self.state.borrow_mut().model.begin_growth(size as usize);
            let Some(growth) = growth else { return };
            let now = self.sim.clock().now();
            let number = self.state.borrow_mut().history.asked_to_grow(now, size);
            let outcome = Some(self.system.grow(size).await);
            let mut state = self.state.borrow_mut();
            state.answered(number, self.sim.clock().now(), &outcome, self.may_fail, false);
            match outcome {
                Some(Ok(())) => state.model.complete_growth(growth),
                // It may have grown or not.
                _ => return,
            }
            self.size.set(size);
        }
    }

    /// One guest: sends request after request.
    async fn guest_task(self: Rc<Self>, count: usize, mut random: Rng) {
        for _ in 0..count {
            if random.u8(..4) == 0 {
                self.sim.sleep(Duration::from_micros(random.u64(..200))).await;
            }
            match random.u8(..20) {
                0..4 => self.read(&mut random).await,
                4..7 => self.flush(&mut random).await,
                _ => self.change(&mut random).await,
            }
        }
    }

    async fn read(&self, random: &mut Rng) {
        let range = self.any_range(random);
        let (mut buffer, start) = any_buffer(range, random);
        let into = buffer.lend_range(start, range.length() as usize);
        let reading = self.state.borrow().model.begin_read(range);
        let request = Request::Read { offset: range.offset(), into };
        if self.submit(request, random).await.is_some_and(|outcome| outcome.is_ok()) {
            let bytes = &buffer.bytes()[start..][..range.length() as usize];
            let mut state = self.state.borrow_mut();
            if let Err(violation) = state.model.end_read(&reading, bytes) {
                state.violation.get_or_insert(violation);
            }
        }
    }

    async fn flush(&self, random: &mut Rng) {
        let flushing = self.state.borrow().model.begin_flush();
        if let Some(Ok(())) = self.submit(Request::Flush, random).await {
            self.state.borrow_mut().model.flushed(&flushing);
        }
    }

    async fn change(&self, random: &mut Rng) {
        let range = self.any_range(random);
        let durability = [Durability::None, Durability::None, Durability::Data, Durability::Full]
            [random.usize(..4)];
        let kind = match random.u8(..8) {
            0 => WriteKind::Undefined,
            1 | 2 => WriteKind::Zeros,
            _ => WriteKind::Data,
        };
        let Some(change) = self.state.borrow_mut().model.begin(range, kind) else { return };
        let request = any_request(range, &change, kind, durability, random);
        let outcome = self.submit(request, random).await;
        let is_durable = durability.max(self.system.min_durability()) >= Durability::Data;
        let model = &mut self.state.borrow_mut().model;
        match outcome {
            Some(Ok(())) => model.succeed(change, is_durable),
            Some(Err(_)) => model.fail(change),
            // Where blocks are changed in part, that may undo what is still in flight and was never
            // answered, even if it was seen already.
            None if self.block == 1 => model.cancel(change),
            None => {}
        }
    }

    /// The outcome of a request, or `None` when it was cancelled.
    async fn submit(&self, request: Request, random: &mut Rng) -> Option<Result<()>> {
        let number = self.state.borrow_mut().history.asked(self.sim.clock().now(), &request);
        let may_refuse =
            matches!(request, Request::WriteZeroes { fallback: Fallback::Forbidden, .. });
        let mut outcome = pin!(self.system.submit(request));
        let outcome = if random.f64() < self.cancel_probability {
            let delay = Duration::from_micros(random.u64(..150));
            let mut alarm = pin!(self.sim.sleep(delay));
            poll_fn(|context| match outcome.as_mut().poll(context) {
                Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
                Poll::Pending => alarm.as_mut().poll(context).map(|()| None),
            })
            .await
        } else {
            Some(outcome.await)
        };
        let now = self.sim.clock().now();
        self.state.borrow_mut().answered(number, now, &outcome, self.may_fail, may_refuse);
        outcome
    }

    /// A range of the disk: in blocks or not, mostly short, so that many meet.
    fn any_range(&self, random: &mut Rng) -> ByteRange {
        let size = self.size.get();
        let unit = if random.bool() { self.block } else { 1 };
        let start = random.u64(..size.div_ceil(unit)) * unit;
        let length = match random.u8(..4) {
            0 => random.u64(1..=size),
            1 => random.u64(1..=64),
            _ => random.u64(1..=3) * self.block.max(512),
        };
        let length = length.next_multiple_of(unit);
        ByteRange::between(start, (start + length).min(size))
    }
}

impl State {
    /// A request ended or was cancelled: only one that has a reason may fail.
    fn answered(
        &mut self,
        number: usize,
        now: Duration,
        outcome: &Option<Result<()>>,
        may_fail: bool,
        may_refuse: bool,
    ) {
        self.history.answered(number, now, outcome);
        match outcome {
            None => {
                self.report.cancelled += 1;
                self.is_clean_run = false;
            }
            Some(Ok(())) => self.report.requests += 1,
            Some(Err(error)) => {
                self.report.requests += 1;
                self.report.failed += 1;
                self.is_clean_run &= error.kind() == ErrorKind::Unsupported;
                let is_in_order = match error.kind() {
                    ErrorKind::Unsupported => may_refuse,
                    ErrorKind::Io | ErrorKind::NoSpace => may_fail,
                    _ => false,
                };
                if !is_in_order {
                    self.violation.get_or_insert(format!("without a reason: {error:?}"));
                }
            }
        }
    }
}

/// Memory for `range`, and where in it to begin: mostly aligned, sometimes not.
fn any_buffer(range: ByteRange, random: &mut Rng) -> (Buffer, usize) {
    let start = if random.u8(..4) == 0 { random.usize(1..100) } else { 0 };
    (Buffer::new(start + range.length() as usize), start)
}

fn any_request(
    range: ByteRange,
    change: &Change,
    kind: WriteKind,
    durability: Durability,
    random: &mut Rng,
) -> Request {
    match kind {
        WriteKind::Undefined => Request::Discard { range, durability },
        WriteKind::Zeros => Request::WriteZeroes {
            range,
            unmap: if random.bool() { Unmap::Allowed } else { Unmap::Forbidden },
            fallback: if random.bool() { Fallback::Allowed } else { Fallback::Forbidden },
            durability,
        },
        WriteKind::Data => {
            let (mut buffer, start) = any_buffer(range, random);
            buffer.bytes_mut()[start..].fill(change.value());
            let from = buffer.lend_range(start, range.length() as usize);
            Request::Write { offset: range.offset(), from, durability }
        }
    }
}
