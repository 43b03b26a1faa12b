//! A stream fills a disk's image from its backing file while the guest continues, and then detaches
//! the backing file (`block-stream` of QEMU). With a further base, the image gets only the data of
//! the images above that base, and then the base becomes its backing file. A commit of layers
//! ([`LayerCommit`]) has the same steps, but copies the data of the layers above a base down into
//! that base (`block-commit` of QEMU with a top that is not the disk's image).
//!
//! 1. From the start to the end of the disk, the ranges that the image leaves to its backing file
//!    are copied into the image ([`DiskJobs::populate`](blockhouse_disk::DiskJobs::populate)). A
//!    few parts are copied at a time, at the pace that the guest's requests allow ([`Pace`]).
//! 2. When no such range is left, the copied data becomes durable
//!    ([`DiskJobs::check_populated`](blockhouse_disk::DiskJobs::check_populated)). Then one write
//!    of the header detaches the backing file
//!    ([`DiskJobs::detach_backing`](blockhouse_disk::DiskJobs::detach_backing)), or names the base.
//!
//! Guarantees: the disk's content never changes. Until the write of step 2 the image needs its
//! backing file, and names it. After a job that is cancelled, fails or is killed, the filled ranges
//! stay filled, and another job continues from there. A job that [tries again](Stream::try_again)
//! leaves a part that cannot be filled to its next pass, and fills all others. The job fails no
//! request of the guest. Only a commit changes a backing file. Once the job's end is decided, data
//! that a backing file returns later is not written to the disk or the base, because they may be
//! closed by then.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Error, Result, Storage, rare};
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

/// Maximum parts in flight if the rate is not limited.
const MAX_IN_FLIGHT: usize = 8;
/// Maximum parts in flight if the rate is limited.
const MAX_AT_RATE: usize = 2;
/// After this many failures in a row the storage counts as unavailable, and no part begins until a
/// pause is over.
const MAX_FAILED: u32 = 32;
/// Bytes that are left to the next pass if the next part cannot be looked up.
const SKIPPED: u64 = 1 << 20;

/// A stream or a commit of layers. See the module's page.
pub struct Stream<S: Storage> {
    disk: Arc<Disk<S>>,
    control: Arc<JobControl>,
    clock: Rc<dyn Clock>,
    pace: RefCell<Pace>,
    meter: RefCell<Meter>,
    /// The offset up to which parts have begun in this pass, or are left to the next one.
    cursor: Cell<u64>,
    pass: Cell<Pass>,
    /// When the next part may begin.
    schedule: Schedule,
    /// The pauses before failed parts are tried again; `None`: a failed part fails the job.
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
    /// Bytes left by the last pass that this pass has not begun; `None` in the first pass.
    left: Option<u64>,
    /// Bytes that this pass leaves to the next one. The first of them is at `first_failed`.
    failed: u64,
    first_failed: Option<u64>,
    /// Failures in a row in this pass, modulo `MAX_FAILED`.
    failures: u32,
}

/// The work that may be begun now.
enum Turn {
    /// A part, paced at this rate in bytes per second; `None`: no limit.
    Part(Option<NonZeroU64>),
    /// No part until this time has passed.
    Later(Duration),
    /// No part until a notification or the end of a part.
    Nothing,
}

impl<S: Storage> Stream<S> {
    /// A job that fills `disk`, for which populating was
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

    /// Makes the job retry parts that cannot be filled, until the job is cancelled. Meant for a job
    /// without supervision, whose storage may be unavailable for a while. Each pause is twice the
    /// last one, from 10 seconds to 5 minutes; pauses are logged.
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

    /// Runs the job, and ends as its control requests; the caller passes the [end](JobControl::end)
    /// to the control.
    pub async fn run(&self) -> JobEnd {
        let outcome = rare(self.take_steps()).await;
        match outcome {
            Ok(Some(pause)) => JobEnd::Completed { completion: Completion::Switch, pause },
            Ok(None) => JobEnd::Cancelled,
            Err(error) => JobEnd::failed(&error),
        }
    }

    /// Runs all steps. Returns how long the last step took, which detaches the backing file or
    /// names the base, and may hold changes off. `None` if the job was cancelled.
    async fn take_steps(&self) -> Result<Option<Duration>> {
        // Ranges that the guest changes meanwhile become the image's own, so no later pass has to
        // fill them.
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

    /// Fills the whole disk, unless the job is cancelled or fails. On return no part is in flight.
    async fn fill(&self) -> Result<()> {
        let mut parts = FuturesUnordered::new();
        let mut cache = BlockStatusCache::default();
        let mut outcome = Ok(());
        let mut is_all_begun = false;
        loop {
            // Listening begins before the check, so that no notification is missed.
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

    /// Looks up the next part. Meanwhile the parts in flight continue, because guests may wait for
    /// them.
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

    /// Leaves up to [`SKIPPED`] bytes to the next pass, because the lookup of their part has
    /// failed.
    fn leave_out(&self, error: Error) -> Result<()> {
        let start = self.cursor.get();
        let end = self.work.end(&self.disk).min(start.saturating_add(SKIPPED));
        self.count_begun(end.saturating_sub(start), end);
        self.count_failed(start, end.saturating_sub(start));
        self.bear(error)
    }

    /// Begins another pass, after a pause, if the last pass left parts to it. Returns whether it
    /// begins. All parts of the last pass have ended.
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

    /// Counts the bytes of a part that begins; the part ends at `end`.
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

    /// Bytes that this pass has not begun, and bytes that it leaves to the next pass.
    fn left(&self) -> u64 {
        let pass = self.pass.get();
        let ahead = || self.work.end(&self.disk).saturating_sub(self.cursor.get());
        pass.left.unwrap_or_else(ahead).saturating_add(pass.failed)
    }

    /// Handles a part that could not be filled or looked up. Returns the error if the job does not
    /// retry.
    fn bear(&self, error: Error) -> Result<()> {
        let Some(retry) = &self.retry else {
            // The end is decided at once: other parts may be in flight for long, and no request of
            // the disk may wait for them.
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
        // Zeros are not paced, because they are not read.
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
    /// The end of the work, in bytes from the start of the disk.
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
            Self::Commit(layers) => layers.copy(part, go_on).await,
        }
    }

    /// Makes all copied data durable. The image above still names the images that are left out
    /// later.
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
