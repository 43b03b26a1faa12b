//! The end of a mirror: the moment in which the target becomes the disk.
//!
//! Guarantees: one write decides, that of the first sector in place of the mark, and its outcome is
//! always known: it is awaited, however long it takes. The guest's changes wait for it for
//! `MAX_PAUSE` at most. Where it failed or was late they go on at the source. The source's record
//! was removed before, and the mark is written again after the write has ended, so it is the last
//! that the first sector gets. A mirror that was late goes on, and can be completed another time;
//! one whose write failed has failed.
//!
//! Of a commit, an action of the caller decides ([`Mirror::before_switch`]). Where it fails or is
//! late, the source is the disk, and the caller [undoes](Mirror::source_kept) what the action has
//! done.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{ByteRange, Error, ErrorKind, Request, Result, Storage};
use blockhouse_disk::{Disk, MARK_BYTES, QuiescedDisk, ReplacedImage, mark_incomplete};
use futures_util::future::{Either, select};

use super::{MAX_PAUSE, Mirror, Stop, TargetKind};
use crate::control::{Completion, JobEnd};

/// Why the target is not the disk.
enum Failure<'a> {
    /// It has its mark.
    Marked(Stop),
    /// The write of its first sector failed, and may have been done.
    Unknown(Error),
    /// The write of its first sector is in flight.
    Late(Pin<Box<dyn Future<Output = Result<()>> + 'a>>),
}

impl Failure<'_> {
    /// Whether the job goes on.
    fn is_late(&self) -> bool {
        matches!(self, Self::Late(_) | Self::Marked(Stop::Late(_)))
    }
}

impl Stop {
    /// It must not be tried again.
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
    /// Holds the guest's changes off, copies the rest, and ends the job; returns for how long they
    /// were held off.
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
            // In this order: after a crash the source has no record if its guest has continued.
            (self.source_kept)();
            self.copier.hurry(false);
            if !failure.is_late() {
                self.stop_observing();
            }
            drop(quiesced);
            return Err(self.undo(failure).await);
        }
        // No copy may run when the disk's requests go to the target: it would restore older bytes.
        self.finish_copier();
        let replaced = self.end_source(quiesced, completion)?;
        let pause = self.clock.now().saturating_sub(began);
        self.stop_observing();
        if let Some(replaced) = replaced {
            (self.switched)();
            // Before the old image is closed: its storage may hang.
            self.control.decide(JobEnd::Completed { completion, pause });
            if let Err(error) = replaced.close().await {
                // The guest no longer needs it.
                tracing::warn!("after its mirror was complete: {error}");
            }
        }
        Ok(pause)
    }

    /// Copies the rest while changes are held off, and makes the target complete, until `end`.
    async fn copy_rest(&self, end: Duration) -> Result<(), Failure<'_>> {
        self.copier.hurry(true);
        self.before(end, &self.target, async {
            self.wait_until(|| self.copier.is_idle().then_some(())).await?;
            Ok(self.target.submit_unlimited(Request::Flush).await?)
        })
        .await?;
        // Nothing after the write that decides can fail.
        if self.kind != TargetKind::Backup {
            self.source.check_replacement(self.target.image()).map_err(Stop::Failed)?;
        }
        if !self.control.commit() {
            return Err(Stop::Cancelled.into());
        }
        // All is copied, and nothing changes: nothing is begun.
        self.copier.stop();
        if self.kind == TargetKind::Base {
            let action = (self.before_switch)();
            let outcome = self.before(end, &self.target, async { Ok(action.await?) }).await;
            // After the time limit it may be half done.
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
    /// Returns why the job fails.
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
                // Until the mark is written, this is the end to report.
                self.control.decide(JobEnd::failed(&unmarked));
                self.mark_again(unmarked).await.map_or_else(Stop::Failed, |()| error.into())
            }
            Failure::Late(write) => {
                let error = late(&self.target);
                let unmarked = unmarked(&error);
                self.control.postpone(&unmarked);
                // Its outcome does not matter.
                let _ = write.await;
                if let Err(unmarked) = self.mark_again(unmarked).await {
                    return Stop::Failed(unmarked);
                }
                self.copier.start();
                Stop::Late(error)
            }
        }
    }

    /// Writes the mark again. On error the job ends with `unmarked`.
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

    /// Awaits a step of `disk` while the guest's changes are held off: at this time they continue,
    /// even if it hangs.
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
