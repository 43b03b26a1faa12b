//! A mirror copies a disk to another one while its guest continues. Then the guest continues on the
//! copy.
//!
//! 1. The target durably gets a mark that it is incomplete ([`mark_incomplete`]). From now on the
//!    source's changes are tracked.
//! 2. The ranges with data, as the maps of the disks show, are copied; then, repeatedly, the ranges
//!    that the guest has changed meanwhile. If the copy does not converge, the guest's changes wait
//!    for the target ([`CopyMode`]).
//! 3. When the job is asked to complete and little is left, the guest's changes are held off, the
//!    rest is copied, and the target is flushed. Then the first sector is written durably in place
//!    of the mark. At this moment the target becomes complete. Then the disk is switched to the
//!    target, is retired or stays ([`Completion`]), and changes are no longer held off.
//!
//!    If step 3 takes longer than `MAX_PAUSE`, the guest's changes continue on the source, the
//!    target gets its mark again, and the job is ready as before: a user can ask it to complete
//!    again.
//!
//! Guarantees: an error of the target ends the job, and fails no request of the guest. Until the
//! moment of step 3 the source is the disk, and the target has the mark. At that moment the target
//! has every acknowledged write. Changes are held off for at most `MAX_PAUSE`, even if the target
//! hangs, and continue at once when the job is cancelled or fails. Only the guest changes the
//! source. A target that is the source itself gets no write.
//!
//! A *commit* is a mirror whose target is the backing file of the source, as in QEMU
//! (`commit_active_start`). The target has no mark, and only data in the source's own image is
//! copied. As long as the source is the disk, the copy does not change the disk's content, because
//! the source's image has all data that is copied
//! ([`DiskJobs::attach_base`](blockhouse_disk::DiskJobs::attach_base)). So until step 3 source and
//! target together are the disk, and the target alone is not. When the rest is copied and flushed,
//! an [action](Mirror::before_switch) records that the target is the disk: this is the moment of
//! step 3.
//!
//! A *backup* is a mirror of a disk that does not change (a [`FrozenDisk`](crate::FrozenDisk)). Its
//! target does not replace the disk. A backup of certain ranges leaves the rest of the target as it
//! is, and gives the target no mark.

mod complete;

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{
    Buffer, ByteRange, Error, ErrorKind, Request, Result, Storage, SyncMode, rare,
};
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

/// The most clean bytes between dirty ranges that are copied with them.
const MAX_GAP: u64 = 16 << 10;
/// The most granules that are tracked.
const MAX_GRANULES: u64 = 128 << 20;
/// The most bytes that may be left when changes are held off: they are copied in a few
/// milliseconds.
const MAX_LEFT: u64 = 1 << 20;
/// As `MAX_LEFT`, in write-blocking mode. The limit is lower, because the rest hardly grows then.
const MAX_BLOCKING_LEFT: u64 = 256 << 10;
/// A mirror that has at most this many bytes left is ready: it can be completed soon.
const MAX_READY_LEFT: u64 = 64 << 20;
/// The number of probes. A probe is a read of the target, which arrives at the source if both are
/// the same.
const PROBES: usize = 4;
/// The offsets and lengths of probes are multiples of this number of bytes, and so of the blocks of
/// any storage.
const PROBE_UNIT: u64 = 4096;
/// The longest probe, in these units.
const MAX_PROBE_UNITS: u64 = 8;
/// The longest time for which the guest's changes are held off. Afterwards they continue, and the
/// user has to ask the job to complete again.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Whether the guest's changes wait for their copy.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum CopyMode {
    /// Only if the copy does not converge.
    #[default]
    Auto,
    /// Never: the job is ready only when the guest changes less than is copied.
    Background,
    /// From the start.
    WriteBlocking,
}

/// The options of a mirror.
#[derive(Clone, Copy, Debug)]
pub struct MirrorOptions {
    /// Whether all of the target reads as zeros. If not, the mirror writes zeros, too.
    pub is_target_zero: bool,
    /// Whether the guest's changes wait for the target.
    pub mode: CopyMode,
    /// Bytes of the unit in which changes are tracked, a power of two. A disk of more than 2^27
    /// units has larger units, so that the two maps of units take at most 16 MiB each.
    pub granularity: u64,
    /// The limit of the backlog: in write-blocking mode, changes wait while the target lacks at
    /// least this many bytes.
    pub backlog: u64,
}

impl Default for MirrorOptions {
    /// Mode auto; units of 4 KiB, the usual size of guests' writes; a target of unknown content,
    /// which may be behind by 4 MiB.
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
    /// `is_partial`: whether only certain ranges are copied.
    fn copy_rule(self, is_partial: bool) -> CopyRule {
        match self {
            Self::Backup if is_partial => CopyRule { left_out: 0, max_gap: 0 },
            Self::Copy | Self::Backup => CopyRule { left_out: MARK_BYTES, max_gap: MAX_GAP },
            // Ranges that the image does not allocate are not written to the backing file.
            Self::Base => CopyRule { left_out: 0, max_gap: 0 },
        }
    }
}

/// An action that a step runs and waits for.
type Action = Box<dyn Fn() -> LocalBoxFuture<'static, Result<()>>>;

/// A mirror, a commit or a backup.
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
    /// The ranges to copy, if not all.
    only: Option<DirtyMap>,
}

/// The reasons why a mirror stops without a result.
enum Stop {
    Cancelled,
    /// The guest's changes would be held off for too long: the user may complete the job later.
    Late(Error),
    Failed(Error),
    /// The copier has failed, and holds the error.
    CopyFailed,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl<S: Storage> Mirror<S> {
    /// A mirror of `source` to `target`. The target has the same size and no other user; its
    /// content is lost.
    ///
    /// # Errors
    /// As [`Disk::check_replacement`]; `InvalidInput` for a disk shorter than the mark; the host
    /// has no memory to track changes.
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

    /// A backup to `target` of a disk that has the same size and does not change. `only` marks the
    /// ranges to copy. The caller completes the job as a [copy](Completion::Copy).
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

    /// A commit of `source` into its [base](blockhouse_disk::DiskJobs::base), which has the same
    /// size.
    ///
    /// # Errors
    /// As [`Disk::check_replacement`]; `InvalidInput` if the backing file is not open for writing;
    /// the host has no memory to track changes.
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
        // The content of the base is unknown where the image has zeros.
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

    /// Runs `action` once the target has its mark durably, before anything is copied. If the action
    /// fails, the job fails.
    #[must_use]
    pub fn marked(mut self, action: impl Fn() -> Result<()> + 'static) -> Self {
        self.marked = Box::new(action);
        self
    }

    /// Runs `action` before the target becomes complete, while the guest continues, except for a
    /// [copy](Completion::Copy). If the action fails, the job fails.
    #[must_use]
    pub fn before_completion(mut self, action: impl Fn() -> Result<()> + 'static) -> Self {
        self.before_completion = Box::new(action);
        self
    }

    /// Runs `action` when the target durably has every acknowledged write, while changes are held
    /// off. After the action the guest continues on the target. If the action fails or is late
    /// (`MAX_PAUSE`), the job fails. Only a commit runs the action.
    #[must_use]
    pub fn before_switch(
        mut self,
        action: impl Fn() -> LocalBoxFuture<'static, Result<()>> + 'static,
    ) -> Self {
        self.before_switch = Box::new(action);
        self
    }

    /// Runs `action` if the mirror fails or is late after
    /// [`before_completion`](Self::before_completion): the guest stays on the source. The action
    /// runs before the guest's changes continue.
    #[must_use]
    pub fn source_kept(mut self, action: impl Fn() + 'static) -> Self {
        self.source_kept = Box::new(action);
        self
    }

    /// Runs `action` once the disk's requests go to the target, before the disk's old image is
    /// closed. The close takes as long as the old image's storage takes to answer.
    #[must_use]
    pub fn switched(mut self, action: impl Fn() + 'static) -> Self {
        self.switched = Box::new(action);
        self
    }

    /// Runs the mirror, and ends as its control requests. On return, no request is in flight at the
    /// target. Once the end is [decided](JobControl::decided), no request of the guest waits for
    /// the job. The caller closes the target if it did not replace the disk, and passes the
    /// [end](JobControl::end) to the control.
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
        let (steps, copied, ()) = rare(join3(steps, copying, self.let_guest_go())).await;
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
            // The end is decided already, with the error.
            Stop::CopyFailed => {}
        }
    }

    /// Waits until the job's end is decided or the job is over. Then releases the guest's requests
    /// that wait for the job and, if the end is decided, stops observing changes, even if the job's
    /// steps still wait.
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

    /// Stops new copies, and releases all requests that wait for a copy.
    fn finish_copier(&self) {
        self.is_over.set(true);
        self.copier.stop();
        self.tracker.release_writes();
        self.control.changed().notify_all();
    }

    /// Runs all steps. Returns the treatment of the disk, and the time for which changes were held
    /// off.
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
        // The job is ready after the second pass, or when both disks are equal. Reason: during the
        // second pass, copies of the first one may be in flight.
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

    /// Makes the job ready, waits until it is asked to complete, and completes it.
    async fn complete_when_asked(&self) -> Result<(Completion, Duration), Stop> {
        self.control.set_stage(JobStage::Ready);
        self.tracker.limit_backlog(self.options.backlog);
        let completion = self.keep_up(MAX_READY_LEFT, || self.control.completion()).await?;
        self.control.set_stage(JobStage::Completing);
        let is_blocking = || self.tracker.is_blocking();
        let is_little = |left| left <= if is_blocking() { MAX_BLOCKING_LEFT } else { MAX_LEFT };
        let left_dirty = || self.copier.remaining().saturating_sub(self.tracker.backlog());
        self.keep_up(MAX_LEFT, || is_little(left_dirty()).then_some(())).await?;
        // A flush here leaves little to flush while changes are held off.
        self.unless_ending(flush_ahead(&[&*self.target], SyncMode::Data)).await??;
        // In write-blocking mode, the job also waits for copies in flight and for the backlog,
        // whose limit is lowered step by step while the guest continues.
        self.keep_up(MAX_LEFT, || {
            self.tracker.shorten_backlog(MAX_BLOCKING_LEFT / 2);
            (!is_blocking() || is_little(self.copier.remaining())).then_some(())
        })
        .await?;
        Ok((completion, self.complete(completion).await?))
    }

    /// Marks the ranges dirty that the first pass copies.
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

    /// Awaits a step that may take long. Stops when the job is cancelled or a copy fails.
    async fn unless_ending<T>(&self, step: impl Future<Output = T>) -> Result<T, Stop> {
        match select(pin!(step), pin!(self.wait_until(|| None::<()>))).await {
            Either::Left((value, _)) => Ok(value),
            Either::Right((stop, _)) => Err(stop.err().unwrap_or(Stop::Cancelled)),
        }
    }

    /// Refuses a target that is the source by another name, such as an export of this server,
    /// because the target's mark would destroy the disk.
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

    /// Waits for a value while copies run. In mode auto, makes changes wait for the target if more
    /// than `limit` bytes are left and hardly decrease.
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

    /// Waits for a value. Stops when the job is cancelled or a copy fails.
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

/// Ranges for the probes, different for each job, so that a guest is unlikely to read all of them
/// at the same time.
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
