//! The guests of one process: they send random requests, and check each answer against the model.
//!
//! Answers in the poll in which the process dies are ignored: no guest has received them.

use std::cell::{Cell, RefCell};
use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Durability, ErrorKind, Fallback, Request, Result, Unmap};
use fastrand::Rng;

use crate::history::History;
use crate::model::{Change, Model, WriteKind};
use crate::workload::{Growth, Workload};
use crate::{Report, Sim, SystemUnderTest, Task};

/// The guests, and the system that they use.
pub(crate) struct Guests<T> {
    pub(crate) system: T,
    sim: Sim,
    /// The size of the disk, including only growth that has succeeded.
    size: Cell<u64>,
    limits: Limits,
    record: Rc<RefCell<Record>>,
}

/// The limits of an exploration's guests.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// The block of the disk in bytes.
    pub(crate) block: u64,
    /// Whether requests may fail: the disk has planned faults, or is a device that may be full.
    pub(crate) may_fail: bool,
    /// The probability that a request is cancelled.
    pub(crate) cancel_probability: f64,
}

/// The record of the disk, whichever process serves it.
pub(crate) struct Record {
    pub(crate) model: Model,
    pub(crate) report: Report,
    pub(crate) history: History,
    pub(crate) violation: Option<String>,
    /// Whether no request was cancelled, and none failed with an error other than `Unsupported`.
    pub(crate) is_clean_run: bool,
}

impl<T: SystemUnderTest> Guests<T> {
    pub(crate) fn new(system: T, sim: &Sim, limits: Limits, record: &Rc<RefCell<Record>>) -> Self {
        let size = Cell::new(system.size());
        Self { system, sim: sim.clone(), size, limits, record: Rc::clone(record) }
    }

    /// Starts a random number of guests within the workload's limits.
    pub(crate) fn spawn(self: &Rc<Self>, workload: &Workload, random: &mut Rng) -> Vec<Task<()>> {
        let mut tasks: Vec<_> = (0..random.usize(1..=workload.tasks))
            .map(|_| {
                let count = random.usize(1..=workload.requests);
                self.sim.spawn(Rc::clone(self).guest_task(count, random.fork()))
            })
            .collect();
        if workload.growth == Growth::Sometimes && random.u8(..4) == 0 {
            tasks.push(self.sim.spawn(Rc::clone(self).grow_task(random.fork())));
        }
        tasks
    }

    /// Reads the whole disk.
    pub(crate) async fn read_all(&self) -> Result<Vec<u8>> {
        let mut buffer = Buffer::new(self.system.size() as usize);
        self.system.submit(Request::Read { offset: 0, into: buffer.lend() }).await?;
        Ok(buffer.bytes().to_vec())
    }

    /// Maintains the image once or twice.
    pub(crate) async fn maintain_task(self: Rc<Self>, mut random: Rng) {
        for _ in 0..random.u8(1..=2) {
            self.sim.sleep(Duration::from_micros(random.u64(..2000))).await;
            let now = self.sim.clock().now();
            let number = self.record.borrow_mut().history.asked_to_maintain(now);
            let outcome = Some(self.system.maintain(random.fork()).await);
            self.heard().await;
            let now = self.sim.clock().now();
            self.record.borrow_mut().answered(number, now, &outcome, self.limits.may_fail, true);
        }
    }

    /// Returns at once if the process is alive, and never if it has died.
    async fn heard(&self) {
        if self.sim.is_dead() {
            pending().await
        }
    }

    /// Makes the disk longer once or twice.
    async fn grow_task(self: Rc<Self>, mut random: Rng) {
        for _ in 0..random.u8(1..=2) {
            self.sim.sleep(Duration::from_micros(random.u64(..1000))).await;
            let size = self.size.get() + random.u64(1..=16) * 512;
            let growth = self.record.borrow_mut().model.begin_growth(size as usize);
            let Some(growth) = growth else { return };
            let now = self.sim.clock().now();
            let number = self.record.borrow_mut().history.asked_to_grow(now, size);
            let outcome = Some(self.system.grow(size).await);
            self.heard().await;
            let mut record = self.record.borrow_mut();
            record.answered(number, self.sim.clock().now(), &outcome, self.limits.may_fail, false);
            match outcome {
                Some(Ok(())) => record.model.complete_growth(growth),
                // After a failed growth the disk may have either size.
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
        let reading = self.record.borrow().model.begin_read(range);
        let request = Request::Read { offset: range.offset(), into };
        if self.submit(request, random).await.is_some_and(|outcome| outcome.is_ok()) {
            let bytes = &buffer.bytes()[start..][..range.length() as usize];
            let mut record = self.record.borrow_mut();
            if let Err(violation) = record.model.end_read(&reading, bytes) {
                record.violation.get_or_insert(violation);
            }
        }
    }

    async fn flush(&self, random: &mut Rng) {
        let flushing = self.record.borrow().model.begin_flush();
        if let Some(Ok(())) = self.submit(Request::Flush, random).await {
            self.record.borrow_mut().model.flushed(&flushing);
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
        let Some(change) = self.record.borrow_mut().model.begin(range, kind) else { return };
        let request = any_request(range, &change, kind, durability, random);
        let outcome = self.submit(request, random).await;
        let is_durable = durability.max(self.system.min_durability()).sync().is_some();
        let model = &mut self.record.borrow_mut().model;
        match outcome {
            Some(Ok(())) => model.succeed(change, is_durable),
            Some(Err(_)) => model.fail(change),
            // With larger blocks, a change of a part of a block may undo the cancelled change while
            // it is in flight, even if a read has seen it.
            None if self.limits.block == 1 => model.cancel(change),
            None => {}
        }
    }

    /// The outcome of a request, or `None` when it was cancelled.
    async fn submit(&self, request: Request, random: &mut Rng) -> Option<Result<()>> {
        let number = self.record.borrow_mut().history.asked(self.sim.clock().now(), &request);
        let may_refuse =
            matches!(request, Request::WriteZeroes { fallback: Fallback::Forbidden, .. });
        let mut outcome = pin!(self.system.submit(request));
        let outcome = if random.f64() < self.limits.cancel_probability {
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
        self.heard().await;
        let now = self.sim.clock().now();
        self.record.borrow_mut().answered(number, now, &outcome, self.limits.may_fail, may_refuse);
        outcome
    }

    /// A range of the disk, aligned to blocks or not. Most ranges are short; many overlap.
    fn any_range(&self, random: &mut Rng) -> ByteRange {
        let size = self.size.get();
        let unit = if random.bool() { self.limits.block } else { 1 };
        let start = random.u64(..size.div_ceil(unit)) * unit;
        let length = match random.u8(..4) {
            0 => random.u64(1..=size),
            1 => random.u64(1..=64),
            _ => random.u64(1..=3) * self.limits.block.max(512),
        };
        let length = length.next_multiple_of(unit);
        ByteRange::between(start, (start + length).min(size))
    }
}

impl Record {
    pub(crate) fn new(model: Model) -> Self {
        Self {
            model,
            report: Report::default(),
            history: History::default(),
            violation: None,
            is_clean_run: true,
        }
    }

    /// Records that a request ended or was cancelled. A failure without a permitted reason is a
    /// violation.
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

/// Memory for `range`, and the offset at which the data starts in it: mostly aligned, sometimes
/// not.
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
