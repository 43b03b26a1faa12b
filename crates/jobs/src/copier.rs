//! Copies what is dirty from one disk to the other, over and over, for as long as the job goes on.
//!
//! Guarantees: two copies in flight never overlap. What is dirty is made clean before it is read, so a change that comes
//! later makes it dirty again. At most `MAX_IN_FLIGHT` copies of `CHUNK_SIZE` are in flight, and no copy is dropped
//! while it is: its write might come late, after a newer one of the same bytes. What a guest's request waits for goes first.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{ByteRange, Result, Storage};
use blockhouse_disk::{MARK_BYTES, RangeCopy};
use futures_channel::oneshot;
use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::clock::{ClockSleep, JobClock};
use crate::control::{JobControl, JobProgress};
use crate::tracker::{Tracker, UrgentCopy};

/// Bytes of one copy.
const CHUNK_SIZE: u64 = 1 << 20;
/// Copies that are in flight together.
const MAX_IN_FLIGHT: usize = 8;
/// How long it rests between two passes while it keeps up with a guest, so that what changes often is not copied each time.
const PASS_INTERVAL: Duration = Duration::from_millis(100);
/// The time over which the rate is measured.
const RATE_WINDOW: Duration = Duration::from_secs(1);
/// Passes in a row that leave more than half of what the pass before left: it does not converge.
const MAX_SLOW_PASSES: u32 = 3;

/// See the module's page.
pub(crate) struct Copier<S: Storage> {
    copy: RangeCopy<S>,
    tracker: Arc<Tracker>,
    control: Arc<JobControl>,
    clock: Rc<dyn JobClock>,
    /// In granules.
    in_flight: RefCell<Vec<ByteRange>>,
    cursor: Cell<u64>,
    passes: Cell<Passes>,
    /// When the next copy in the background may begin.
    next_copy: Cell<Duration>,
    /// The limit that this follows from.
    paced_for: Cell<Option<NonZeroU64>>,
    rate: Cell<Rate>,
    copied: Cell<u64>,
    /// Whether limits and rests do not count, because the guest waits.
    is_hurried: Cell<bool>,
    /// Whether nothing is to be begun any more.
    is_stopped: Cell<bool>,
}

/// How the passes over the disk go.
#[derive(Clone, Copy, Default)]
struct Passes {
    count: u64,
    /// What the last one left.
    left: u64,
    slow: u32,
}

#[derive(Clone, Copy, Default)]
struct Rate {
    since: Duration,
    bytes: u64,
    last: u64,
}

/// What to do next.
enum Next {
    /// Copy this, and let what waits for it go on.
    Copy(ByteRange, Option<oneshot::Sender<()>>),
    /// Nothing before this time has passed.
    Later(Duration),
    /// Wait for news.
    Nothing,
}

impl<S: Storage> Copier<S> {
    pub(crate) fn new(
        copy: RangeCopy<S>,
        tracker: Arc<Tracker>,
        control: Arc<JobControl>,
        clock: Rc<dyn JobClock>,
    ) -> Self {
        Self {
            copy,
            tracker,
            control,
            clock,
            in_flight: RefCell::default(),
            cursor: Cell::new(0),
            passes: Cell::default(),
            next_copy: Cell::default(),
            paced_for: Cell::default(),
            rate: Cell::default(),
            copied: Cell::new(0),
            is_hurried: Cell::new(false),
            is_stopped: Cell::new(true),
        }
    }

    pub(crate) fn range_copy(&self) -> &RangeCopy<S> {
        &self.copy
    }

    /// How many times it came to the end of the disk.
    pub(crate) fn passes(&self) -> u64 {
        self.passes.get().count
    }

    /// Whether pass after pass leaves about as much as the one before.
    pub(crate) fn is_slower_than_guest(&self) -> bool {
        self.passes.get().slow >= MAX_SLOW_PASSES
    }

    /// Bytes that are dirty or being copied.
    pub(crate) fn remaining(&self) -> u64 {
        let in_flight: u64 = self.in_flight.borrow().iter().map(|range| range.length()).sum();
        self.tracker.dirty().dirty_bytes() + in_flight
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

    /// Copies what is dirty while it is [started](Self::start), until `is_over` or a copy fails; then all copies have ended.
    ///
    /// # Errors
    /// The first error of a copy.
    pub(crate) async fn run(&self, is_over: impl Fn() -> bool) -> Result<()> {
        let mut copies = FuturesUnordered::new();
        let mut outcome = Ok(());
        loop {
            // Before it looks, so that it misses nothing.
            let news = self.control.changed().listen();
            let mut later = None;
            while outcome.is_ok() && copies.len() < MAX_IN_FLIGHT {
                match self.next() {
                    Next::Copy(range, done) => copies.push(self.carry_out(range, done)),
                    Next::Later(time) => {
                        later = Some(time);
                        break;
                    }
                    Next::Nothing => break,
                }
            }
            if copies.is_empty() && (outcome.is_err() || is_over()) {
                return outcome;
            }
            let sleep = later.map(|time| self.clock.sleep(time));
            let ended = next_event(&mut copies, news, sleep).await;
            if ended.is_some() {
                self.control.changed().notify_all();
            }
            outcome = outcome.and(ended.unwrap_or(Ok(())));
        }
    }

    /// What to begin next: it is in flight from now on.
    fn next(&self) -> Next {
        let is_free =
            |range: ByteRange| !self.in_flight.borrow().iter().any(|busy| busy.overlaps(range));
        if let Some(UrgentCopy { range, done }) = self.tracker.next_urgent(is_free) {
            self.in_flight.borrow_mut().push(range);
            return Next::Copy(range, Some(done));
        }
        if self.is_stopped.get() || (self.control.is_paused() && !self.is_hurried.get()) {
            return Next::Nothing;
        }
        let now = self.clock.now();
        if self.paced_for.replace(self.control.speed()) != self.control.speed() {
            self.next_copy.set(now);
        }
        if now < self.next_copy.get() && !self.is_hurried.get() {
            return Next::Later(self.next_copy.get() - now);
        }
        // A change that makes something dirty tells nobody: it costs the guest nothing.
        let Some(range) = self.next_dirty() else { return Next::Later(PASS_INTERVAL) };
        // Clean before it is read.
        self.tracker.dirty().clear(range);
        self.in_flight.borrow_mut().push(range);
        if let Some(speed) = self.control.speed() {
            let time = Duration::from_secs_f64(range.length() as f64 / speed.get() as f64);
            self.next_copy.set(now.max(self.next_copy.get()) + time);
        }
        Next::Copy(range, None)
    }

    /// The next dirty range that is not being copied, at most a chunk of it. A pass ends at the end of the disk: then there
    /// is none. While the guest waits it begins at the start again at once, and tells nobody: what is left then is dirty
    /// again while it is copied, and to be told of that by itself would keep the task from ever waiting for it.
    fn next_dirty(&self) -> Option<ByteRange> {
        let start = self.cursor.get();
        let next = self.next_dirty_to_end();
        if next.is_some() {
            return next;
        }
        if self.is_hurried.get() {
            self.cursor.set(0);
            return self.next_dirty_to_end();
        }
        if start > 0 || self.passes() == 0 {
            self.end_pass();
        }
        None
    }

    fn next_dirty_to_end(&self) -> Option<ByteRange> {
        let dirty = self.tracker.dirty();
        let granule = dirty.granularity();
        let in_flight = self.in_flight.borrow();
        loop {
            let range = dirty.next(self.cursor.get(), self.chunk_size())?;
            // All granules that a copy in flight touches: they are made clean as a whole.
            let busy = in_flight.iter().map(|busy| busy.align_outward(granule));
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

    /// Bytes of a copy: where a limit is low, as few as an eighth of a second has.
    fn chunk_size(&self) -> u64 {
        self.control.speed().map_or(CHUNK_SIZE, |speed| CHUNK_SIZE.min(speed.get() / 8))
    }

    /// The next pass begins, after a rest.
    fn end_pass(&self) {
        self.cursor.set(0);
        let (before, left) = (self.passes.get(), self.tracker.dirty().dirty_bytes());
        let is_slow = before.count > 0 && left > before.left / 2;
        let slow = if is_slow { before.slow + 1 } else { 0 };
        self.passes.set(Passes { count: before.count + 1, left, slow });
        self.next_copy.set(self.next_copy.get().max(self.clock.now() + PASS_INTERVAL));
        self.control.changed().notify_all();
    }

    /// Copies a range, but for the sector that is written last of all.
    async fn carry_out(&self, range: ByteRange, done: Option<oneshot::Sender<()>>) -> Result<()> {
        let wanted = range.skip(MARK_BYTES.saturating_sub(range.offset()).min(range.length()));
        let outcome = match wanted.is_empty() {
            true => Ok(0),
            false => self.copy.copy(wanted).await,
        };
        self.in_flight.borrow_mut().retain(|busy| *busy != range);
        match &outcome {
            Ok(written) => self.count(*written),
            Err(_) => {
                self.tracker.dirty().mark(range);
            }
        }
        if let Some(done) = done {
            // The request that waits goes on, whatever the outcome. Its future may have been dropped.
            let _ = done.send(());
        }
        outcome.map(|_| ())
    }

    /// Counts bytes that were written, and tells how far the job is.
    fn count(&self, written: u64) {
        let now = self.clock.now();
        let mut rate = self.rate.get();
        rate.bytes += written;
        let time = now.saturating_sub(rate.since);
        if time >= RATE_WINDOW {
            let last = (rate.bytes as f64 / time.as_secs_f64()) as u64;
            rate = Rate { since: now, bytes: 0, last };
        }
        self.rate.set(rate);
        self.copied.set(self.copied.get() + written);
        self.tell_progress();
    }

    /// Tells how far the job is.
    pub(crate) fn tell_progress(&self) {
        let (copied, remaining) = (self.copied.get(), self.remaining());
        let (total, rate) = (copied + remaining, self.rate.get().last);
        self.control.set_progress(JobProgress { copied, remaining, total, rate });
    }
}

/// Waits for the end of a copy, for news, or for a time. The outcome of the copy, if it was one.
async fn next_event(
    copies: &mut FuturesUnordered<impl Future<Output = Result<()>>>,
    news: impl Future<Output = ()>,
    sleep: Option<ClockSleep>,
) -> Option<Result<()>> {
    let wait = async {
        match sleep {
            Some(sleep) => drop(select(pin!(news), sleep).await),
            None => news.await,
        }
    };
    // Of an empty set there is nothing to wait for.
    let ended = async {
        match copies.is_empty() {
            true => pending().await,
            false => copies.next().await,
        }
    };
    match select(pin!(ended), pin!(wait)).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right(_) => None,
    }
}
