//! A mirror: a disk is copied to another one while its guest goes on, and then the guest goes on
//! with the copy.
//!
//! 1. The target gets its mark ([`mark_incomplete`]), durably. From now on the source's changes are
//!    tracked.
//! 2. What the maps show as data is copied, and then what the guest changed meanwhile, again and
//!    again. Where that does not converge, the guest's changes wait for their copy ([`CopyMode`]).
//! 3. When it is asked to complete and little is left: the guest's changes are held off, the rest
//!    is copied, and the target is flushed. Then the first sector is written durably in place of
//!    the mark. That is the moment in which the target is complete. The disk is switched to it, or
//!    retired, and the guest's changes go on.
//!
//!    Where that takes longer than `MAX_PAUSE`, the guest's changes go on with the source, the
//!    target has its mark again, and the job is ready as before: it can be asked to complete once
//!    more.
//!
//! Guarantees: an error of the target ends the job, and no request of the guest. Until the moment
//! of step 3 the source is the disk, and the target has the mark; from then on the target has
//! everything that was answered. Whatever the target does, changes are held off for `MAX_PAUSE` at
//! most, and go on at once when the job is cancelled or fails. The source is changed by nothing but
//! its guest. Nothing is written to a target that is the source itself.
//!
//! A *commit* is a mirror whose target is the backing file of the source, as in QEMU
//! (`commit_active_start`). The target has no mark; copied is what the source's image has itself.
//! The source reads the same at each moment, because it has itself what is copied, until it is no
//! more the disk ([`DiskJobs::attach_base`](blockhouse_disk::DiskJobs::attach_base)). So until step
//! 3 source and target together are the disk, and the target alone is not. When the rest is copied
//! and flushed, an [action](Mirror::before_switch) notes that the target is the disk: that is the
//! moment.
//!
//! A *backup* is a mirror of a disk that does not change (a [`FrozenDisk`](crate::FrozenDisk)),
//! whose target is no successor of it. One of certain ranges alone leaves all else of the target as
//! it is, and gives it no mark.

mod complete;

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Error, ErrorKind, Request, Result, Storage, SyncMode};
use blockhouse_disk::{
    ChangeObserver, DirtyMap, Disk, MARK_BYTES, RangeCopy, flush_ahead, mark_incomplete,
};
use blockhouse_engine::Clock;
use futures_util::future::{Either, LocalBoxFuture, join3, ready, select};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::control::{Completion, JobControl, JobEnd, JobStage};
use crate::copier::{Copier, CopyRule};
use crate::tracker::Tracker;

/// Clean bytes between dirty ones that are copied with them.
const MAX_GAP: u64 = 16 << 10;
/// The most granules that are tracked.
const MAX_GRANULES: u64 = 128 << 20;
/// The most that may be left when changes are held off: it is copied in a few milliseconds.
const MAX_LEFT: u64 = 1 << 20;
/// The same where changes wait for the target, so that what is left only becomes less.
const MAX_BLOCKING_LEFT: u64 = 256 << 10;
/// A mirror of which no more is left can be completed soon.
const MAX_READY_LEFT: u64 = 64 << 20;
/// Reads of the target that would be seen at the source if both were the same.
const PROBES: usize = 4;
/// Their offsets and lengths are multiples of this, in bytes, and of the blocks of any storage.
const PROBE_UNIT: u64 = 4096;
/// The longest, in these units.
const MAX_PROBE_UNITS: u64 = 8;
/// The longest time for which the guest's changes are held off. Then they go on, and the job has to
/// be completed another time.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Whether the guest's changes wait for their copy.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum CopyMode {
    /// Not as long as the copy converges.
    #[default]
    Auto,
    /// Never: the job is ready only when the guest changes less than is copied.
    Background,
    /// From the start.
    WriteBlocking,
}

/// How a mirror is made.
#[derive(Clone, Copy, Debug)]
pub struct MirrorOptions {
    /// Whether all of the target reads as zeros. Otherwise zeros are written, too.
    pub is_target_zero: bool,
    /// Whether changes wait.
    pub mode: CopyMode,
    /// Bytes of the unit in which changes are tracked, a power of two. A disk of more than 2^27
    /// units has larger ones: their two maps take 16 MiB each at most.
    pub granularity: u64,
    /// Where changes wait for the target: only if it is behind by this many bytes.
    pub backlog: u64,
}

impl Default for MirrorOptions {
    /// Automatic, in units of 4 KiB, as guests write them; the target may hold anything, and be
    /// behind by 4 MiB.
    fn default() -> Self {
        let (mode, granularity, backlog) = (CopyMode::Auto, 4 << 10, 4 << 20);
        Self { is_target_zero: false, mode, granularity, backlog }
    }
}

/// The kind of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetKind {
    /// Another image, which has the mark until it is complete.
    Copy,
    /// The backing file of the source's image.
    Base,
    /// Another image, which gets a copy of a disk that does not change.
    Backup,
}

impl TargetKind {
    /// `is_partial`: of certain ranges alone.
    fn copy_rule(self, is_partial: bool) -> CopyRule {
        match self {
            Self::Backup if is_partial => CopyRule { left_out: 0, max_gap: 0 },
            Self::Copy | Self::Backup => CopyRule { left_out: MARK_BYTES, max_gap: MAX_GAP },
            // Ranges that the image leaves to its backing file are not written there.
            Self::Base => CopyRule { left_out: 0, max_gap: 0 },
        }
    }
}

/// The action at a step; the step waits for it.
type Action = Box<dyn Fn() -> LocalBoxFuture<'static, Result<()>>>;

/// A mirror that is going to be made. See the module's page.
pub struct Mirror<S: Storage> {
    kind: TargetKind,
    source: Arc<Disk<S>>,
    target: Arc<Disk<S>>,
    options: MirrorOptions,
    control: Arc<JobControl>,
    tracker: Arc<Tracker>,
    copier: Copier<S>,
    clock: Rc<dyn Clock>,
    marked: Box<dyn Fn() -> Result<()>>,
    before_completion: Box<dyn Fn() -> Result<()>>,
    before_switch: Action,
    source_kept: Box<dyn Fn()>,
    switched: Box<dyn Fn()>,
    is_over: Cell<bool>,
    /// The only parts that are copied, if not all are.
    only: Option<DirtyMap>,
}

/// Why there is no result.
enum Stop {
    Cancelled,
    /// It would hold the guest off for too long: the user completes it another time.
    Late(Error),
    Failed(Error),
    /// The copier has failed, and has the error.
    CopyFailed,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl<S: Storage> Mirror<S> {
    /// A mirror of `source` in `target`, which is as long, which nothing else uses, and whose
    /// content is lost.
    ///
    /// # Errors
    /// As [`Disk::check_replacement`]; the host has no memory to track changes.
    pub fn new(
        source: Arc<Disk<S>>,
        target: Arc<Disk<S>>,
        options: MirrorOptions,
        control: Arc<JobControl>,
        clock: Rc<dyn Clock>,
    ) -> Result<Self> {
        let size = source.size();
        if size < MARK_BYTES {
            let what = format!("a disk of {size} bytes is too short for a mirror");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(source.name()));
        }
        source.check_replacement(target.image())?;
        Self::to(TargetKind::Copy, (source, target), options, (control, clock), None)
    }

    /// A backup in `target` of a disk that does not change and is as long; `only`: of the parts
    /// that are marked there. The caller completes it as a [copy](Completion::Copy).
    ///
    /// # Errors
    /// `InvalidInput` for a target of another size; the host has no memory.
    pub fn backup(
        source: Arc<Disk<S>>,
        target: Arc<Disk<S>>,
        only: Option<DirtyMap>,
        control: Arc<JobControl>,
        clock: Rc<dyn Clock>,
    ) -> Result<Self> {
        if source.size() != target.size() {
            let what = format!("has {} bytes, and the disk has {}", target.size(), source.size());
            return Err(Error::new(ErrorKind::InvalidInput, what).on(target.name()));
        }
        let options = MirrorOptions { mode: CopyMode::Background, ..MirrorOptions::default() };
        Self::to(TargetKind::Backup, (source, target), options, (control, clock), only)
    }

    /// A commit of `source` into its [base](blockhouse_disk::DiskJobs::base), which is as long.
    ///
    /// # Errors
    /// As [`new`](Self::new); `InvalidInput` where its backing file is not open for writing.
    pub fn commit(
        source: Arc<Disk<S>>,
        mode: CopyMode,
        control: Arc<JobControl>,
        clock: Rc<dyn Clock>,
    ) -> Result<Self> {
        let Some(base) = source.jobs().base().cloned() else {
            let what = "its backing file is not open for writing";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(source.name()));
        };
        // The base's content where the image is zeros is not known.
        let options = MirrorOptions { mode, is_target_zero: false, ..MirrorOptions::default() };
        source.check_replacement(base.image())?;
        Self::to(TargetKind::Base, (source, base), options, (control, clock), None)
    }

    fn to(
        kind: TargetKind,
        (source, target): (Arc<Disk<S>>, Arc<Disk<S>>),
        options: MirrorOptions,
        (control, clock): (Arc<JobControl>, Rc<dyn Clock>),
        only: Option<DirtyMap>,
    ) -> Result<Self> {
        let size = source.size();
        let granularity = size.div_ceil(MAX_GRANULES).next_power_of_two().max(options.granularity);
        let tracker = Tracker::new(DirtyMap::new(size, granularity)?, options.backlog);
        let (from, to) = (Arc::clone(&source), Arc::clone(&target));
        let copy = RangeCopy::new(from, to, granularity, options.is_target_zero)?;
        let (from, tracked) = (Arc::clone(&source), Arc::clone(&tracker));
        let copy = (copy, kind.copy_rule(only.is_some()));
        let copier = Copier::new(from, copy, tracked, Arc::clone(&control), Rc::clone(&clock));
        let (before_completion, source_kept) = (Box::new(|| Ok(())), Box::new(|| ()));
        Ok(Self {
            kind,
            source,
            target,
            options,
            control,
            tracker,
            copier,
            clock,
            marked: Box::new(|| Ok(())),
            before_completion,
            before_switch: Box::new(|| Box::pin(ready(Ok(())))),
            source_kept,
            switched: Box::new(|| ()),
            is_over: Cell::new(false),
            only,
        })
    }

    /// Whether the target has its mark until it is complete.
    fn has_mark(&self) -> bool {
        match self.kind {
            TargetKind::Copy => true,
            TargetKind::Base => false,
            TargetKind::Backup => self.only.is_none(),
        }
    }

    /// Has `action` done when the target has its mark, durably, and before anything is copied.
    /// Where it fails, so does the job.
    #[must_use]
    pub fn marked(mut self, action: impl Fn() -> Result<()> + 'static) -> Self {
        self.marked = Box::new(action);
        self
    }

    /// Has `action` done before the target becomes complete, while the guest goes on. Where it
    /// fails, so does the job.
    #[must_use]
    pub fn before_completion(mut self, action: impl Fn() -> Result<()> + 'static) -> Self {
        self.before_completion = Box::new(action);
        self
    }

    /// Has `action` done when all that was answered is in the target, durably, while changes are
    /// held off: after it the guest goes on with the target. Where it fails, so does the job.
    #[must_use]
    pub fn before_switch(
        mut self,
        action: impl Fn() -> LocalBoxFuture<'static, Result<()>> + 'static,
    ) -> Self {
        self.before_switch = Box::new(action);
        self
    }

    /// Has `action` done when the mirror fails after
    /// [`before_completion`](Self::before_completion), before the guest's changes go on: the
    /// guest stays with the source.
    #[must_use]
    pub fn source_kept(mut self, action: impl Fn() + 'static) -> Self {
        self.source_kept = Box::new(action);
        self
    }

    /// Has `action` done when the disk's requests go to the target, and before the image that it
    /// had is closed, which may take as long as its storage takes to answer.
    #[must_use]
    pub fn switched(mut self, action: impl Fn() + 'static) -> Self {
        self.switched = Box::new(action);
        self
    }

    /// Makes the mirror, and ends as its control says. When it returns, nothing is in flight at the
    /// target. From when its end is [decided](JobControl::decided) the guest's requests wait for
    /// nothing of the job. The caller closes the target where it did not take the disk's place, and
    /// passes the [end](JobControl::end) to the control.
    pub async fn run(&self) -> JobEnd {
        let steps = async {
            let outcome = self.take_steps().await;
            if let Err(stop) = &outcome {
                self.decide(stop);
                self.stop_observing();
            }
            self.finish_copier();
            outcome
        };
        let copying = async {
            let outcome = self.copier.run(|| self.is_over.get()).await;
            self.finish_copier();
            outcome
        };
        let (steps, copied, ()) = join3(steps, copying, self.let_guest_go()).await;
        self.copier.tell_progress();
        match (steps, copied) {
            (Ok((completion, pause)), _) => JobEnd::Completed { completion, pause },
            (Err(Stop::Failed(error) | Stop::Late(error)), _)
            | (Err(Stop::CopyFailed), Err(error)) => JobEnd::failed(&error),
            (Err(Stop::Cancelled), _) | (Err(Stop::CopyFailed), Ok(())) => JobEnd::Cancelled,
        }
    }

    fn decide(&self, stop: &Stop) {
        match stop {
            Stop::Failed(error) | Stop::Late(error) => self.control.decide(JobEnd::failed(error)),
            Stop::Cancelled => self.control.decide(JobEnd::Cancelled),
            // It is, with the error.
            Stop::CopyFailed => {}
        }
    }

    /// When the job's end is decided, or it is over: no request of the guest waits for it, and it
    /// observes no more changes, whatever its steps wait for.
    async fn let_guest_go(&self) {
        let is_ending = || (self.control.is_decided() || self.is_over.get()).then_some(());
        self.control.changed().wait_until(is_ending).await;
        self.tracker.release_writes();
        if self.control.is_decided() {
            self.stop_observing();
        }
    }

    fn stop_observing(&self) {
        let observer: Arc<dyn ChangeObserver> = Arc::clone(&self.tracker) as _;
        self.source.jobs().stop_observing(&observer);
    }

    /// Begins no more copies, and lets all requests go that wait for one.
    fn finish_copier(&self) {
        self.is_over.set(true);
        self.copier.stop();
        self.tracker.release_writes();
        self.control.changed().notify_all();
    }

    /// All steps; what became of the disk, and for how long changes were held off.
    async fn take_steps(&self) -> Result<(Completion, Duration), Stop> {
        if self.kind == TargetKind::Copy {
            self.check_distinct().await?;
        }
        if self.has_mark() {
            mark_incomplete(&self.target, self.source.name()).await?;
            (self.marked)()?;
        }
        self.unless_ending(self.source.jobs().observe(Arc::clone(&self.tracker) as _)).await??;
        if self.options.mode == CopyMode::WriteBlocking {
            self.tracker.block_writes();
        }
        self.mark_first().await?;
        self.copier.tell_progress();
        self.copier.start();
        // The first pass is over when the second one is: until then its last copies may be in
        // flight.
        let is_ready = |left| self.copier.passes() > 1 && left <= MAX_READY_LEFT;
        let ready = || (is_ready(self.copier.remaining()) || self.copier.is_idle()).then_some(());
        self.keep_up(MAX_READY_LEFT, ready).await?;
        loop {
            match self.complete_when_asked().await {
                Err(Stop::Late(error)) => {
                    tracing::warn!("{}: is not moved yet: {error}", self.source.name());
                }
                outcome => return outcome,
            }
        }
    }

    /// The job is ready until it is asked to complete, and does so.
    async fn complete_when_asked(&self) -> Result<(Completion, Duration), Stop> {
        self.control.set_stage(JobStage::Ready);
        self.tracker.limit_backlog(self.options.backlog);
        let completion = self.keep_up(MAX_READY_LEFT, || self.control.completion()).await?;
        self.control.set_stage(JobStage::Completing);
        let is_blocking = || self.tracker.is_blocking();
        let is_little = |left| left <= if is_blocking() { MAX_BLOCKING_LEFT } else { MAX_LEFT };
        let left_dirty = || self.copier.remaining().saturating_sub(self.tracker.backlog());
        self.keep_up(MAX_LEFT, || is_little(left_dirty()).then_some(())).await?;
        // Little is left to flush then while changes are held off.
        self.unless_ending(flush_ahead(&[&*self.target], SyncMode::Data)).await??;
        // Copies on their way then are waited for, too: they become fewer bit by bit, while the
        // guest goes on.
        self.keep_up(MAX_LEFT, || {
            self.tracker.shorten_backlog(MAX_BLOCKING_LEFT / 2);
            (!is_blocking() || is_little(self.copier.remaining())).then_some(())
        })
        .await?;
        Ok((completion, self.complete(completion).await?))
    }

    /// Makes dirty what the first pass is to copy.
    async fn mark_first(&self) -> Result<()> {
        let go_on = || !self.control.is_decided();
        let (copy, dirty) = (self.copier.range_copy(), self.tracker.dirty());
        if let Some(only) = &self.only {
            let mut rest = 0;
            while let Some(run) = only.next(rest, only.size()) {
                dirty.mark(run);
                rest = run.end();
            }
            return Ok(());
        }
        match self.kind {
            TargetKind::Copy | TargetKind::Backup => copy.mark_needed(dirty, go_on).await,
            TargetKind::Base => copy.mark_own(dirty, go_on).await,
        }
    }

    /// Awaits a step that may take long, or until the job is cancelled or a copy fails.
    async fn unless_ending<T>(&self, step: impl Future<Output = T>) -> Result<T, Stop> {
        match select(pin!(step), pin!(self.wait_until(|| None::<()>))).await {
            Either::Left((value, _)) => Ok(value),
            Either::Right((stop, _)) => Err(stop.err().unwrap_or(Stop::Cancelled)),
        }
    }

    /// Refuses a target that is the source by another name, an export of this server: its mark
    /// would destroy the disk.
    async fn check_distinct(&self) -> Result<(), Stop> {
        let ranges = probes(self.source.size(), self.clock.now());
        let probe = self.source.jobs().probe_reads(ranges.clone());
        for range in ranges {
            let mut buffer = Buffer::try_new(range.length() as usize)?;
            let (offset, into) = (range.offset(), buffer.lend());
            let read = self.target.submit_unlimited(Request::Read { offset, into });
            self.unless_ending(read).await??;
        }
        if !probe.has_seen_all() {
            return Ok(());
        }
        let what = "is the disk itself, by another name: it would be destroyed";
        let error = Error::new(ErrorKind::InvalidInput, what).on(self.target.name());
        Err(error.hint("mirror it to another image").into())
    }

    /// Waits for a value while it copies. Has changes wait for the target where more than `limit`
    /// bytes are left, and the guest changes more than is copied.
    async fn keep_up<T>(
        &self,
        limit: u64,
        mut check: impl FnMut() -> Option<T>,
    ) -> Result<T, Stop> {
        let is_auto = self.options.mode == CopyMode::Auto;
        self.wait_until(|| {
            let is_losing = self.copier.is_losing() && self.copier.remaining() > limit;
            if is_auto && is_losing && !self.tracker.is_blocking() {
                tracing::debug!("{}: writes wait for the target", self.source.name());
                self.tracker.block_writes();
            }
            check()
        })
        .await
    }

    /// Waits for a value, or until the job is cancelled or a copy fails.
    async fn wait_until<T>(&self, mut check: impl FnMut() -> Option<T>) -> Result<T, Stop> {
        let either = || {
            if self.control.is_cancelled() {
                return Some(Err(Stop::Cancelled));
            }
            if self.control.is_decided() {
                return Some(Err(Stop::CopyFailed));
            }
            check().map(Ok)
        };
        self.control.changed().wait_until(either).await
    }
}

/// Ranges to be read, other ones for each job: that a guest reads all of them in the same moments
/// is not to be expected.
fn probes(size: u64, now: Duration) -> Vec<ByteRange> {
    let blocks = size / PROBE_UNIT;
    if blocks < 2 {
        return vec![ByteRange::between(0, size)];
    }
    let mut random = size ^ now.as_nanos() as u64;
    let mut next = |below: u64| {
        // A step of splitmix64.
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 32) % below
    };
    let range = |first: u64, count: u64| {
        ByteRange::between(first * PROBE_UNIT, (first + count) * PROBE_UNIT)
    };
    let probes = (0..PROBES).map(|_| {
        let count = 1 + next(blocks.min(MAX_PROBE_UNITS));
        range(next(blocks - count + 1), count)
    });
    probes.collect()
}
