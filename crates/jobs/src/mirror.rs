//! A mirror: a disk is copied to another one while its guest goes on, and then the guest goes on with the copy.
//!
//! 1. The target gets its mark ([`mark_incomplete`]), durably. From now on the source's changes are tracked.
//! 2. What the maps show as data is copied, and then what the guest changed meanwhile, again and again. Where that does
//!    not converge, the guest's changes wait for their copy ([`CopyMode`]).
//! 3. When it is asked to complete and little is left: the guest's changes are held off, the rest is copied, and the
//!    target is flushed. Then the first sector is written durably in place of the mark. That is the moment in which the
//!    target is complete. The disk is switched to it, or retired, and the guest's changes go on.
//!
//! Guarantees: an error of the target ends the job, and no request of the guest. Until the moment of step 3 the source
//! is the disk, and the target has the mark; from then on the target has everything that was answered. Whatever the target
//! does, changes are held off for `MAX_PAUSE` at most. The source is changed by nothing but its guest.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{ByteRange, Error, ErrorKind, Request, Result, Storage};
use blockhouse_disk::{
    ChangeObserver, DirtyMap, Disk, MARK_BYTES, QuiescedDisk, RangeCopy, ReplacedImage,
    mark_incomplete,
};
use futures_util::future::{Either, join, select};

use crate::clock::JobClock;
use crate::control::{Completion, JobControl, JobEnd, JobStage};
use crate::copier::Copier;
use crate::tracker::Tracker;

/// The most granules that are tracked.
const MAX_GRANULES: u64 = 128 << 20;
/// What may be left when changes are held off: it is copied in a few milliseconds.
const MAX_LEFT: u64 = 1 << 20;
/// A mirror of which no more is left can be completed soon.
const MAX_READY_LEFT: u64 = 64 << 20;
/// How long the guest's changes are held off at most. Then they go on, and the job fails.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Whether the guest's changes wait for their copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// Bytes of the unit in which changes are tracked, a power of two. A disk of more than 2^27 units has larger ones:
    /// their two maps take 16 MiB each at most.
    pub granularity: u64,
}

impl Default for MirrorOptions {
    /// Automatic, in units of 4 KiB, as guests write them; the target may hold anything.
    fn default() -> Self {
        Self { is_target_zero: false, mode: CopyMode::Auto, granularity: 4 << 10 }
    }
}

/// A mirror that is going to be made. See the module's page.
pub struct Mirror<S: Storage> {
    source: Arc<Disk<S>>,
    target: Arc<Disk<S>>,
    options: MirrorOptions,
    control: Arc<JobControl>,
    tracker: Arc<Tracker>,
    copier: Copier<S>,
    clock: Rc<dyn JobClock>,
    before_completion: Box<dyn Fn() -> Result<()>>,
    has_failed: Cell<bool>,
    is_over: Cell<bool>,
}

/// Why there is no result.
enum Stop {
    Cancelled,
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
    /// A mirror of `source` in `target`, which is as long, which nothing else uses, and whose content is lost.
    ///
    /// # Errors
    /// As [`Disk::check_successor`]; the host has no memory to track changes.
    pub fn new(
        source: Arc<Disk<S>>,
        target: Arc<Disk<S>>,
        options: MirrorOptions,
        control: Arc<JobControl>,
        clock: Rc<dyn JobClock>,
    ) -> Result<Self> {
        source.check_successor(&target)?;
        let size = source.size();
        if size < MARK_BYTES {
            let what = format!("a disk of {size} bytes is too short for a mirror");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(source.name()));
        }
        let granularity = size.div_ceil(MAX_GRANULES).next_power_of_two().max(options.granularity);
        let tracker = Tracker::new(DirtyMap::new(size, granularity)?);
        let (from, to) = (Arc::clone(&source), Arc::clone(&target));
        let copy = RangeCopy::new(from, to, granularity, options.is_target_zero)?;
        let (from, tracked) = (Arc::clone(&source), Arc::clone(&tracker));
        let copier = Copier::new(from, copy, tracked, Arc::clone(&control), Rc::clone(&clock));
        let (has_failed, is_over) = (Cell::new(false), Cell::new(false));
        let before_completion = Box::new(|| Ok(()));
        Ok(Self {
            source,
            target,
            options,
            control,
            tracker,
            copier,
            clock,
            before_completion,
            has_failed,
            is_over,
        })
    }

    /// Has `action` done before the target becomes complete, while the guest goes on. Where it fails, so does the job.
    #[must_use]
    pub fn before_completion(mut self, action: impl Fn() -> Result<()> + 'static) -> Self {
        self.before_completion = Box::new(action);
        self
    }

    /// Makes the mirror, and ends as its control says. When it returns, the guest's requests wait for nothing of the job.
    /// The target is to be closed where it did not take the disk's place, and the control to be told of the
    /// [end](JobControl::end).
    pub async fn run(&self) -> JobEnd {
        let steps = async {
            let outcome = self.take_steps().await;
            self.finish_copier();
            outcome
        };
        let copying = async {
            let outcome = self.copier.run(|| self.is_over.get()).await;
            self.has_failed.set(outcome.is_err());
            self.finish_copier();
            outcome
        };
        let (steps, copied) = join(steps, copying).await;
        let observer: Arc<dyn ChangeObserver> = Arc::clone(&self.tracker) as _;
        self.source.stop_observing(&observer);
        self.copier.tell_progress();
        match (steps, copied) {
            (Ok((completion, pause)), _) => JobEnd::Completed { completion, pause },
            (Err(Stop::Cancelled), _) => JobEnd::Cancelled,
            (Err(Stop::Failed(error)), _) | (Err(Stop::CopyFailed), Err(error)) => {
                JobEnd::failed(&error)
            }
            (Err(Stop::CopyFailed), Ok(())) => JobEnd::Cancelled,
        }
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
        mark_incomplete(&self.target, self.source.name()).await?;
        self.source.observe(Arc::clone(&self.tracker) as _).await;
        if self.options.mode == CopyMode::WriteBlocking {
            self.tracker.block_writes();
        }
        let go_on = || !self.control.is_cancelled() && !self.has_failed.get();
        self.copier.range_copy().mark_needed(self.tracker.dirty(), go_on).await?;
        self.copier.tell_progress();
        self.copier.start();
        // The first pass is over when the second one is: until then its last copies may be in flight.
        let is_ready = |left| self.copier.passes() > 1 && left <= MAX_READY_LEFT;
        let ready = || (is_ready(self.copier.remaining()) || self.copier.is_idle()).then_some(());
        self.keep_up(MAX_READY_LEFT, ready).await?;
        self.control.set_stage(JobStage::Ready);
        let completion = self.keep_up(MAX_READY_LEFT, || self.control.completion()).await?;
        self.control.set_stage(JobStage::Completing);
        let is_little = || (self.copier.remaining() <= MAX_LEFT).then_some(());
        self.keep_up(MAX_LEFT, is_little).await?;
        (self.before_completion)()?;
        // Little is left to flush then while changes are held off.
        self.target.submit_unlimited(Request::Flush).await?;
        Ok((completion, self.complete(completion).await?))
    }

    /// Waits for a value while it copies. Has changes wait for the target where more than `limit` bytes are left, and the
    /// guest changes more than is copied.
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
            if self.has_failed.get() {
                return Some(Err(Stop::CopyFailed));
            }
            check().map(Ok)
        };
        self.control.changed().wait_until(either).await
    }

    /// Holds the guest's changes off, copies what is left, and ends the job; for how long they were held off.
    async fn complete(&self, completion: Completion) -> Result<Duration, Stop> {
        let began = self.clock.now();
        let quiescing = self.in_time(&self.source, async { Ok(self.source.quiesced().await) });
        let quiesced = quiescing.await?;
        self.copier.hurry(true);
        self.in_time(&self.target, async {
            self.wait_until(|| self.copier.is_idle().then_some(())).await?;
            Ok(self.target.submit_unlimited(Request::Flush).await?)
        })
        .await?;
        self.source.check_successor(&self.target)?;
        if !self.control.commit() {
            return Err(Stop::Cancelled);
        }
        // Nothing may copy any more when the disk's requests go to the target: it would bring older bytes back.
        self.finish_copier();
        self.commit().await?;
        let replaced = self.end_source(quiesced, completion)?;
        let pause = self.clock.now().saturating_sub(began);
        if let Some(replaced) = replaced
            && let Err(error) = replaced.close().await
        {
            // The guest does not need it any more.
            tracing::warn!("after its mirror was complete: {error}");
        }
        Ok(pause)
    }

    /// Puts the first sector in the place of the mark.
    async fn commit(&self) -> Result<(), Stop> {
        let sector = ByteRange::between(0, MARK_BYTES);
        let copied = self.in_time(&self.target, async {
            Ok(self.copier.range_copy().copy_durably(sector).await?)
        });
        let Err(Stop::Failed(error)) = copied.await else { return Ok(()) };
        // The write may have been done, and the guest goes on with the source.
        let mark = self.in_time(&self.target, async {
            Ok(mark_incomplete(&self.target, self.source.name()).await?)
        });
        let error = match mark.await {
            Ok(()) => error,
            Err(_) => {
                let what =
                    format!("the last write to the mirror failed, and may have been done: {error}");
                Error::new(error.kind(), what)
                    .hint("do not use the mirror: it looks complete, but gets old")
            }
        };
        Err(error.into())
    }

    fn end_source<'a>(
        &self,
        quiesced: QuiescedDisk<'a, S>,
        completion: Completion,
    ) -> Result<Option<ReplacedImage<'a, S>>, Stop> {
        match completion {
            Completion::Switch => Ok(Some(quiesced.switch_to(Arc::clone(&self.target))?)),
            Completion::HandOver => {
                quiesced.retire(self.target.name().to_owned());
                Ok(None)
            }
        }
    }

    /// Awaits a step of `disk` while the guest's changes are held off: they go on after a time whatever it does.
    async fn in_time<T>(
        &self,
        disk: &Disk<S>,
        step: impl Future<Output = Result<T, Stop>>,
    ) -> Result<T, Stop> {
        match select(std::pin::pin!(step), self.clock.sleep(MAX_PAUSE)).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => {
                let what = format!("takes longer than {MAX_PAUSE:?} while the guest's writes wait");
                Err(Error::new(ErrorKind::Io, what)
                    .on(disk.name())
                    .hint("mirror it again when it is quicker")
                    .into())
            }
        }
    }
}
