//! Copies dirty ranges from one disk to the other, repeatedly, until the job ends.
//!
//! Guarantees: two copies in flight never overlap, and no copy begins that overlaps a live write
//! ([`Tracker`]). A dirty range is made clean before it is read, so a later change makes it dirty
//! again. At most `MAX_IN_FLIGHT` background copies of `CHUNK_SIZE` are in flight, or
//! `MAX_SHORT_IN_FLIGHT` shorter ones at a limited rate. Beside them at most `MAX_URGENT` pieces of
//! *urgent* work are in flight: copies that guests wait for, and forwarded writes. No work in
//! flight is dropped, because its write could take effect late, after a newer write of the same
//! bytes. Urgent work begins first, but takes no room from background copies. So the dirty bytes
//! decrease, however slow the target is. The rate of background copies is the rate that the guest's
//! use of the disk allows ([`Pace`]).

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
/// The approximate number of background copies in a second if the rate is limited. The length of a
/// copy is the rate divided by this number, from `MIN_CHUNK_SIZE` to `CHUNK_SIZE`.
const CHUNKS_A_SECOND: u64 = 256;
/// Minimum bytes of a copy at a limited rate, if this many dirty bytes are adjacent.
const MIN_CHUNK_SIZE: u64 = 64 << 10;
/// Maximum background copies in flight if the rate is not limited.
const MAX_IN_FLIGHT: usize = 8;
/// Maximum background copies in flight if the rate is limited: they are shorter.
const MAX_SHORT_IN_FLIGHT: usize = 16;
/// Maximum pieces of urgent work in flight.
const MAX_URGENT: usize = 256;
/// Pause between two passes, so that a range that changes often is not copied after each change.
const PASS_INTERVAL: Duration = Duration::from_millis(100);
/// The number of pieces of work after which tasks that wait for the job are woken, if no other
/// event wakes them.
const NEWS_INTERVAL: u32 = 32;

/// The differences between the dirty ranges and the ranges that are copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyRule {
    /// Bytes at the start of the disk that the copier leaves out: the completion of the mirror
    /// writes them last.
    pub(crate) left_out: u64,
    /// Maximum clean bytes between dirty bytes that are copied with them, because one copy is
    /// quicker than two.
    pub(crate) max_gap: u64,
}

/// The copier of a job; see the module's page.
pub(crate) struct Copier<S: Storage> {
    source: Arc<Disk<S>>,
    rule: CopyRule,
    copy: RangeCopy<S>,
    tracker: Arc<Tracker>,
    control: Arc<JobControl>,
    clock: Rc<dyn Clock>,
    /// The ranges of all copies in flight, background and urgent ones.
    in_flight: RefCell<Vec<ByteRange>>,
    /// The number of background copies in flight, and their bytes.
    background: Cell<(usize, u64)>,
    /// The number of pieces of urgent work in flight.
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
    /// Whether limits and rests are ignored, because the guest waits.
    is_hurried: Cell<bool>,
    /// Whether no background copy begins. Urgent work still begins.
    is_stopped: Cell<bool>,
}

/// A piece of work, which counts as in flight from its creation on.
enum Work {
    Copy(ByteRange),
    Urgent(UrgentCopy),
    Write(ForwardedWrite),
}

/// The next step.
enum Next {
    Begin(Work),
    /// No work begins until this time has passed.
    Later(Duration),
    /// No work begins until a notification or the end of a piece of work.
    Nothing,
}

/// The limits for background copies in flight.
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

    /// The number of completed passes over the disk.
    pub(crate) fn passes(&self) -> u64 {
        self.passes.get()
    }

    /// Whether the remaining bytes hardly decrease, because the guest changes too many.
    pub(crate) fn is_losing(&self) -> bool {
        self.meter.borrow().is_losing()
    }

    /// Bytes that are dirty, in a copy in flight, or in a forwarded write that has not ended at the
    /// target.
    pub(crate) fn remaining(&self) -> u64 {
        let in_flight: u64 = self.in_flight.borrow().iter().map(|range| range.length()).sum();
        self.tracker.dirty().dirty_bytes() + in_flight + self.tracker.backlog()
    }

    /// Whether both disks are equal, apart from changes in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.remaining() == 0 && self.tracker.is_quiet()
    }

    /// Sets whether background copies ignore rests, limits and pauses of the job.
    pub(crate) fn hurry(&self, is_hurried: bool) {
        self.is_hurried.set(is_hurried);
        self.control.changed().notify_all();
    }

    /// Allows background copies.
    pub(crate) fn start(&self) {
        self.is_stopped.set(false);
        self.control.changed().notify_all();
    }

    /// Stops new background copies. Copies in flight and urgent work continue.
    pub(crate) fn stop(&self) {
        self.is_stopped.set(true);
        self.control.changed().notify_all();
    }

    /// Carries out urgent work, and copies dirty ranges while background copies are
    /// [allowed](Self::start), until `is_over` returns true or work fails. On return no work is in
    /// flight.
    ///
    /// # Errors
    /// The first error of a copy or of a forwarded write.
    pub(crate) async fn run(&self, is_over: impl Fn() -> bool) -> Result<()> {
        let mut works = FuturesUnordered::new();
        let mut outcome = Ok(());
        loop {
            // Listening begins before the check, so that no notification is missed.
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
                    // The end is decided at once, because other copies may be in flight for long.
                    self.control.decide(JobEnd::failed(error));
                    self.tracker.release_writes();
                }
                outcome = outcome.and(ended);
                // Other work may have ended, too.
                next = works.next().now_or_never().flatten();
            }
        }
    }

    /// Notifies tasks that wait for the job when the disks have become equal. If a change ends at
    /// the source last, no piece of work ends after it that would notify these tasks.
    fn tell_of_rest(&self) {
        let is_idle = self.is_idle();
        if is_idle && !self.was_idle.get() {
            self.control.changed().notify_all();
        }
        self.was_idle.set(is_idle);
    }

    /// Notifies tasks that wait for the job, but not after each piece of work, because there are
    /// many.
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
        // The limit is at least one granule, because only whole granules are made clean.
        let limit = CHUNK_SIZE.max(self.tracker.dirty().granularity());
        // Background copies have a separate limit, because urgent work never ends if the target is
        // slower than the guest.
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
        // A change that makes a range dirty wakes no task, to save the guest's time. So the copier
        // looks again after `PASS_INTERVAL`.
        let Some(range) = self.next_dirty(room.chunk) else { return Next::Later(PASS_INTERVAL) };
        // The range is made clean before it is read.
        self.tracker.dirty().clear(range);
        self.in_flight.borrow_mut().push(range);
        self.background.set((copies + 1, bytes + range.length()));
        self.schedule.begin(range.length(), rate, now);
        Next::Begin(Work::Copy(range))
    }

    /// The next dirty range that is not being copied, at most `limit` bytes of it. `None` at the
    /// end of the disk, where a pass ends. While the guest waits, the search begins at the start
    /// again at once, and the pass does not end. Reason: the end of a pass notifies tasks, the
    /// copier among them. If each search at the end of the disk notified the copier, the copier
    /// would never wait for its copies.
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
        // If guests' writes are forwarded, the second pass may find no dirty range. The second pass
        // ends only when the copies of the first pass have ended.
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
            // A busy range counts as whole granules, because granules are made clean as a whole.
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

    /// Ends the pass. The next one begins at the start of the disk, after a pause.
    fn end_pass(&self) {
        self.cursor.set(0);
        self.passes.set(self.passes() + 1);
        self.schedule.rest_until(self.clock.now() + PASS_INTERVAL);
        self.control.changed().notify_all();
    }

    /// Carries out a piece of work. Requests that wait for the work continue when `work` is
    /// dropped, also after an error.
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

    /// Reports the progress of the job.
    pub(crate) fn tell_progress(&self) {
        self.control.set_progress(self.meter.borrow().progress(self.remaining()));
    }
}

impl Room {
    /// The limits at a rate in bytes per second; `None`: the rate is not limited.
    fn at(rate: Option<NonZeroU64>) -> Self {
        let Some(rate) = rate else {
            return Self { chunk: CHUNK_SIZE, copies: MAX_IN_FLIGHT, bytes: u64::MAX };
        };
        let chunk = (rate.get() / CHUNKS_A_SECOND).clamp(MIN_CHUNK_SIZE, CHUNK_SIZE);
        Self { chunk, copies: MAX_SHORT_IN_FLIGHT, bytes: 2 * chunk }
    }
}
