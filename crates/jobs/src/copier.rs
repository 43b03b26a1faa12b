//! Copies dirty ranges from one disk to the other, over and over, for as long as the job goes on.
//!
//! Guarantees: two copies in flight never overlap, nor does a copy begin that overlaps a live write
//! ([`Tracker`]). What is dirty is made clean before it is read, so a change that comes later makes
//! it dirty again. In flight are at most `MAX_IN_FLIGHT` copies of `CHUNK_SIZE`, as many that
//! guests wait for, and forwarded writes. None is dropped while it is: its write might come late,
//! after a newer one of the same bytes. What a guest's request waits for goes first, but takes no
//! room from the background: however slow the target is, what is dirty becomes less. In the
//! background it copies as fast as the guest, who uses the disk meanwhile, leaves room for
//! ([`Pace`]).

use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{ByteRange, Result, Storage};
use blockhouse_disk::{Disk, RangeCopy};
use blockhouse_engine::Clock;
use futures_util::future::{FutureExt, select};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::control::{JobControl, JobEnd};
use crate::meter::Meter;
use crate::next_event::next_event;
use crate::pace::{Allowance, Pace, Schedule};
use crate::tracker::{ForwardedWrite, Tracker, UrgentCopy, UrgentWork};

/// Bytes of one copy.
const CHUNK_SIZE: u64 = 1 << 20;
/// A copy has about the bytes of this part of a second, if the rate is limited.
const CHUNKS_A_SECOND: u64 = 256;
/// Minimum bytes of a copy at a limited rate, if this many are adjacent.
const MIN_CHUNK_SIZE: u64 = 64 << 10;
/// Copies in the background that are in flight together.
const MAX_IN_FLIGHT: usize = 8;
/// Maximum short background copies in flight if the rate is limited.
const MAX_SHORT_IN_FLIGHT: usize = 16;
/// Work in flight that guests wait for.
const MAX_URGENT: usize = 256;
/// Pause between two passes while it keeps up with a guest, so that often changed ranges are not
/// copied each time.
const PASS_INTERVAL: Duration = Duration::from_millis(100);
/// The number of pieces of work after which tasks that wait for the job are woken, if nothing else
/// happens.
const NEWS_INTERVAL: u32 = 32;

/// The ranges that are not copied as they are found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyRule {
    /// Bytes at the start of the disk that the copier leaves out: they are written last of all, by
    /// others.
    pub(crate) left_out: u64,
    /// Clean bytes between dirty ones that are copied with them: that is quicker than two copies.
    pub(crate) max_gap: u64,
}

/// See the module's page.
pub(crate) struct Copier<S: Storage> {
    source: Arc<Disk<S>>,
    rule: CopyRule,
    copy: RangeCopy<S>,
    tracker: Arc<Tracker>,
    control: Arc<JobControl>,
    clock: Rc<dyn Clock>,
    /// The ranges of all copies, in the background and urgent ones.
    in_flight: RefCell<Vec<ByteRange>>,
    /// Copies in the background, and their bytes.
    background: Cell<(usize, u64)>,
    /// Work in flight that guests wait for.
    urgent: Cell<usize>,
    cursor: Cell<u64>,
    passes: Cell<u64>,
    pace: RefCell<Pace>,
    /// When the next copy in the background may begin.
    schedule: Schedule,
    meter: RefCell<Meter>,
    /// Pieces of work that have ended since the last notification.
    untold: Cell<u32>,
    /// Whether the disks were equal at the last check.
    was_idle: Cell<bool>,
    /// Whether limits and rests do not count, because the guest waits.
    is_hurried: Cell<bool>,
    /// Whether the job begins no further work.
    is_stopped: Cell<bool>,
}

/// A piece of work: in flight from when it is made.
enum Work {
    Copy(ByteRange),
    Urgent(UrgentCopy),
    Write(ForwardedWrite),
}

/// The next step.
enum Next {
    Begin(Work),
    /// Nothing before this time has passed.
    Later(Duration),
    /// Wait for news.
    Nothing,
}

/// How much may be in flight in the background.
struct Room {
    chunk: u64,
    copies: usize,
    bytes: u64,
}

impl<S: Storage> Copier<S> {
    pub(crate) fn new(
        source: Arc<Disk<S>>,
        (copy, rule): (RangeCopy<S>, CopyRule),
        tracker: Arc<Tracker>,
        control: Arc<JobControl>,
        clock: Rc<dyn Clock>,
    ) -> Self {
        let pace = RefCell::new(Pace::new(clock.now(), source.stats().export_load()));
        Self {
            source,
            rule,
            copy,
            tracker,
            control,
            clock,
            in_flight: RefCell::default(),
            background: Cell::default(),
            urgent: Cell::new(0),
            cursor: Cell::new(0),
            passes: Cell::new(0),
            pace,
            schedule: Schedule::default(),
            meter: RefCell::default(),
            untold: Cell::new(0),
            was_idle: Cell::new(false),
            is_hurried: Cell::new(false),
            is_stopped: Cell::new(true),
        }
    }

    pub(crate) fn range_copy(&self) -> &RangeCopy<S> {
        &self.copy
    }

    /// How many times it reached the end of the disk.
    pub(crate) fn passes(&self) -> u64 {
        self.passes.get()
    }

    /// Whether the guest changes more than is copied.
    pub(crate) fn is_losing(&self) -> bool {
        self.meter.borrow().is_losing()
    }

    /// Bytes that are dirty or being copied, or that the target is getting.
    pub(crate) fn remaining(&self) -> u64 {
        let in_flight: u64 = self.in_flight.borrow().iter().map(|range| range.length()).sum();
        self.tracker.dirty().dirty_bytes() + in_flight + self.tracker.backlog()
    }

    /// Whether both disks are equal, as far as changes have ended.
    pub(crate) fn is_idle(&self) -> bool {
        self.remaining() == 0 && self.tracker.is_quiet()
    }

    /// Copies without rests and limits, or with them again.
    pub(crate) fn hurry(&self, is_hurried: bool) {
        self.is_hurried.set(is_hurried);
        self.control.changed().notify_all();
    }

    /// Begins to copy.
    pub(crate) fn start(&self) {
        self.is_stopped.set(false);
        self.control.changed().notify_all();
    }

    /// Begins no more copies: [`run`](Self::run) ends when those in flight have.
    pub(crate) fn stop(&self) {
        self.is_stopped.set(true);
        self.control.changed().notify_all();
    }

    /// Copies dirty ranges while it is [started](Self::start), until `is_over` or a copy fails;
    /// then all copies have ended.
    ///
    /// # Errors
    /// The first error of a copy.
    pub(crate) async fn run(&self, is_over: impl Fn() -> bool) -> Result<()> {
        let mut works = FuturesUnordered::new();
        let mut outcome = Ok(());
        loop {
            // Before the check, so that no notification is missed.
            let news = select(self.control.changed().listen(), self.tracker.work_added().listen());
            let mut later = None;
            while outcome.is_ok() && works.len() < MAX_IN_FLIGHT + MAX_SHORT_IN_FLIGHT + MAX_URGENT
            {
                match self.next() {
                    Next::Begin(work) => works.push(self.carry_out(work)),
                    Next::Later(time) => {
                        later = Some(time);
                        break;
                    }
                    Next::Nothing => break,
                }
            }
            if works.is_empty() {
                if outcome.is_err() || is_over() {
                    return outcome;
                }
                self.tell_of_rest();
            }
            let sleep = later.map(|time| self.clock.sleep(time));
            let mut next = next_event(&mut works, async { drop(news.await) }, sleep).await;
            while let Some(ended) = next {
                self.tell_news(works.is_empty());
                if let Err(error) = &ended {
                    // Other copies may be in flight for long yet.
                    self.control.decide(JobEnd::failed(error));
                    self.tracker.release_writes();
                }
                outcome = outcome.and(ended);
                // Others that have ended, too.
                next = works.next().now_or_never().flatten();
            }
        }
    }

    /// Notifies tasks that wait for the job when the disks have become equal. The source may be the
    /// last to end a change: then no piece of work ends that would notify them.
    fn tell_of_rest(&self) {
        let is_idle = self.is_idle();
        if is_idle && !self.was_idle.get() {
            self.control.changed().notify_all();
        }
        self.was_idle.set(is_idle);
    }

    /// Notifies tasks that wait for the job, but not of each piece of work: there are many.
    fn tell_news(&self, is_all: bool) {
        let untold = self.untold.get() + 1;
        let is_told = is_all || self.is_hurried.get() || untold >= NEWS_INTERVAL;
        self.untold.set(if is_told { 0 } else { untold });
        if is_told {
            self.tell_progress();
            self.control.changed().notify_all();
        }
    }

    /// The next step to begin.
    fn next(&self) -> Next {
        let is_free =
            |range: ByteRange| !self.in_flight.borrow().iter().any(|busy| busy.overlaps(range));
        // Whole granules: they are made clean.
        let limit = CHUNK_SIZE.max(self.tracker.dirty().granularity());
        // If the target is slower than the guest there is always more: background copies have a
        // limit of their own.
        let has_room = self.urgent.get() < MAX_URGENT;
        let urgent = has_room.then(|| self.tracker.next_urgent(limit, is_free)).flatten();
        self.urgent.set(self.urgent.get() + usize::from(urgent.is_some()));
        match urgent {
            Some(UrgentWork::Write(write)) => return Next::Begin(Work::Write(write)),
            Some(UrgentWork::Copy(copy)) => {
                self.tracker.dirty().clear(copy.range);
                self.in_flight.borrow_mut().push(copy.range);
                return Next::Begin(Work::Urgent(copy));
            }
            None => {}
        }
        if self.is_stopped.get() || (self.control.is_paused() && !self.is_hurried.get()) {
            return Next::Nothing;
        }
        self.next_in_background()
    }

    fn next_in_background(&self) -> Next {
        let now = self.clock.now();
        let load = || self.source.stats().export_load();
        let allowance = if self.is_hurried.get() {
            Allowance::Unlimited
        } else {
            self.pace.borrow_mut().allowance(now, load).limited(self.control.speed())
        };
        let rate = match allowance {
            Allowance::Rest(end) => return Next::Later(end.saturating_sub(now)),
            Allowance::Rate(rate) => NonZeroU64::new(rate),
            Allowance::Unlimited => None,
        };
        self.schedule.follow(rate, now);
        let wait = self.schedule.wait(now);
        if !wait.is_zero() && !self.is_hurried.get() {
            return Next::Later(wait);
        }
        let room = Room::at(rate);
        let (copies, bytes) = self.background.get();
        if copies >= room.copies || (copies > 0 && bytes >= room.bytes) {
            return Next::Nothing;
        }
        // A change that makes a range dirty wakes no task, to save the guest's time.
        let Some(range) = self.next_dirty(room.chunk) else { return Next::Later(PASS_INTERVAL) };
        // Clean before it is read.
        self.tracker.dirty().clear(range);
        self.in_flight.borrow_mut().push(range);
        self.background.set((copies + 1, bytes + range.length()));
        self.schedule.begin(range.length(), rate, now);
        Next::Begin(Work::Copy(range))
    }

    /// The next dirty range that is not being copied, at most `limit` bytes of it. `None` at the
    /// end of the disk, where a pass ends. While the guest waits, the search begins at the start
    /// again at once, without a wake-up: the rest becomes dirty again while it is copied, and a
    /// wake-up for that would keep the task from ever waiting for it.
    fn next_dirty(&self, limit: u64) -> Option<ByteRange> {
        let start = self.cursor.get();
        let next = self.next_dirty_to_end(limit);
        if next.is_some() {
            return next;
        }
        if self.is_hurried.get() {
            self.cursor.set(0);
            return self.next_dirty_to_end(limit);
        }
        // Where guests' writes are forwarded a later pass may find nothing at all: then the first
        // copies have to have ended.
        let (copies, _) = self.background.get();
        if start > 0 || self.passes() == 0 || (self.passes() == 1 && copies == 0) {
            self.end_pass();
        }
        None
    }

    fn next_dirty_to_end(&self, limit: u64) -> Option<ByteRange> {
        let dirty = self.tracker.dirty();
        if dirty.dirty_bytes() == 0 {
            return None;
        }
        let granule = dirty.granularity();
        let in_flight = self.in_flight.borrow();
        loop {
            let range = self.dirty_run(limit)?;
            let live = self.tracker.first_live(range);
            // All granules that a copy in flight touches: they are made clean as a whole.
            let busy = in_flight.iter().chain(&live).map(|busy| busy.align_outward(granule));
            let first = busy.filter(|busy| busy.overlaps(range)).min_by_key(|busy| busy.offset());
            match first {
                Some(busy) if busy.offset() <= range.offset() => self.cursor.set(busy.end()),
                other => {
                    let end = other.map_or(range.end(), |busy| busy.offset());
                    self.cursor.set(end);
                    return Some(range.truncate(end - range.offset()));
                }
            }
        }
    }

    /// The next dirty bytes, with short gaps between them.
    fn dirty_run(&self, limit: u64) -> Option<ByteRange> {
        let dirty = self.tracker.dirty();
        let mut run = dirty.next(self.cursor.get(), limit)?;
        while let Some(next) = dirty.next(run.end(), limit)
            && next.offset() - run.end() <= self.rule.max_gap
            && next.end() - run.offset() <= limit
        {
            run = ByteRange::between(run.offset(), next.end());
        }
        Some(run)
    }

    /// The next pass begins, after a rest.
    fn end_pass(&self) {
        self.cursor.set(0);
        self.passes.set(self.passes() + 1);
        self.schedule.rest_until(self.clock.now() + PASS_INTERVAL);
        self.control.changed().notify_all();
    }

    /// Carries out a piece of work. Requests that wait for it continue when it is dropped, also
    /// after an error.
    async fn carry_out(&self, work: Work) -> Result<()> {
        let is_urgent = !matches!(work, Work::Copy(_));
        let outcome = match work {
            Work::Write(write) => self.forward(write).await,
            Work::Copy(range) => {
                let outcome = self.copy_range(range).await;
                let (copies, bytes) = self.background.get();
                self.background.set((copies - 1, bytes - range.length()));
                self.pace.borrow_mut().count(range.length());
                outcome
            }
            Work::Urgent(copy) => self.copy_range(copy.range).await,
        };
        self.urgent.set(self.urgent.get() - usize::from(is_urgent));
        let written = outcome?;
        self.meter.borrow_mut().count(self.clock.now(), written, self.remaining());
        Ok(())
    }

    /// Copies a range, except the part that is left out; returns the number of bytes written.
    async fn copy_range(&self, range: ByteRange) -> Result<u64> {
        let left_out = self.rule.left_out.saturating_sub(range.offset());
        let wanted = range.skip(left_out.min(range.length()));
        let outcome = if wanted.is_empty() { Ok(0) } else { self.copy.copy(wanted).await };
        self.in_flight.borrow_mut().retain(|busy| *busy != range);
        if outcome.is_err() {
            self.tracker.dirty().mark(range);
        }
        outcome
    }

    /// Forwards a write of the source, except the part that is left out; returns the number of
    /// bytes.
    async fn forward(&self, write: ForwardedWrite) -> Result<u64> {
        let offset = write.range.offset();
        let (mut from, end) = write.into_parts();
        let skipped = self.rule.left_out.saturating_sub(offset).min(from.len() as u64);
        from.advance(skipped as usize);
        let length = from.len() as u64;
        let outcome = match length {
            0 => Ok(()),
            _ => self.copy.store(offset + skipped, from).await,
        };
        self.tracker.end_forwarded(end);
        outcome.map(|()| length)
    }

    /// Tells how far the job is.
    pub(crate) fn tell_progress(&self) {
        self.control.set_progress(self.meter.borrow().progress(self.remaining()));
    }
}

impl Room {
    /// At a rate in bytes a second; `None`: no limit.
    fn at(rate: Option<NonZeroU64>) -> Self {
        let Some(rate) = rate else {
            return Self { chunk: CHUNK_SIZE, copies: MAX_IN_FLIGHT, bytes: u64::MAX };
        };
        let chunk = (rate.get() / CHUNKS_A_SECOND).clamp(MIN_CHUNK_SIZE, CHUNK_SIZE);
        Self { chunk, copies: MAX_SHORT_IN_FLIGHT, bytes: 2 * chunk }
    }
}
