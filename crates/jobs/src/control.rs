//! The view of a job for others: their wishes, and its progress.
//!
//! Guarantees: every method returns at once, from any thread. A wish counts from when the method
//! returns: a job whose [`cancel`](JobControl::cancel) returned `true` ends as cancelled, or failed
//! before. A job that has ended never changes.

use std::num::NonZeroU64;
use std::time::Duration;

use blockhouse_core::Error;
use blockhouse_core::sync::Condvar;
use parking_lot::Mutex;

/// The treatment of the disk when its mirror is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Its guest continues on the mirror.
    Switch,
    /// It refuses all changes from then on: the guest will use the mirror elsewhere.
    HandOver,
    /// Its guest continues on it: the mirror is a copy of it at that moment.
    Copy,
}

/// How far a job is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobStage {
    /// It works, and cannot be completed yet.
    Running,
    /// Little is left: it keeps up with the guest, and can be completed.
    Ready,
    /// It was asked to complete.
    Completing,
    /// It is over.
    Ended(JobEnd),
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// It has finished all its work, durably.
    Completed {
        /// The treatment of the disk.
        completion: Completion,
        /// For how long the guest's changes were held off.
        pause: Duration,
    },
    /// It was cancelled. Everything that it would have changed is as before it began.
    Cancelled,
    /// It failed, with the reason in one line. The disk continues as before.
    Failed(String),
}

/// Figures of a job, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// The bytes written to the target. More than `total` if the guest changes copied ranges.
    pub copied: u64,
    /// The bytes still to be copied, as far as known.
    pub remaining: u64,
    /// The bytes that were copied and that remain, the second time and later ones included.
    pub total: u64,
    /// Bytes a second that were copied lately.
    pub rate: u64,
}

/// A job's control. Shared by the job and by its users.
#[derive(Debug, Default)]
pub struct JobControl {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    stage: JobStage,
    progress: JobProgress,
    is_paused: bool,
    is_cancelled: bool,
    completion: Option<Completion>,
    /// From here on it cannot be cancelled.
    is_committed: bool,
    /// Why it could not be completed last, and how many times it could not.
    postponed: (u64, String),
    /// How it is going to end.
    decided: Option<JobEnd>,
    speed: Option<NonZeroU64>,
}

impl Default for State {
    fn default() -> Self {
        let (stage, progress) = (JobStage::Running, JobProgress::default());
        Self {
            stage,
            progress,
            is_paused: false,
            is_cancelled: false,
            completion: None,
            is_committed: false,
            postponed: Default::default(),
            decided: None,
            speed: None,
        }
    }
}

impl JobControl {
    /// How far it is.
    pub fn stage(&self) -> JobStage {
        self.state.lock().stage.clone()
    }

    /// Its figures.
    pub fn progress(&self) -> JobProgress {
        self.state.lock().progress
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.state.lock().is_paused
    }

    /// Copies nothing more in the background until it is [resumed](Self::resume). Writes that wait
    /// for their copy still get it.
    pub fn pause(&self) {
        self.state.lock().is_paused = true;
        self.changed.notify_all();
    }

    /// Goes on.
    pub fn resume(&self) {
        self.state.lock().is_paused = false;
        self.changed.notify_all();
    }

    /// The most bytes a second that are copied in the background; `None`: no limit.
    pub fn set_speed(&self, speed: Option<NonZeroU64>) {
        self.state.lock().speed = speed;
        self.changed.notify_all();
    }

    /// The most bytes a second.
    pub fn speed(&self) -> Option<NonZeroU64> {
        self.state.lock().speed
    }

    /// Ends it without its result. `false` if it is too late: it has ended, or is just ending.
    pub fn cancel(&self) -> bool {
        let mut state = self.state.lock();
        if state.is_committed || matches!(state.stage, JobStage::Ended(_)) {
            return false;
        }
        state.is_cancelled = true;
        state.decided.get_or_insert(JobEnd::Cancelled);
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Ends it with its result, as soon as that is complete. A paused job continues. `false` if it
    /// has ended, is cancelled, or was asked for another completion.
    pub fn complete(&self, completion: Completion) -> bool {
        let mut state = self.state.lock();
        let is_over = matches!(state.stage, JobStage::Ended(_)) || state.is_cancelled;
        if is_over || state.completion.as_ref().is_some_and(|other| *other != completion) {
            return false;
        }
        (state.completion, state.is_paused) = (Some(completion), false);
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Waits until its stage is another one than `known`.
    pub async fn next_stage(&self, known: &JobStage) -> JobStage {
        self.changed.wait_until(|| Some(self.stage()).filter(|stage| stage != known)).await
    }

    /// Waits for its end.
    pub async fn ended(&self) -> JobEnd {
        let ended = || match self.stage() {
            JobStage::Ended(end) => Some(end),
            _ => None,
        };
        self.changed.wait_until(ended).await
    }

    /// How many times it was asked to complete, and could not yet.
    pub fn postponements(&self) -> u64 {
        self.state.lock().postponed.0
    }

    /// The reason of the last postponement; empty if there was none.
    pub fn why_postponed(&self) -> String {
        self.state.lock().postponed.1.clone()
    }

    /// Waits for its end, or for one postponement more than `known`. Then the error has the reason,
    /// and completion can be requested again.
    ///
    /// # Errors
    /// Why it cannot be completed yet, in one line.
    pub async fn ended_or_postponed(&self, known: u64) -> Result<JobEnd, String> {
        let outcome = || {
            let state = self.state.lock();
            match &state.stage {
                JobStage::Ended(end) => Some(Ok(end.clone())),
                _ if state.postponed.0 > known => Some(Err(state.postponed.1.clone())),
                _ => None,
            }
        };
        self.changed.wait_until(outcome).await
    }

    /// Waits until the kind of its end is decided, or for its end. The remaining work may take as
    /// long as the target, or a replaced image, takes to answer. Nothing of the guest waits for it.
    pub async fn decided(&self) -> JobEnd {
        let decided = || {
            let state = self.state.lock();
            match &state.stage {
                JobStage::Ended(end) => Some(end.clone()),
                _ => state.decided.clone(),
            }
        };
        self.changed.wait_until(decided).await
    }

    /// The job has ended: all of its work is done. A job has one end, the first.
    pub fn end(&self, end: JobEnd) {
        self.set_stage(JobStage::Ended(end));
    }

    /// Notified of every change of the requests to the job, of its stage, and of events of the job.
    pub(crate) fn changed(&self) -> &Condvar {
        &self.changed
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.state.lock().is_cancelled
    }

    pub(crate) fn completion(&self) -> Option<Completion> {
        self.state.lock().completion
    }

    /// Refuses to be cancelled from now on. `false` if it was cancelled.
    pub(crate) fn commit(&self) -> bool {
        let mut state = self.state.lock();
        state.is_committed = !state.is_cancelled;
        state.is_committed
    }

    /// It cannot be completed yet: it continues, and can be cancelled or asked again.
    pub(crate) fn postpone(&self, error: &Error) {
        {
            let mut state = self.state.lock();
            state.postponed = (state.postponed.0 + 1, error.to_string());
            (state.completion, state.is_committed) = (None, false);
        }
        self.changed.notify_all();
    }

    /// Decides its end: the first decision holds.
    pub(crate) fn decide(&self, end: JobEnd) {
        self.state.lock().decided.get_or_insert(end);
        self.changed.notify_all();
    }

    /// Whether it is known how it is going to end.
    pub(crate) fn is_decided(&self) -> bool {
        self.state.lock().decided.is_some()
    }

    pub(crate) fn set_stage(&self, stage: JobStage) {
        {
            let mut state = self.state.lock();
            if matches!(state.stage, JobStage::Ended(_)) {
                return;
            }
            state.stage = stage;
        }
        self.changed.notify_all();
    }

    pub(crate) fn set_progress(&self, progress: JobProgress) {
        self.state.lock().progress = progress;
    }
}

impl JobEnd {
    pub(crate) fn failed(error: &Error) -> Self {
        Self::Failed(error.to_string())
    }
}
