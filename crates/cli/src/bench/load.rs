//! Requests to a disk, with the queue depth of a load, and their cost.
//!
//! A sample is one uninterrupted measurement. A sample ends when its time or its requests are used
//! up, whichever comes first. It then waits for all requests in flight, and counts them.

use std::cell::RefCell;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use blockhouse_core::{Buffer, Durability, Storage, rare};
use blockhouse_disk::{Disk, LoadRequest, LoadSequence, send_load};
use blockhouse_engine::{Engine, EngineChoice, EventLoop};
use hdrhistogram::Histogram;
use rustix::time::ClockId;

use super::device::{Device, DeviceCounts};
use super::stop::Stop;

/// The maximum number of bytes that a sample writes.
pub const MAX_BYTES: u64 = 64 << 20;

/// A monotonic clock; its zero is arbitrary.
pub type Clock<'a> = dyn Fn() -> Duration + Sync + 'a;

/// The monotonic clock of the machine.
pub fn machine_clock() -> Duration {
    time_of(ClockId::Monotonic)
}

/// A change to an event loop.
pub type Prepare<'a> = dyn Fn(&mut EventLoop) -> Result<()> + Sync + 'a;

/// The event loops that submit requests to the disk.
#[derive(Clone, Copy)]
pub struct LoopSetup<'a> {
    /// The engine of each job's event loop.
    pub engine: Engine,
    /// The change to each job's event loop before the sample begins.
    pub prepare: Option<&'a Prepare<'a>>,
}

impl LoopSetup<'_> {
    /// An engine whose event loop is not changed.
    pub fn plain(engine: Engine) -> Self {
        Self { engine, prepare: None }
    }
}

/// The requests that are sent to the disk.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The work of each request.
    pub work: Work,
    /// The order in which the blocks are accessed.
    pub pattern: Pattern,
    /// Bytes of a request.
    pub block: usize,
    /// Requests in flight for each job.
    pub depth: usize,
    /// Threads, each with an event loop of its own.
    pub jobs: usize,
    /// The requests stay within this number of bytes at the start of the disk.
    pub span: u64,
}

impl Load {
    /// The maximum number of requests in a sample. Reads have no limit. Writes end at
    /// [`MAX_BYTES`]; sequential writes also end after one pass over the span.
    pub fn most_requests(&self) -> u64 {
        let bytes = match (self.work, self.pattern) {
            (Work::Read, _) => return u64::MAX,
            (_, Pattern::Sequential) => self.span.min(MAX_BYTES),
            (_, Pattern::Random) => MAX_BYTES,
        };
        bytes / self.block as u64
    }

    /// How many bytes a sample writes at most.
    pub fn most_written(&self) -> u64 {
        match self.work {
            Work::Read => 0,
            _ => self.most_requests() * self.block as u64,
        }
    }
}

/// The work of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A read.
    Read,
    /// A write that may stay in a volatile cache.
    Write,
    /// A write, then a flush after the write is complete: two requests that count as one.
    WriteThenFlush,
    /// A write with FUA.
    DurableWrite,
}

/// The order of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One block after the other; after the last block, the first one again.
    Sequential,
    /// Evenly distributed; the same blocks in every sample of the same load.
    Random,
}

/// When a sample ends.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time after the start from which no request begins.
    pub time: Duration,
    /// The maximum number of requests.
    pub requests: u64,
}

/// The figures of one sample.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Requests that were completed.
    pub requests: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// The time from the start of the first request to the end of the last.
    pub elapsed: Duration,
    /// Processor time of the whole process meanwhile.
    pub processor: Duration,
    /// Nanoseconds from the begin of each request to its end.
    pub latency: Histogram<u64>,
    /// The change of the kernel's counters of the device meanwhile, for requests of all programs.
    pub device: Option<DeviceCounts>,
    /// A remark on this sample.
    pub note: Option<String>,
}

impl Sample {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }
}

/// A histogram of nanoseconds with three significant digits.
pub fn new_histogram() -> Histogram<u64> {
    Histogram::new(3).expect("three digits are possible")
}

/// The clocks that are read before and after a sample.
pub struct Clocks<'a> {
    device: Option<(&'a Device, DeviceCounts)>,
    processor: Duration,
    begin: Duration,
}

impl<'a> Clocks<'a> {
    /// Begins a sample.
    pub fn start(device: Option<&'a Device>, clock: &Clock<'_>) -> Self {
        let device = device.and_then(|device| Some((device, device.read()?)));
        Self { device, processor: processor_time(), begin: clock() }
    }

    /// The sample, which ended at `end`. The time to close the engine is excluded: it can be longer
    /// than many requests.
    pub fn end(self, end: End, bytes: u64, latency: Histogram<u64>) -> Sample {
        let elapsed = end.at.saturating_sub(self.begin);
        let processor = end.processor.saturating_sub(self.processor);
        let device = self.device.and_then(|(device, before)| Some(device.read()?.since(before)));
        Sample { requests: latency.len(), bytes, elapsed, processor, latency, device, note: None }
    }
}

/// The time when the last request was complete.
#[derive(Clone, Copy)]
pub struct End {
    at: Duration,
    processor: Duration,
}

impl End {
    /// The current time, by the clock that the sample began with.
    pub fn now(clock: &Clock<'_>) -> Self {
        Self { at: clock(), processor: processor_time() }
    }
}

fn processor_time() -> Duration {
    time_of(ClockId::ProcessCPUTime)
}

fn time_of(clock: ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The state that all jobs of a sample share.
pub struct Shared<'a, S: Storage> {
    /// The disk that gets the requests.
    pub disk: &'a Disk<S>,
    /// The requests.
    pub load: Load,
    /// When the sample ends.
    pub limits: Limits,
    /// The number of requests that have begun.
    pub begun: AtomicU64,
    /// The clock of the sample.
    pub clock: &'a Clock<'a>,
    /// Whether to stop before the limits.
    pub stop: &'a Stop,
}

/// Measures one sample.
///
/// # Errors
/// The first error of the disk, an engine cannot be used, or the measurement was interrupted.
pub fn measure<S: Storage + Send + Sync>(
    disk: &Disk<S>,
    setup: LoopSetup<'_>,
    (load, limits): (Load, Limits),
    (device, stop): (Option<&Device>, &Stop),
) -> Result<Sample> {
    let clock: &Clock<'_> = &machine_clock;
    let shared = Shared { disk, load, limits, begun: AtomicU64::new(0), clock, stop };
    let (ready, go) = (Barrier::new(load.jobs + 1), Barrier::new(load.jobs + 1));
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..load.jobs)
            .map(|job| {
                let (shared, ready, go) = (&shared, &ready, &go);
                scope.spawn(move || {
                    let event_loop = new_loop(setup);
                    ready.wait();
                    go.wait();
                    let mut event_loop = event_loop?;
                    let latency = event_loop.block_on(one_job(shared, job))?;
                    anyhow::Ok((latency, End::now(clock)))
                })
            })
            .collect();
        ready.wait();
        let clocks = Clocks::start(device, clock);
        go.wait();
        let (mut all, mut outcome, mut end) = (new_histogram(), Ok(()), End::now(clock));
        for job in jobs {
            match job.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                Ok((latency, its)) => {
                    all.add(latency).expect("both are of the same kind");
                    end = if its.at > end.at { its } else { end };
                }
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        let bytes = all.len() * load.block as u64;
        let sample = clocks.end(end, bytes, all);
        outcome?;
        stop.check()?;
        Ok(sample)
    })
}

fn new_loop(setup: LoopSetup<'_>) -> Result<EventLoop> {
    let mut event_loop = EventLoop::new(EngineChoice::Only(setup.engine))
        .with_context(|| format!("no {} here", setup.engine))?;
    if let Some(prepare) = setup.prepare {
        prepare(&mut event_loop)?;
    }
    Ok(event_loop)
}

/// Runs the requests of one job of a sample; returns their latencies.
///
/// # Errors
/// The first error of the disk.
pub async fn one_job<S: Storage>(shared: &Shared<'_, S>, job: usize) -> Result<Histogram<u64>> {
    let latency = RefCell::new(new_histogram());
    let first = job * shared.load.depth;
    let sequences = (first..first + shared.load.depth).map(|index| {
        let mut random = fastrand::Rng::with_seed(index as u64);
        let mut buffer = Buffer::new(shared.load.block);
        random.fill(buffer.bytes_mut());
        let begin = (shared.clock)();
        let sequence = Sequence { shared, latency: &latency, random, begin, start: begin };
        (Box::new(sequence) as Box<dyn LoadSequence>, buffer)
    });
    rare(send_load(shared.disk, sequences.collect())).await?;
    Ok(latency.into_inner())
}

/// The requests of a sample that are sent one after the other.
struct Sequence<'a, S: Storage> {
    shared: &'a Shared<'a, S>,
    latency: &'a RefCell<Histogram<u64>>,
    random: fastrand::Rng,
    /// The time when the sequence began.
    begin: Duration,
    /// The time when its last request began.
    start: Duration,
}

impl<S: Storage> LoadSequence for Sequence<'_, S> {
    fn next_request(&mut self) -> Option<LoadRequest> {
        let Shared { load, limits, stop, .. } = self.shared;
        self.start = (self.shared.clock)();
        if stop.is_asked() || self.start - self.begin >= limits.time {
            return None;
        }
        let number = self.shared.begun.fetch_add(1, Ordering::Relaxed);
        if number >= limits.requests {
            return None;
        }
        let blocks = load.span / load.block as u64;
        let block = match load.pattern {
            Pattern::Sequential => number % blocks,
            Pattern::Random => self.random.u64(..blocks),
        };
        let write = match load.work {
            Work::Read => None,
            Work::Write | Work::WriteThenFlush => Some(Durability::None),
            Work::DurableWrite => Some(Durability::Data),
        };
        let then_flush = load.work == Work::WriteThenFlush;
        Some(LoadRequest { offset: block * load.block as u64, write, then_flush })
    }

    fn request_ended(&mut self) {
        let nanoseconds = ((self.shared.clock)() - self.start).as_nanos();
        let nanoseconds = u64::try_from(nanoseconds).unwrap_or(u64::MAX).max(1);
        self.latency.borrow_mut().record(nanoseconds).expect("the histogram grows");
    }
}
