//! A stream: a disk gets what its image leaves to its backing file while its guest goes on, and
//! then the backing file is detached (`block-stream` of QEMU). Down to a further base it gets what
//! the images before that have, and that base takes their place. A commit of layers
//! ([`LayerCommit`], `block-commit` of QEMU with another image than the disk's as its top) goes the
//! same way, but the base gets what the images between have.
//!
//! 1. From the start to the end of the disk, what the image leaves to its backing file is made its
//!    own ([`DiskJobs::populate`](blockhouse_disk::DiskJobs::populate)), a few parts at a time, at
//!    the pace that the guest's requests leave ([`Pace`]).
//! 2. When nothing is left: all of that becomes durable ([`Disk::check_populated`]), and one write
//!    of the header detaches the backing file
//!    ([`DiskJobs::detach_backing`](blockhouse_disk::DiskJobs::detach_backing)), or names the base.
//!
//! Guarantees: what the disk reads never changes. Until the write of step 2 the image needs its
//! backing file, and names it; a job that is cancelled, fails or is killed leaves what it has
//! filled, and another one goes on from there; one that [tries again](Stream::try_again) leaves a
//! part that cannot be filled to its next pass, and fills all others. No request of the guest fails
//! by it. Nothing is ever changed in the backing file, but by a commit. When the job's end is
//! decided, nothing is written to the disk that the backing file answers later: the disk may be
//! closed then.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Error, Result, Storage};
use blockhouse_disk::{
    BackedRange, BlockStatusCache, Disk, FurtherBase, LayerCommit, PopulatingGuard,
};
use blockhouse_engine::Clock;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;

use crate::control::{Completion, JobControl, JobEnd, JobStage};
use crate::meter::Meter;
use crate::next_event::next_event;
use crate::pace::{Allowance, Pace, Schedule};
use crate::retry::Retry;

/// Parts that are in flight together.
const MAX_IN_FLIGHT: usize = 8;
/// Maximum parts in flight if the rate is limited.
const MAX_AT_RATE: usize = 2;
/// After this many failures in a row the storage counts as unavailable, and all is left until a
/// pause is over.
const MAX_FAILED: u32 = 32;
/// Bytes that are left out if the next part cannot be looked up.
const SKIPPED: u64 = 1 << 20;

/// A disk to be filled. See the module's page.
pub struct Stream<S: Storage> {
    disk: Arc<Disk<S>>,
    control: Arc<JobControl>,
    clock: Rc<dyn Clock>,
    pace: RefCell<Pace>,
    meter: RefCell<Meter>,
    /// The end of the part that is filled, being filled, or left to the next pass.
    cursor: Cell<u64>,
    pass: Cell<Pass>,
    /// When the next part may begin.
    schedule: Schedule,
    /// For parts that could not be filled; `None`: the job fails.
    retry: Option<Retry>,
    work: Work<S>,
}

/// The image to be filled, and the images that it is filled from.
enum Work<S: Storage> {
    /// The disk, from its backing files down to a base.
    Fill { base: Option<FurtherBase>, _guard: PopulatingGuard },
    /// A base, from layers above it.
    Commit(Rc<LayerCommit<S>>),
}

/// How far a pass over the disk is.
#[derive(Clone, Copy, Default)]
struct Pass {
    /// Bytes that were begun of those that an earlier pass has left; `None` in the first one.
    left: Option<u64>,
    /// Bytes that are left to the next one, and the first of them.
    failed: u64,
    first_failed: Option<u64>,
    /// Failures since something was filled.
    failures: u32,
}

/// The work that may be begun now.
enum Turn {
    /// A part, which takes its time at this rate in bytes a second.
    Part(Option<NonZeroU64>),
    /// Nothing before this time has passed.
    Later(Duration),
    /// Wait for news.
    Nothing,
}

impl<S: Storage> Stream<S> {
    /// A job that fills `disk`, on which it was
    /// [begun](blockhouse_disk::DiskJobs::begin_populating).
    pub fn new(
        disk: Arc<Disk<S>>,
        guard: PopulatingGuard,
        control: Arc<JobControl>,
        clock: Rc<dyn Clock>,
    ) -> Self {
        Self::of(disk, Work::Fill { base: None, _guard: guard }, control, clock)
    }

    /// A job that commits layers, which were [begun](LayerCommit::begin). The caller
    /// [ends](LayerCommit::end) them.
    pub fn commit(
        layers: Rc<LayerCommit<S>>,
        control: Arc<JobControl>,
        clock: Rc<dyn Clock>,
    ) -> Self {
        Self::of(Arc::clone(layers.disk()), Work::Commit(layers), control, clock)
    }

    fn of(
        disk: Arc<Disk<S>>,
        work: Work<S>,
        control: Arc<JobControl>,
        clock: Rc<dyn Clock>,
    ) -> Self {
        let pace = RefCell::new(Pace::new(clock.now(), disk.stats().export_load()));
        let (meter, cursor, pass, schedule, retry) = Default::default();
        Self { disk, control, clock, pace, meter, cursor, pass, schedule, retry, work }
    }

    /// Retries parts that cannot be filled, until it is cancelled: for a job without supervision,
    /// over storage that may be unavailable for a while. Each pause is twice the last one, from 10
    /// seconds to 5 minutes; they are logged.
    #[must_use]
    pub fn try_again(mut self) -> Self {
        self.retry = Some(Retry::default());
        self
    }

    /// Fills the disk with the data of the images above `base`, and keeps `base`.
    #[must_use]
    pub fn down_to(mut self, base: FurtherBase) -> Self {
        if let Work::Fill { base: down_to, .. } = &mut self.work {
            *down_to = Some(base);
        }
        self
    }

    /// Fills the disk, and ends as its control requests; the caller passes the
    /// [end](JobControl::end) to the control.
    pub async fn run(&self) -> JobEnd {
        let outcome = self.take_steps().await;
        match outcome {
            Ok(Some(pause)) => JobEnd::Completed { completion: Completion::Switch, pause },
            Ok(None) => JobEnd::Cancelled,
            Err(error) => JobEnd::failed(&error),
        }
    }

    /// For how long detaching may have held changes off; `None` if it was cancelled.
    async fn take_steps(&self) -> Result<Option<Duration>> {
        // Ranges that the guest changes during this are the image's own, so one pass is enough.
        self.fill().await?;
        if self.control.is_cancelled() {
            return Ok(None);
        }
        self.control.set_progress(self.meter.borrow().progress(0));
        self.work.settle(&self.disk).await?;
        if !self.control.commit() {
            return Ok(None);
        }
        self.control.set_stage(JobStage::Completing);
        let began = self.clock.now();
        self.work.leave_out(&self.disk).await?;
        Ok(Some(self.clock.now().saturating_sub(began)))
    }

    /// Fills all of the disk, or until it is cancelled. Then all parts have ended.
    async fn fill(&self) -> Result<()> {
        let mut parts = FuturesUnordered::new();
        let mut cache = BlockStatusCache::default();
        let mut outcome = Ok(());
        let mut is_all_begun = false;
        loop {
            // Before the check, so that no notification is missed.
            let news = self.control.changed().listen();
            let is_over = outcome.is_err() || self.control.is_cancelled();
            if is_all_begun && !is_over && parts.is_empty() && self.begin_next_pass() {
                is_all_begun = false;
            }
            let is_ending = is_all_begun || is_over;
            if is_ending && parts.is_empty() {
                return outcome;
            }
            let turn = if is_ending { Turn::Nothing } else { self.turn(parts.len()) };
            let sleep = match turn {
                Turn::Part(rate) => {
                    match self.find_part(&mut cache, &mut parts).await {
                        Ok(Some(part)) => {
                            self.begin(part, rate);
                            parts.push(self.populate(part));
                        }
                        Ok(None) => is_all_begun = true,
                        Err(error) => outcome = self.leave_out(error),
                    }
                    continue;
                }
                Turn::Later(time) => Some(self.clock.sleep(time)),
                Turn::Nothing => None,
            };
            if let Some(Err(error)) = next_event(&mut parts, news, sleep).await {
                outcome = outcome.and(self.bear(error));
            }
        }
    }

    /// The next part, while those in flight continue: guests may wait for them.
    ///
    /// # Errors
    /// An error of the lookup, or one of a part in flight that ends the job.
    async fn find_part(
        &self,
        cache: &mut BlockStatusCache,
        parts: &mut FuturesUnordered<impl Future<Output = Result<()>>>,
    ) -> Result<Option<BackedRange>> {
        let mut found = pin!(self.work.next_part(&self.disk, self.cursor.get(), cache));
        loop {
            let part = pin!(next_event(parts, pending(), None));
            match select(found.as_mut(), part).await {
                Either::Left((found, _)) => return found,
                Either::Right((ended, _)) => {
                    if let Some(Err(error)) = ended {
                        self.bear(error)?;
                    }
                }
            }
        }
    }

    /// The next part cannot be looked up: it is left to the next pass.
    fn leave_out(&self, error: Error) -> Result<()> {
        let start = self.cursor.get();
        let end = self.work.end(&self.disk).min(start.saturating_add(SKIPPED));
        self.count_begun(end.saturating_sub(start), end);
        self.count_failed(start, end.saturating_sub(start));
        self.bear(error)
    }

    /// All of a pass has ended. Whether another one begins, after a pause: something was left to
    /// it.
    fn begin_next_pass(&self) -> bool {
        let pass = self.pass.get();
        let Some(first) = pass.first_failed else { return false };
        self.cursor.set(first);
        self.pass.set(Pass { left: Some(pass.failed), ..Pass::default() });
        if let Some(pause) = self.retry.as_ref().and_then(|retry| retry.fail(self.clock.now())) {
            tracing::warn!(
                "{}: {} bytes cannot be filled from its backing file; all else is, and they are tried again in {} s",
                self.disk.name(),
                pass.failed,
                pause.as_secs()
            );
        }
        true
    }

    /// Counts bytes that were begun, up to `end`.
    fn count_begun(&self, bytes: u64, end: u64) {
        self.cursor.set(end);
        let pass = self.pass.get();
        self.pass.set(Pass { left: pass.left.map(|left| left.saturating_sub(bytes)), ..pass });
    }

    /// Counts bytes that are left to the next pass.
    fn count_failed(&self, offset: u64, bytes: u64) {
        let pass = self.pass.get();
        self.pass.set(Pass {
            failed: pass.failed.saturating_add(bytes),
            first_failed: Some(pass.first_failed.map_or(offset, |first| first.min(offset))),
            ..pass
        });
    }

    /// Bytes that are not begun, or left to the next pass.
    fn left(&self) -> u64 {
        let pass = self.pass.get();
        let ahead = || self.work.end(&self.disk).saturating_sub(self.cursor.get());
        pass.left.unwrap_or_else(ahead).saturating_add(pass.failed)
    }

    /// A part could not be filled, or not be looked up.
    fn bear(&self, error: Error) -> Result<()> {
        let Some(retry) = &self.retry else {
            // Other parts may be in flight for long yet: nothing of the disk is to wait for them.
            self.control.decide(JobEnd::failed(&error));
            return Err(error);
        };
        let pass = self.pass.get();
        let failures = (pass.failures + 1) % MAX_FAILED;
        self.pass.set(Pass { failures, ..pass });
        if failures == 1 {
            tracing::warn!("{}: a part is left to the backing file: {error}", self.disk.name());
        }
        if failures == 0
            && let Some(pause) = retry.fail(self.clock.now())
        {
            tracing::warn!(
                "{}: cannot be filled from its backing file, and tries again in {} s: {error}",
                self.disk.name(),
                pause.as_secs()
            );
        }
        Ok(())
    }

    /// The work that may begin in addition to this many parts in flight.
    fn turn(&self, in_flight: usize) -> Turn {
        if self.control.is_paused() {
            return Turn::Nothing;
        }
        let now = self.clock.now();
        if let Some(wait) = self.retry.as_ref().and_then(|retry| retry.wait(now)) {
            return Turn::Later(wait);
        }
        let allowance = self.pace.borrow_mut().allowance(now, || self.disk.stats().export_load());
        let (room, rate) = match allowance.limited(self.control.speed()) {
            Allowance::Rest(end) => return Turn::Later(end.saturating_sub(now)),
            Allowance::Unlimited => (MAX_IN_FLIGHT, None),
            Allowance::Rate(rate) => (MAX_AT_RATE, NonZeroU64::new(rate)),
        };
        self.schedule.follow(rate, now);
        match self.schedule.wait(now) {
            wait if wait > Duration::ZERO && rate.is_some() => Turn::Later(wait),
            _ if in_flight >= room => Turn::Nothing,
            _ => Turn::Part(rate),
        }
    }

    fn begin(&self, part: BackedRange, rate: Option<NonZeroU64>) {
        self.count_begun(part.range.length(), part.range.end());
        // Zeros are not read.
        if !part.is_zero {
            self.schedule.begin(part.range.length(), rate, self.clock.now());
        }
    }

    async fn populate(&self, part: BackedRange) -> Result<()> {
        let go_on = || !self.control.is_decided();
        let filled = self.work.copy(&self.disk, part, &go_on).await.inspect_err(|_| {
            self.count_failed(part.range.offset(), part.range.length());
        })?;
        self.pass.update(|pass| Pass { failures: 0, ..pass });
        self.retry.iter().for_each(|retry| retry.succeed(self.clock.now()));
        let copied = if part.is_zero { 0 } else { filled };
        self.pace.borrow_mut().count(copied);
        let left = self.left();
        let mut meter = self.meter.borrow_mut();
        meter.count(self.clock.now(), copied, left);
        self.control.set_progress(meter.progress(left));
        Ok(())
    }
}

impl<S: Storage> Work<S> {
    /// Where it ends.
    fn end(&self, disk: &Disk<S>) -> u64 {
        match self {
            Self::Fill { .. } => disk.size(),
            Self::Commit(layers) => layers.size(),
        }
    }

    async fn next_part(
        &self,
        disk: &Disk<S>,
        offset: u64,
        cache: &mut BlockStatusCache,
    ) -> Result<Option<BackedRange>> {
        match self {
            Self::Fill { base, .. } => disk.jobs().next_backed(offset, base.as_ref(), cache).await,
            Self::Commit(layers) => layers.next_part(offset).await,
        }
    }

    async fn copy(
        &self,
        disk: &Disk<S>,
        part: BackedRange,
        go_on: &dyn Fn() -> bool,
    ) -> Result<u64> {
        match self {
            Self::Fill { .. } => disk.jobs().populate(part, go_on).await,
            Self::Commit(layers) => layers.copy(part).await,
        }
    }

    /// Makes all of it durable, while the image above names the others still.
    async fn settle(&self, disk: &Disk<S>) -> Result<()> {
        match self {
            Self::Fill { base, .. } => disk.jobs().check_populated(base.as_ref()).await,
            Self::Commit(layers) => layers.settle().await,
        }
    }

    async fn leave_out(&self, disk: &Disk<S>) -> Result<()> {
        match self {
            Self::Fill { base, .. } => disk.jobs().detach_backing(base.as_ref()).await,
            Self::Commit(layers) => layers.name_base().await,
        }
    }
}
