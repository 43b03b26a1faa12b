//! Commands for jobs. Only jobs that are asked to complete can have `auto-finalize` `false`. Until
//! `job-finalize` such a job goes on as a ready one. QEMU holds the guest's changes off meanwhile;
//! this server does not.

use std::rc::Rc;
use std::time::{Duration, Instant};

use blockhouse_engine::{sleep, spawn_detached};
use serde_json::json;

use super::arguments::Arguments;
use super::backups;
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::job_list::{ACTIVE, Job, find, list};
use super::state::Pending;

/// The job of the argument `id`.
pub(super) async fn of_id(context: &Context, mut given: Arguments) -> Result<Job, QmpError> {
    let id = given.text("id")?;
    given.end()?;
    find(context, &id).await?.ok_or_else(|| QmpError::generic("Job not found"))
}

/// The block job of the argument `device`.
pub(super) async fn of_device(context: &Context, given: Arguments) -> Result<Job, QmpError> {
    block_job(context, given, "device").await
}

/// The block job of the argument `id`.
pub(super) async fn of_block_id(context: &Context, given: Arguments) -> Result<Job, QmpError> {
    block_job(context, given, "id").await
}

async fn block_job(context: &Context, mut given: Arguments, key: &str) -> Result<Job, QmpError> {
    let device = given.text(key)?;
    given.end()?;
    let found = find(context, &device).await?.filter(Job::is_of_disk);
    found.ok_or_else(|| QmpError::no_job(&device))
}

/// `query-jobs`.
pub(super) async fn query(context: &Rc<Context>, given: Arguments) -> Returned {
    given.end()?;
    let told = list(context).await?.into_iter().map(|job| {
        let mut told = json!({
            "id": job.name(),
            "type": job.0["kind"],
            "status": job.status(),
            "current-progress": job.offset(),
            "total-progress": job.number("total"),
        });
        if let Some(error) = job.error() {
            told["error"] = error.into();
        }
        told
    });
    Ok(told.collect())
}

/// `query-block-jobs`.
pub(super) async fn query_block_jobs(context: &Rc<Context>, given: Arguments) -> Returned {
    given.end()?;
    let jobs = list(context).await?;
    let state = context.state.borrow();
    let told = jobs.into_iter().filter(Job::is_of_disk).map(|job| {
        let mut told = json!({
            "device": job.name(),
            "type": job.0["kind"],
            "status": job.status(),
            "len": job.number("total"),
            "offset": job.offset(),
            "speed": job.number("speed"),
            "busy": job.is("running") && job.0["idle"] != true,
            "paused": job.is_paused(),
            "ready": job.is("ready") || job.is("standby"),
            "io-status": "ok",
            "auto-finalize": state.auto_finalizes(job.name()),
            "auto-dismiss": state.auto_dismisses(job.name()),
        });
        if let Some(error) = job.error() {
            told["error"] = error.into();
        }
        if job.0["kind"] == "mirror" {
            let is_blocking = state.jobs.get(job.name()).is_some_and(|job| job.is_blocking);
            told["actively-synced"] = (is_blocking && job.is("ready")).into();
        }
        told
    });
    Ok(told.collect())
}

/// `block-job-cancel`: a ready mirror completes as a copy, and the guest continues with the source
/// disk. A ready commit ends without its result, and the guest continues in the overlay.
pub(super) async fn cancel_block_job(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let is_forced = given.flag("force", false)?;
    let job = of_device(context, given).await?;
    if job.is_paused() && !is_forced {
        let why = format!("The block job for device '{}' is currently paused", job.name());
        return Err(QmpError::generic(why));
    }
    if job.status() == "ready" && !is_forced && job.0["kind"] == "mirror" {
        return finish(context, &job, true);
    }
    cancel(context, &job).await
}

/// `job-cancel`.
pub(super) async fn cancel(context: &Context, job: &Job) -> Returned {
    job.check("cancel", &[ACTIVE, &["pending"]].concat())?;
    if backups::end(context, job.name()).await? {
        return Ok(json!({}));
    }
    context.call("job.cancel", json!({ "job": job.name() })).await?;
    Ok(json!({}))
}

/// The maximum wait for the end of jobs before the server ends.
const MAX_END: Duration = Duration::from_secs(1);
/// The interval at which the jobs are checked during that wait.
const LOOK: Duration = Duration::from_millis(5);

/// Cancels all jobs, and waits up to [`MAX_END`] for their end.
pub(super) async fn cancel_all(context: &Context) {
    for job in list(context).await.unwrap_or_default() {
        // The job may have ended.
        let _ = cancel(context, &job).await;
    }
    let begin = Instant::now();
    let is_running = |job: &Job| job.status() != "concluded";
    while begin.elapsed() < MAX_END
        && list(context).await.is_ok_and(|jobs| jobs.iter().any(is_running))
    {
        sleep(LOOK).await;
    }
}

/// `job-complete`.
pub(super) async fn complete(context: &Rc<Context>, job: &Job) -> Returned {
    job.check("complete", &["ready"])?;
    finish(context, job, false)
}

/// Completes a ready job, or has it wait for `job-finalize`.
fn finish(context: &Rc<Context>, job: &Job, is_copy: bool) -> Returned {
    if context.state.borrow().auto_finalizes(job.name()) {
        return begin_completion(context, job, is_copy);
    }
    if let Some(traits) = context.state.borrow_mut().jobs.get_mut(job.name()) {
        traits.pending = Some(Pending::Waits { is_copy });
    }
    let events = &context.events;
    events.tell_status(job.name(), "waiting");
    events.tell_status(job.name(), "pending");
    events.tell("BLOCK_JOB_PENDING", json!({ "type": job.0["kind"], "id": job.name() }));
    Ok(json!({}))
}

/// Starts to complete a job. Events report the completion.
fn begin_completion(context: &Rc<Context>, job: &Job, is_copy: bool) -> Returned {
    let (context, name) = (Rc::clone(context), job.name().to_owned());
    let mut params = json!({ "job": name });
    if is_copy {
        params["copy"] = true.into();
    }
    spawn_detached(async move {
        let Some(_inside) = context.gate.enter().await else { return };
        if let Err(why) = context.call("job.complete", params).await {
            tracing::warn!("the job {name} was asked to complete by QMP: {why:?}");
        }
    });
    Ok(json!({}))
}

/// `job-dismiss`.
pub(super) async fn dismiss(context: &Context, job: &Job) -> Returned {
    job.check("dismiss", &["concluded"])?;
    let is_own = {
        let mut state = context.state.borrow_mut();
        state.pulls.remove(job.name()).is_some() || state.creations.remove(job.name()).is_some()
    };
    if is_own {
        context.forget_job(job.name());
        return Ok(json!({}));
    }
    context.call("job.dismiss", json!({ "job": job.name() })).await?;
    context.forget_job(job.name());
    Ok(json!({}))
}

/// `job-finalize`.
pub(super) async fn finalize(context: &Rc<Context>, job: &Job) -> Returned {
    job.check("finalize", &["pending"])?;
    let mut is_copy = false;
    if let Some(traits) = context.state.borrow_mut().jobs.get_mut(job.name()) {
        let before = traits.pending.replace(Pending::Finalized);
        is_copy = before == Some(Pending::Waits { is_copy: true });
    }
    begin_completion(context, job, is_copy)
}

/// `job-pause`.
pub(super) async fn pause(context: &Context, job: &Job) -> Returned {
    job.check("pause", ACTIVE)?;
    if job.is_paused() {
        return Err(QmpError::generic("Job is already paused"));
    }
    context.call("job.pause", json!({ "job": job.name() })).await?;
    let is_ready = job.status() == "ready";
    context.events.tell_status(job.name(), if is_ready { "standby" } else { "paused" });
    Ok(json!({}))
}

/// `job-resume`.
pub(super) async fn resume(context: &Context, job: &Job) -> Returned {
    job.check("resume", ACTIVE)?;
    if !job.is_paused() {
        return Err(QmpError::generic("Can't resume a job that was not paused"));
    }
    context.call("job.resume", json!({ "job": job.name() })).await?;
    let now = find(context, job.name()).await?;
    context.events.tell_status(job.name(), now.map_or("running", |job| job.status()));
    Ok(json!({}))
}

/// `block-job-set-speed`.
pub(super) async fn set_speed(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let speed = given.integer("speed")?;
    let job = of_device(context, given).await?;
    job.check("set-speed", ACTIVE)?;
    if speed < 0 {
        return Err(QmpError::generic("Parameter 'speed' expects a non-negative value"));
    }
    context.call("job.set-speed", json!({ "job": job.name(), "speed": speed })).await?;
    Ok(json!({}))
}
