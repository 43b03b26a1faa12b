//! The interface of a job for its users: their requests, and its progress.
//!
//! Guarantees: every method may be called from any thread, and returns at once unless it is
//! `async`. A request is in effect when its method returns: a job whose
//! [`cancel`](JobControl::cancel) returned `true` ends as cancelled, or has failed before the call.
//! A job that has ended never changes.

use std::num::NonZeroU64;
use std::time::Duration;

use blockhouse_core::Error;
use blockhouse_core::sync::Condvar;
use parking_lot::Mutex;

/// The treatment of the disk when its mirror is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The guest continues on the mirror.
    Switch,
    /// The disk refuses all changes from then on: the guest will use the mirror elsewhere.
    HandOver,
    /// The guest continues on the disk. The mirror is a copy of the disk at that moment.
    Copy,
}

/// The stage of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobStage {
    /// The job runs, and cannot be completed yet.
    Running,
    /// Little work is left: the job keeps up with the guest, and can be completed.
    Ready,
    /// The job was asked to complete.
    Completing,
    /// The job has ended.
    Ended(JobEnd),
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// The job has done all its work, durably.
    Completed {
        /// The treatment of the disk.
        completion: Completion,
        /// The time for which the guest's changes were held off.
        pause: Duration,
    },
    /// The job was cancelled. The disk continues as before; bytes that were already copied stay.
    Cancelled,
    /// The job failed, with the reason in one line. The disk continues as before.
    Failed(String),
}

/// Figures of a job, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// The bytes written to the target. The number exceeds the disk's size if the guest often
    /// changes copied ranges.
    pub copied: u64,
    /// The bytes still to be copied, as far as known.
    pub remaining: u64,
    /// The sum of `copied` and `remaining`, repeated copies included.
    pub total: u64,
    /// The recent rate of copying, in bytes per second.
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
    /// The job can no longer be cancelled.
    is_committed: bool,
    /// The number of postponed completions, and the reason of the last one.
    postponed: (u64, String),
    /// The end that was decided.
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
    /// The job's stage.
    pub fn stage(&self) -> JobStage {
        self.state.lock().stage.clone()
    }

    /// The job's figures.
    pub fn progress(&self) -> JobProgress {
        self.state.lock().progress
    }

    /// Whether the job is paused.
    pub fn is_paused(&self) -> bool {
        self.state.lock().is_paused
    }

    /// Stops background copying until the job is [resumed](Self::resume). Writes that wait for a
    /// copy still get it.
    pub fn pause(&self) {
        self.state.lock().is_paused = true;
        self.changed.notify_all();
    }

    /// Resumes background copying.
    pub fn resume(&self) {
        self.state.lock().is_paused = false;
        self.changed.notify_all();
    }

    /// Sets the maximum rate of background copying, in bytes per second; `None`: no limit.
    pub fn set_speed(&self, speed: Option<NonZeroU64>) {
        self.state.lock().speed = speed;
        self.changed.notify_all();
    }

    /// The maximum rate of background copying, in bytes per second.
    pub fn speed(&self) -> Option<NonZeroU64> {
        self.state.lock().speed
    }

    /// Ends the job without its result. `false` if the job has ended, or is ending.
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

    /// Ends the job with its result, as soon as the result is complete. A paused job continues.
    /// `false` if the job has ended, is cancelled, or was asked for another completion.
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

    /// Waits until the job's stage differs from `known`.
    pub async fn next_stage(&self, known: &JobStage) -> JobStage {
        self.changed.wait_until(|| Some(self.stage()).filter(|stage| stage != known)).await
    }

    /// Waits for the job's end.
    pub async fn ended(&self) -> JobEnd {
        let ended = || match self.stage() {
            JobStage::Ended(end) => Some(end),
            _ => None,
        };
        self.changed.wait_until(ended).await
    }

    /// The number of times that the job was asked to complete, and could not complete yet.
    pub fn postponements(&self) -> u64 {
        self.state.lock().postponed.0
    }

    /// The reason of the last postponement; empty if there was none.
    pub fn why_postponed(&self) -> String {
        self.state.lock().postponed.1.clone()
    }

    /// Waits for the job's end, or for more postponements than `known`. After a postponement,
    /// completion can be requested again.
    ///
    /// # Errors
    /// The reason why the job cannot be completed yet, in one line.
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

    /// Waits until the job's end is decided; returns that end. The remaining work may take as long
    /// as the target, or a replaced image, takes to reply. No guest request waits for that work.
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

    /// Ends the job: all its work is done. Only the first end counts.
    pub fn end(&self, end: JobEnd) {
        self.set_stage(JobStage::Ended(end));
    }

    /// Notified when a user's request or the job's stage changes, and at the job's events, such as
    /// the end of a pass.
    pub(crate) fn changed(&self) -> &Condvar {
        &self.changed
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.state.lock().is_cancelled
    }

    pub(crate) fn completion(&self) -> Option<Completion> {
        self.state.lock().completion
    }

    /// Refuses cancellation from now on. `false` if the job was cancelled.
    pub(crate) fn commit(&self) -> bool {
        let mut state = self.state.lock();
        state.is_committed = !state.is_cancelled;
        state.is_committed
    }

    /// Postpones the completion. The job continues, and can be cancelled or asked again.
    pub(crate) fn postpone(&self, error: &Error) {
        {
            let mut state = self.state.lock();
            state.postponed = (state.postponed.0 + 1, error.to_string());
            (state.completion, state.is_committed) = (None, false);
        }
        self.changed.notify_all();
    }

    /// Decides the job's end. The first decision holds.
    pub(crate) fn decide(&self, end: JobEnd) {
        self.state.lock().decided.get_or_insert(end);
        self.changed.notify_all();
    }

    /// Whether the job's end is decided.
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
