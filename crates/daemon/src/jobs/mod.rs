//! Named jobs: long work on disks while they are served.
//!
//! Guarantees: a disk has one job at a time, and is neither closed nor resized while the job runs.
//! All jobs run on one event loop that serves no guest, so that copying does not delay guests'
//! requests. A job that has ended is listed until it is dismissed. When a job starts, the oldest
//! ended jobs beyond `MAX_ENDED` leave the list. Jobs do not outlive the process: marks on their
//! disks say whether they were complete (`jobs/mirror`, `jobs/commit`).

mod backup;
mod commit;
mod commit_setup;
mod layer_commit;
mod mirror;
mod stream;
mod target;

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockhouse_disk::ImageDisk;
use blockhouse_engine::{Handle, sleep, spawn_detached, timeout};
use blockhouse_jobs::{CopyMode, JobControl, JobEnd, JobStage};
use futures_util::future::{join, join_all};
use parking_lot::Mutex;

use crate::events::{Event, Events};
use crate::process::workers::Workers;
use crate::running::RunningDisk;

pub(crate) use backup::{CopiedBitmap, FrozenSource, start_backup};
pub(crate) use commit::start_commit;
pub(crate) use commit_setup::CommitSetup;
pub(crate) use mirror::{MirrorTarget, check_target_disk, complete_job, start_mirror};
pub(crate) use stream::{OnFailure, begin_prefetch, start_stream};
pub(crate) use target::TargetSetup;

/// The maximum number of ended jobs that stay listed when a job starts.
const MAX_ENDED: usize = 64;

/// How long a job whose outcome is decided waits for its operations in flight.
const MAX_TIDY_TIME: Duration = Duration::from_secs(5);

/// How long the end of a server waits for its jobs.
const MAX_STOP_TIME: Duration = Duration::from_secs(5);

/// How long the loop of jobs may take to report that [`MAX_STOP_TIME`] is over.
const MAX_REPORT_TIME: Duration = Duration::from_secs(1);

/// A job to be started.
#[derive(Clone, Debug)]
pub(crate) struct JobSetup {
    /// The job's name; `None`: any name.
    pub(crate) name: Option<String>,
    /// The name of the disk.
    pub(crate) disk: String,
    /// Whether the guest's writes wait for their copy.
    pub(crate) mode: CopyMode,
    /// The maximum rate of background copying, in bytes a second.
    pub(crate) speed: Option<NonZeroU64>,
}

/// The jobs of a server.
#[derive(Default)]
pub struct Jobs(Mutex<State>);

#[derive(Default)]
struct State {
    /// The jobs, in the order in which they were started.
    jobs: Vec<Arc<RunningJob>>,
    /// Jobs that are no longer listed but may have operations in flight at their target.
    unanswered: Vec<Arc<RunningJob>>,
    /// The names of jobs that are about to start.
    reserved: Vec<String>,
    started: u64,
    /// The event loop of jobs, until the server ends. Created before the sandbox forbids creating
    /// io_uring instances.
    workers: Option<Workers>,
    /// Whether no more jobs may be started.
    is_over: bool,
}

impl State {
    /// Keeps jobs that leave the list while they have operations in flight at their target.
    fn unlist(&mut self, jobs: &[Arc<RunningJob>]) {
        self.unanswered.extend_from_slice(jobs);
        self.unanswered.retain(|job| !job.target_is_free.load(Ordering::SeqCst));
    }
}

/// The name of a job that is about to start, reserved until this is dropped.
pub(crate) struct NewJobName<'a> {
    jobs: &'a Jobs,
    name: String,
}

impl NewJobName<'_> {
    /// The name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for NewJobName<'_> {
    fn drop(&mut self) {
        self.jobs.0.lock().reserved.retain(|name| *name != self.name);
    }
}

/// A job.
pub struct RunningJob {
    /// The name, unique in the server.
    pub name: String,
    /// The kind of work: "mirror", "commit", "stream" or "backup".
    pub kind: &'static str,
    /// The name of its disk.
    pub disk: String,
    /// The target: a path, an address, or the name of a base.
    pub(crate) target: String,
    /// The disk of this server that the job writes to, if any.
    pub target_disk: Option<String>,
    /// The disk's image. A weak reference, so that the job does not keep it open.
    source: Weak<ImageDisk>,
    /// The requests to the job (such as complete or cancel), and the job's progress.
    pub control: Arc<JobControl>,
    /// For a commit of layers below the disk's image, or a stream with a base, the depths of the
    /// layers that it removes from the chain.
    pub left_out: OnceLock<Range<usize>>,
    /// Whether the job has no operation in flight at the target, and has closed it.
    pub(crate) target_is_free: AtomicBool,
    /// Whether the job no longer changes the images of its disk.
    pub(crate) source_is_kept: AtomicBool,
}

impl RunningJob {
    /// A text that names the storage that does not answer: the disk's backing file if a request
    /// waits for it, else the target.
    fn describe_wait(&self) -> String {
        match self.source.upgrade().and_then(|disk| disk.stats().backing_wait()) {
            Some(wait) => wait.to_string(),
            None => format!("its target {} does not answer", self.target),
        }
    }

    /// Whether the job completes when its work is done, without a request.
    fn completes_by_itself(&self) -> bool {
        ["stream", "backup"].contains(&self.kind) || self.left_out.get().is_some()
    }

    fn writes_to(&self, disk: &str) -> bool {
        self.target_disk.as_deref() == Some(disk)
    }

    fn has_ended(&self) -> bool {
        matches!(self.control.stage(), JobStage::Ended(_))
    }

    /// The name of the job's stage.
    pub(crate) fn status(&self) -> &'static str {
        match self.control.stage() {
            JobStage::Running | JobStage::Ready if self.control.is_paused() => "paused",
            JobStage::Running => "running",
            JobStage::Ready => "ready",
            JobStage::Completing => "completing",
            JobStage::Ended(JobEnd::Completed { .. }) => "completed",
            JobStage::Ended(JobEnd::Cancelled) => "cancelled",
            JobStage::Ended(JobEnd::Failed(_)) => "failed",
        }
    }
}

impl Jobs {
    /// Runs jobs on this loop from now on.
    pub(crate) fn run_on(&self, workers: Workers) {
        self.0.lock().workers = Some(workers);
    }

    /// The event loop of jobs, for work that must not delay guests' requests.
    ///
    /// # Errors
    /// The server ends, or has no loop for jobs.
    pub(crate) fn handle(&self) -> Result<Handle> {
        let state = self.0.lock();
        let workers = state.workers.as_ref().filter(|_| !state.is_over);
        Ok(workers.context("this server runs no jobs, or ends")?.first().clone())
    }

    /// All listed jobs.
    pub fn list(&self) -> Vec<Arc<RunningJob>> {
        self.0.lock().jobs.clone()
    }

    /// The job of this name.
    ///
    /// # Errors
    /// No job has this name.
    pub fn find(&self, name: &str) -> Result<Arc<RunningJob>> {
        let found = self.0.lock().jobs.iter().find(|job| job.name == name).cloned();
        found.ok_or_else(|| {
            anyhow::anyhow!("no job is called {name:?}; 'job.list' tells which there are")
        })
    }

    /// A job that has not ended, if there is any.
    pub(crate) fn find_running(&self) -> Option<Arc<RunningJob>> {
        self.0.lock().jobs.iter().find(|job| !job.has_ended()).cloned()
    }

    /// The name of a job that has not ended and satisfies `is_it`, if there is one.
    fn find_unended(&self, is_it: impl Fn(&RunningJob) -> bool) -> Option<String> {
        let state = self.0.lock();
        let found = state.jobs.iter().find(|job| is_it(job) && !job.has_ended());
        found.map(|job| job.name.clone())
    }

    /// Fails if a job works on the disk: the disk must not be changed then.
    pub(crate) fn check_free(&self, disk: &str) -> Result<()> {
        match self.find_unended(|job| job.disk == disk || job.writes_to(disk)) {
            Some(name) => bail!(
                "the job {name:?} works on the disk {disk:?}; cancel it or let it complete first"
            ),
            None => Ok(()),
        }
    }

    /// Reserves a name for a job of this kind: the given one, or any.
    ///
    /// # Errors
    /// Another job has the name.
    pub(crate) fn new_name(&self, wanted: Option<String>, kind: &str) -> Result<NewJobName<'_>> {
        let mut state = self.0.lock();
        state.started += 1;
        let name = wanted.unwrap_or_else(|| format!("{kind}{}", state.started));
        if state.reserved.contains(&name) || state.jobs.iter().any(|job| job.name == name) {
            bail!("a job is called {name:?} already; choose another name, or dismiss that one");
        }
        state.reserved.push(name.clone());
        Ok(NewJobName { jobs: self, name })
    }

    /// Fails if a job writes to the disk: the disk must not be served then.
    pub(crate) fn check_not_written(&self, disk: &str) -> Result<()> {
        match self.find_unended(|job| job.writes_to(disk)) {
            Some(name) => bail!(
                "the job {name:?} writes to the disk {disk:?}; cancel it or let it complete first"
            ),
            None => Ok(()),
        }
    }

    /// Fails if a job copies the backing file's data into the disk: the disk must not become
    /// read-only then. Other jobs only read their disk.
    pub(crate) fn check_not_filled(&self, disk: &str) -> Result<()> {
        match self.find_unended(|job| job.disk == disk && job.kind == "stream") {
            Some(name) => bail!(
                "the job {name:?} fills the disk {disk:?} from its backing file, which a read-only disk does not get; \
                 cancel it ('blockhouse ctl SOCKET job {name} cancel') or let it complete first"
            ),
            None => Ok(()),
        }
    }

    /// Refuses a target at which a job has operations in flight, even if that job has ended.
    ///
    /// # Errors
    /// There are such operations.
    fn check_target_free(&self, target: &str) -> Result<()> {
        let mut state = self.0.lock();
        let is_in_use = |job: &Arc<RunningJob>| !job.target_is_free.load(Ordering::SeqCst);
        state.unanswered.retain(is_in_use);
        let mut all = state.jobs.iter().chain(&state.unanswered).filter(|job| is_in_use(job));
        match all.find(|job| job.target == target) {
            Some(job) => bail!(
                "{target}: is the target of the job {:?}, and has not answered all of it; wait until it does, or \
                 choose another target",
                job.name
            ),
            None => Ok(()),
        }
    }

    /// Whether an ended job keeps the disk in memory until its target answers, and no job may still
    /// write to the disk's images.
    pub(crate) fn has_stuck_reader(&self, disk: &RunningDisk) -> bool {
        let of_disk = |job: &RunningJob| job.source.as_ptr() == Arc::as_ptr(&disk.disk);
        let state = self.0.lock();
        let all = state.jobs.iter().chain(&state.unanswered);
        let mut stuck = all.filter(|job| !job.target_is_free.load(Ordering::SeqCst));
        let is_written = |job: &RunningJob| {
            job.writes_to(disk.name()) || of_disk(job) && !job.source_is_kept.load(Ordering::SeqCst)
        };
        stuck.clone().any(|job| of_disk(job)) && !stuck.any(|job| is_written(job))
    }

    /// Lists a new job. The caller holds a claim to the disk.
    ///
    /// # Errors
    /// Its name is taken, another job works on the disk, the server ends, or it has no loop for
    /// jobs.
    fn register(
        &self,
        name: Option<String>,
        kind: &'static str,
        disk: (&str, &Arc<ImageDisk>),
        target: (String, Option<String>),
    ) -> Result<(Arc<RunningJob>, Handle)> {
        self.register_as(&self.new_name(name, kind)?, kind, disk, target)
    }

    /// As [`register`](Self::register), with a reserved name.
    fn register_as(
        &self,
        name: &NewJobName<'_>,
        kind: &'static str,
        (disk, source): (&str, &Arc<ImageDisk>),
        (target, target_disk): (String, Option<String>),
    ) -> Result<(Arc<RunningJob>, Handle)> {
        self.check_free(disk)?;
        let mut state = self.0.lock();
        if state.is_over {
            bail!("the server ends");
        }
        let name = name.name.clone();
        let workers = state.workers.as_ref().context("this server runs no jobs")?;
        let handle = workers.first().clone();
        let control = Arc::new(JobControl::default());
        let target_is_free = AtomicBool::new(false);
        // The others change images of the disk, or its bitmaps.
        let source_is_kept = AtomicBool::new(kind == "mirror");
        let (disk, source) = (disk.to_owned(), Arc::downgrade(source));
        let left_out = OnceLock::new();
        let job = Arc::new(RunningJob {
            name,
            kind,
            disk,
            target,
            target_disk,
            source,
            control,
            left_out,
            target_is_free,
            source_is_kept,
        });
        state.jobs.push(Arc::clone(&job));
        let ended: Vec<_> = state.jobs.iter().filter(|job| job.has_ended()).cloned().collect();
        let surplus = ended.len().saturating_sub(MAX_ENDED);
        let old = &ended[..surplus];
        state.jobs.retain(|job| !old.iter().any(|old| Arc::ptr_eq(old, job)));
        state.unlist(old);
        Ok((job, handle))
    }

    /// Removes a job that has ended from the list.
    ///
    /// # Errors
    /// No job has this name, or it still runs.
    pub fn dismiss(&self, name: &str) -> Result<()> {
        let job = self.find(name)?;
        if !job.has_ended() {
            bail!("the job {name:?} has not ended; cancel it first");
        }
        let mut state = self.0.lock();
        state.jobs.retain(|other| !Arc::ptr_eq(other, &job));
        state.unlist(&[job]);
        Ok(())
    }

    /// Cancels all jobs, waits a few seconds for their end, and refuses new ones. Calls that wait
    /// for a job return. Returns the loop of jobs, because moved disks may need their connections
    /// on it until the disks are closed. Returns `None` if there is no loop, or if a job still
    /// waits for its target. Such a job ends as failed, and the loop is stopped, unless a system
    /// call blocks it.
    pub(crate) fn stop(&self) -> Option<Workers> {
        let (jobs, workers) = {
            let mut state = self.0.lock();
            state.is_over = true;
            (state.jobs.clone(), state.workers.take())
        };
        let workers = workers?;
        jobs.iter().for_each(|job| _ = job.control.cancel());
        let controls: Vec<_> = jobs.iter().map(|job| Arc::clone(&job.control)).collect();
        let (reported, report) = mpsc::channel();
        drop(workers.first().spawn(move || async move {
            let ended = join_all(controls.iter().map(|control| control.ended()));
            // A target that does not answer must not prevent the server from ending.
            let have_ended = timeout(MAX_STOP_TIME, ended).await.is_some();
            // The receiver may have stopped waiting.
            let _ = reported.send(have_ended);
        }));
        match report.recv_timeout(MAX_STOP_TIME + MAX_REPORT_TIME) {
            Ok(true) => return Some(workers),
            Ok(false) | Err(RecvTimeoutError::Disconnected) => workers.stop(),
            // The loop's thread cannot be joined while a system call blocks it.
            Err(RecvTimeoutError::Timeout) => std::mem::forget(workers),
        }
        for job in jobs.iter().filter(|job| !job.has_ended()) {
            let what = format!("the server ends before it does: {}", job.describe_wait());
            job.control.end(JobEnd::Failed(what));
        }
        None
    }
}

/// Runs a job's work on the loop of jobs (`handle`), and ends the job with the outcome of the work.
fn run_job<F>(handle: &Handle, job: &Arc<RunningJob>, events: &Events, work: F)
where
    F: AsyncFnOnce(&RunningJob) -> JobEnd + Send + 'static,
{
    let (job, events) = (Arc::clone(job), events.clone());
    drop(handle.spawn(move || async move {
        tell_stages(Arc::clone(&job), events);
        let work = async {
            let end = work(&job).await;
            job.target_is_free.store(true, Ordering::SeqCst);
            job.control.end(end);
        };
        until_overdue(&job, work).await;
    }));
}

/// Runs a job's work. If the outcome is decided and the work then takes too long, the job ends
/// before its work. The disk is free then, and the image whose storage does not answer stays open
/// until the storage answers.
async fn until_overdue(job: &RunningJob, work: impl Future<Output = ()>) {
    let overdue = async {
        let end = job.control.decided().await;
        sleep(MAX_TIDY_TIME).await;
        if !job.has_ended() {
            let wait = match end {
                JobEnd::Completed { .. } => {
                    "the image that the disk had before does not answer, and is closed when it does"
                        .to_owned()
                }
                JobEnd::Cancelled | JobEnd::Failed(_) => job.describe_wait(),
            };
            tracing::warn!("{}: has not ended yet: {wait}", job.name);
            job.control.end(end);
        }
    };
    join(work, overdue).await;
}

/// Reports the events of a job's stages until it has ended. Must be called on the loop of jobs.
fn tell_stages(job: Arc<RunningJob>, events: Events) {
    let (name, disk) = (job.name.clone(), job.disk.clone());
    events.tell(Event::JobStarted { job: name, disk, kind: job.kind.to_owned() });
    spawn_detached(async move {
        let mut stage = JobStage::Running;
        let mut was_ready = false;
        loop {
            stage = job.control.next_stage(&stage).await;
            let (name, disk) = (job.name.clone(), job.disk.clone());
            let event = match &stage {
                // A backup completes without a request.
                JobStage::Ready if job.kind == "backup" => continue,
                JobStage::Ready if was_ready => {
                    Event::JobPostponed { job: name, disk, error: job.control.why_postponed() }
                }
                JobStage::Ready => {
                    was_ready = true;
                    Event::JobReady { job: name, disk }
                }
                JobStage::Ended(JobEnd::Failed(error)) => {
                    tracing::error!("{disk}: the job {name} failed: {error}");
                    Event::JobFailed { job: name, disk, error: error.clone() }
                }
                JobStage::Ended(_) => {
                    let outcome = job.status().to_owned();
                    tracing::info!("{disk}: the job {name} is {outcome}");
                    Event::JobEnded { job: name, disk, outcome }
                }
                JobStage::Running | JobStage::Completing => continue,
            };
            events.tell(event);
            if matches!(stage, JobStage::Ended(_)) {
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::EngineChoice;

    use super::*;

    #[test]
    fn a_loop_that_a_system_call_blocks_keeps_no_server_from_its_end() {
        let jobs = Jobs::default();
        jobs.run_on(Workers::start_aside(EngineChoice::Auto).expect("a loop"));
        let (release, released) = mpsc::channel::<()>();
        let (block, blocks) = mpsc::channel();
        drop(jobs.handle().expect("a loop").spawn(move || async move {
            block.send(()).expect("the test waits");
            // This blocks the loop's thread until the test drops `release`.
            let _ = released.recv();
        }));
        blocks.recv().expect("it blocks");
        let (end, ended) = mpsc::channel();
        std::thread::spawn(move || end.send(jobs.stop().is_none()));
        let is_over = ended.recv_timeout(12 * MAX_STOP_TIME);
        drop(release);
        assert_eq!(is_over, Ok(true));
    }
}
