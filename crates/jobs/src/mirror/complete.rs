//! The end of a mirror: the moment in which the target becomes the disk.
//!
//! Guarantees: one write decides, the write of the first sector in place of the mark. It is
//! awaited, however long it takes, so its outcome is always known. The guest's changes wait for it
//! for at most `MAX_PAUSE`. If the write fails or is late, changes continue on the source. Before
//! they continue, the source's record is removed. After the write that decides has ended, the mark
//! is written again, so the mark is the last write to the first sector. A mirror that was late
//! continues, and can be completed again. A mirror whose write failed has failed.
//!
//! In a commit, an action of the caller decides ([`Mirror::before_switch`]). If the action fails or
//! is late, the source stays the disk, and the caller [undoes](Mirror::source_kept) the effects of
//! the action.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{ByteRange, Error, ErrorKind, Request, Result, Storage};
use blockhouse_disk::{Disk, MARK_BYTES, QuiescedDisk, ReplacedImage, mark_incomplete};
use futures_util::future::{Either, select};

use super::{MAX_PAUSE, Mirror, Stop, TargetKind};
use crate::control::{Completion, JobEnd};

/// Why the target has not become the disk.
enum Failure<'a> {
    /// The target still has its mark, or never had one.
    Marked(Stop),
    /// The write of the target's first sector failed, but may have taken effect.
    Unknown(Error),
    /// The write of the target's first sector is in flight.
    Late(Pin<Box<dyn Future<Output = Result<()>> + 'a>>),
}

impl Failure<'_> {
    /// Whether the job continues.
    fn is_late(&self) -> bool {
        matches!(self, Self::Late(_) | Self::Marked(Stop::Late(_)))
    }
}

impl Stop {
    /// The same stop, but the job must not try to complete again.
    fn for_good(self) -> Self {
        match self {
            Self::Late(error) => Self::Failed(error),
            other => other,
        }
    }
}

impl From<Stop> for Failure<'_> {
    fn from(stop: Stop) -> Self {
        Self::Marked(stop)
    }
}

impl<S: Storage> Mirror<S> {
    /// Holds the guest's changes off, copies the rest, and ends the job; returns the time for which
    /// the changes were held off.
    pub(super) async fn complete(&self, completion: Completion) -> Result<Duration, Stop> {
        if completion != Completion::Copy {
            (self.before_completion)()?;
        }
        let began = self.clock.now();
        let end = began + MAX_PAUSE;
        let quiescing = self.before(end, &self.source, async { Ok(self.source.quiesced().await?) });
        let quiesced = match quiescing.await {
            Ok(quiesced) => quiesced,
            Err(stop) => {
                (self.source_kept)();
                return Err(self.undo(stop.into()).await);
            }
        };
        if let Err(failure) = self.copy_rest(end).await {
            // The record is removed before changes continue. So after a crash the source has no
            // record if its guest has continued.
            (self.source_kept)();
            self.copier.hurry(false);
            if !failure.is_late() {
                self.stop_observing();
            }
            drop(quiesced);
            return Err(self.undo(failure).await);
        }
        // No copy may run when the disk's requests go to the target: a copy could write older bytes
        // over newer ones.
        self.finish_copier();
        let replaced = self.end_source(quiesced, completion)?;
        let pause = self.clock.now().saturating_sub(began);
        self.stop_observing();
        if let Some(replaced) = replaced {
            (self.switched)();
            // The end is decided before the old image is closed, because its storage may hang.
            self.control.decide(JobEnd::Completed { completion, pause });
            if let Err(error) = replaced.close().await {
                // An error of the old image does not matter: the guest no longer needs it.
                tracing::warn!("after its mirror was complete: {error}");
            }
        }
        Ok(pause)
    }

    /// Copies the rest while changes are held off, and makes the target complete. Fails at the time
    /// `end`.
    async fn copy_rest(&self, end: Duration) -> Result<(), Failure<'_>> {
        self.copier.hurry(true);
        self.before(end, &self.target, async {
            self.wait_until(|| self.copier.is_idle().then_some(())).await?;
            Ok(self.target.submit_unlimited(Request::Flush).await?)
        })
        .await?;
        // This check comes before the write that decides, because nothing may fail after it.
        if self.kind != TargetKind::Backup {
            self.source.check_replacement(self.target.image()).map_err(Stop::Failed)?;
        }
        if !self.control.commit() {
            return Err(Stop::Cancelled.into());
        }
        // Everything is copied and changes are held off, so no copy is needed.
        self.copier.stop();
        if self.kind == TargetKind::Base {
            let action = (self.before_switch)();
            let outcome = self.before(end, &self.target, async { Ok(action.await?) }).await;
            // An action that was late may be half done, so the job does not try again.
            return outcome.map_err(|stop| Failure::Marked(stop.for_good()));
        }
        if !self.has_mark() {
            return Ok(());
        }
        let sector = ByteRange::between(0, MARK_BYTES);
        let write = Box::pin(self.copier.range_copy().copy_durably(sector));
        let rest = end.saturating_sub(self.clock.now());
        match select(write, self.clock.sleep(rest)).await {
            Either::Left((outcome, _)) => outcome.map_err(Failure::Unknown),
            Either::Right((_, write)) => Err(Failure::Late(write)),
        }
    }

    /// Writes the target's mark again if it may be gone, after the write that removed it has ended.
    /// Returns why the job is not complete.
    async fn undo(&self, failure: Failure<'_>) -> Stop {
        match failure {
            Failure::Marked(stop) => {
                if let Stop::Late(error) = &stop {
                    self.control.postpone(error);
                }
                stop
            }
            Failure::Unknown(error) => {
                let unmarked = unmarked(&error);
                // The end is decided before the mark is written again, because that write may take
                // long.
                self.control.decide(JobEnd::failed(&unmarked));
                self.mark_again(unmarked).await.map_or_else(Stop::Failed, |()| error.into())
            }
            Failure::Late(write) => {
                let error = late(&self.target);
                let unmarked = unmarked(&error);
                self.control.postpone(&unmarked);
                // The outcome of the late write does not matter, because the mark is written after
                // it.
                let _ = write.await;
                if let Err(unmarked) = self.mark_again(unmarked).await {
                    return Stop::Failed(unmarked);
                }
                self.copier.start();
                Stop::Late(error)
            }
        }
    }

    /// Writes the mark again. Returns `unmarked` if that fails.
    async fn mark_again(&self, unmarked: Error) -> Result<()> {
        mark_incomplete(&self.target, self.source.name()).await.map_err(|_| unmarked)
    }

    fn end_source<'a>(
        &self,
        quiesced: QuiescedDisk<'a, S>,
        completion: Completion,
    ) -> Result<Option<ReplacedImage<'a, S>>, Stop> {
        match completion {
            Completion::Switch => Ok(Some(quiesced.switch_to(Arc::clone(self.target.image()))?)),
            Completion::HandOver => {
                quiesced.retire(self.target.name().to_owned());
                Ok(None)
            }
            Completion::Copy => Ok(None),
        }
    }

    /// Awaits a step of `disk` while the guest's changes are held off. Fails at the time `end`, so
    /// that changes continue even if the step hangs.
    async fn before<T>(
        &self,
        end: Duration,
        disk: &Disk<S>,
        step: impl Future<Output = Result<T, Stop>>,
    ) -> Result<T, Stop> {
        let rest = end.saturating_sub(self.clock.now());
        match select(pin!(step), self.clock.sleep(rest)).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => Err(Stop::Late(late(disk))),
        }
    }
}

fn late<S: Storage>(disk: &Disk<S>) -> Error {
    let what = format!("takes longer than {MAX_PAUSE:?} while the guest's writes wait");
    Error::new(ErrorKind::Io, what)
        .on(disk.name())
        .hint("complete the job again when it is quicker")
}

fn unmarked(error: &Error) -> Error {
    let what = format!("the last write to the mirror failed, and may have been done: {error}");
    let hint =
        "do not use the mirror until the job is ready again: it looks complete, but gets old";
    Error::new(error.kind(), what).hint(hint)
}
