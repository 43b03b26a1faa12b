//! The methods of jobs.

use std::num::NonZeroU64;
use std::sync::Arc;

use blockhouse_config::text_fields::check_image_name;
use blockhouse_jobs::{Completion, CopyMode, JobEnd, JobStage};
use serde_json::Value;

use super::job_methods::{
    JobCompleteParams, JobInfo, JobKind, JobParams, JobSpeedParams, JobStartParams,
};
use super::methods::{Done, NoParams, PauseResult};
use super::outcome::{Outcome, invalid, params, result, unknown};
use super::rpc::Failure;
use crate::jobs::complete_job;
use crate::jobs::start_commit;
use crate::jobs::start_mirror;
use crate::jobs::start_stream;
use crate::jobs::{CommitSetup, JobSetup, MirrorTarget, OnFailure, RunningJob, TargetSetup};
use crate::running::Running;

/// Executes a method `job.*`.
pub(super) async fn call(running: &Running, method: &str, given: Value) -> Outcome {
    let jobs = running.jobs();
    let find = |given| {
        let JobParams { job } = params(given)?;
        Ok::<_, Failure>(jobs.find(&job)?)
    };
    match method {
        "job.list" => {
            let NoParams {} = params(given)?;
            result(listed(running))
        }
        "job.start" => start(running, params(given)?).await,
        "job.pause" => {
            find(given)?.control.pause();
            result(Done {})
        }
        "job.resume" => {
            find(given)?.control.resume();
            result(Done {})
        }
        "job.set-speed" => {
            let JobSpeedParams { job, speed } = params(given)?;
            jobs.find(&job)?.control.set_speed(speed.and_then(NonZeroU64::new));
            result(Done {})
        }
        "job.complete" => {
            let JobCompleteParams { job, hand_over, copy } = params(given)?;
            let completion = match (hand_over, copy) {
                (false, false) => Completion::Switch,
                (true, false) => Completion::HandOver,
                (false, true) => Completion::Copy,
                (true, true) => return Err(invalid("say hand-over or copy, one of them".into())),
            };
            let pause = complete_job(running, &job, completion).await?;
            result(PauseResult { pause_us: pause.as_micros() as u64 })
        }
        "job.cancel" => {
            let job = find(given)?;
            if job.control.cancel() {
                result(Done {})
            } else {
                let status = job.status();
                Err(anyhow::anyhow!("the job {:?} is {status} already", job.name).into())
            }
        }
        "job.dismiss" => {
            let JobParams { job } = params(given)?;
            jobs.dismiss(&job)?;
            result(Done {})
        }
        _ => Err(unknown(method)),
    }
}

/// All jobs, including those that have ended.
pub(crate) fn listed(running: &Running) -> Vec<JobInfo> {
    running.jobs().list().iter().map(info).collect()
}

async fn start(running: &Running, given: JobStartParams) -> Outcome {
    let JobStartParams { kind, disk, target, target_disk, job: name, .. } = given;
    let JobStartParams { format, overwrite, decrypt, top, base, mode, speed, .. } = given;
    let JobStartParams { backing_file, delete, .. } = given;
    if kind == JobKind::Stream && mode != CopyMode::Auto {
        return Err(invalid("writes never wait for a stream: leave mode out".into()));
    }
    if kind != JobKind::Commit && decrypt {
        return Err(invalid("only a commit may decrypt: leave decrypt out".into()));
    }
    if kind == JobKind::Mirror && (base.is_some() || delete) {
        return Err(invalid(
            "only a stream or a commit has a base: leave base and delete out".into(),
        ));
    }
    if kind != JobKind::Commit && (top.is_some() || backing_file.is_some()) {
        return Err(invalid("only a commit has a top: leave top and backing-file out".into()));
    }
    let setup = JobSetup { name, disk, mode, speed: speed.and_then(NonZeroU64::new) };
    let job = match (kind, target) {
        (JobKind::Mirror, None) if target_disk.is_some() && format.is_none() => {
            let target = MirrorTarget::Disk(target_disk.unwrap_or_default());
            start_mirror(running, setup, target).await?
        }
        _ if target_disk.is_some() => {
            let what = "only a mirror goes to another disk, which has a format: leave target-disk out, or target and format";
            return Err(invalid(what.into()));
        }
        (JobKind::Mirror, Some(location)) => {
            check_image_name(&location).map_err(invalid)?;
            let target = TargetSetup { location, format, overwrite };
            start_mirror(running, setup, MirrorTarget::Image(target)).await?
        }
        (JobKind::Mirror, None) => return Err(invalid("a mirror needs a target".into())),
        (JobKind::Commit, None) if format.is_none() && !overwrite => {
            let commit = CommitSetup { top, base, backing_file, decrypt, delete };
            start_commit(running, setup, commit).await?
        }
        (JobKind::Stream, None) if format.is_none() && !overwrite => {
            start_stream(running, setup, (base.as_deref(), delete), OnFailure::Fail).await?
        }
        (JobKind::Commit | JobKind::Stream, _) => {
            let what = "only a mirror has another image as its target: leave target, format and overwrite out";
            return Err(invalid(what.into()));
        }
    };
    result(JobParams { job: job.name.clone() })
}

fn info(job: &Arc<RunningJob>) -> JobInfo {
    let progress = job.control.progress();
    JobInfo {
        job: job.name.clone(),
        kind: job.kind,
        disk: job.disk.clone(),
        target: job.target.clone(),
        status: job.status(),
        error: match job.control.stage() {
            JobStage::Ended(JobEnd::Failed(error)) => Some(error),
            _ => None,
        },
        copied: progress.copied,
        remaining: progress.remaining,
        total: progress.total,
        rate: progress.rate,
        speed: job.control.speed().map(NonZeroU64::get),
    }
}
