//! Events of QMP for jobs, exports and write thresholds, made from the server's events.
//!
//! Guarantees: an event that a command has caused is sent before its answer.

use std::collections::BTreeSet;
use std::rc::Rc;

use blockhouse_daemon::events::Event;
use blockhouse_jobs::{Completion, JobEnd, JobProgress, JobStage};
use futures_util::FutureExt;
use serde_json::{Value, json};

use super::backups;
use super::context::Context;

/// Forwards the server's events to QMP clients; never returns.
pub(super) async fn forward(context: &Rc<Context>) {
    loop {
        let event = context.happening.next().await;
        take(context, event);
    }
}

/// Forwards the events that are waiting.
pub(super) fn catch_up(context: &Rc<Context>) {
    while let Some(event) = context.happening.next().now_or_never() {
        take(context, event);
    }
}

fn take(context: &Rc<Context>, event: Event) {
    let events = &context.events;
    match event {
        Event::JobStarted { job, .. } => events.tell_begin(&job),
        Event::JobReady { job, .. } => {
            events.tell_begin(&job);
            events.tell_status(&job, "ready");
            events.tell("BLOCK_JOB_READY", block_job(context, &job));
        }
        Event::JobPostponed { job, .. } => {
            if let Some(traits) = context.state.borrow_mut().jobs.get_mut(&job) {
                traits.pending = None;
            }
            events.tell_status(&job, "ready");
        }
        Event::JobEnded { job, .. } | Event::JobFailed { job, .. } if events.ended_early(&job) => {}
        Event::JobEnded { job, disk, outcome } => {
            let is_completed = outcome == "completed";
            if is_completed {
                follow_disk(context, &job, &disk);
            }
            let name = if is_completed { "BLOCK_JOB_COMPLETED" } else { "BLOCK_JOB_CANCELLED" };
            let was_pending = context.state.borrow().pending(&job).is_some();
            let before: &[_] = match is_completed {
                true if was_pending => &[],
                true => &["waiting", "pending"],
                false => &["aborting"],
            };
            end(context, &job, before, (name, block_job(context, &job)));
        }
        Event::JobFailed { job, error, .. } => {
            let mut data = block_job(context, &job);
            data["error"] = error.into();
            end(context, &job, &["aborting"], ("BLOCK_JOB_COMPLETED", data));
        }
        Event::BackupFailed { backup, error, .. } => {
            backups::conclude(context, &backup, Some(error));
        }
        Event::BackupEnded { backup } => {
            backups::conclude(context, &backup, None);
        }
        Event::DiskClosed { disk, .. } => {
            // QMP's own commands take the disk out of `opened` before they close it.
            let is_open = context.running.disks().find(&disk).is_some();
            let mut state = context.state.borrow_mut();
            if !is_open && state.opened.contains_key(&disk) {
                state.forget_disk(&disk);
            }
        }
        Event::ExportRemoved { export, .. } => {
            let id = context.state.borrow_mut().forget_export(&export);
            events.tell("BLOCK_EXPORT_DELETED", json!({ "id": id }));
        }
        Event::WriteThreshold { disk, threshold, exceeded } => {
            let mut state = context.state.borrow_mut();
            let node = state.write_thresholds.remove(&disk);
            // The disk may have been moved to another image since the threshold was set.
            if let Some(node) = node.filter(|node| *node == state.file_of(state.top_of(&disk))) {
                let data = json!({
                    "node-name": node, "amount-exceeded": exceeded, "write-threshold": threshold,
                });
                events.tell("BLOCK_WRITE_THRESHOLD", data);
            }
        }
        Event::Lost { count } => {
            tracing::warn!("clients of QMP are disconnected: {count} events were lost");
            // The clients still receive what is queued. A job that dismisses itself is not listed
            // when they connect again.
            tell_lost_ends(context);
            events.disconnect_all();
            // Some of the lost events may have been removals of exports.
            let there = context.running.exports().list();
            let is_there =
                |address: &str| there.iter().any(|export| export.address.to_string() == address);
            context.state.borrow_mut().exports.retain(|export| is_there(&export.address));
        }
        _ => {}
    }
}

/// Takes the ends of jobs that no event has reported. An event that is not lost may still come.
fn tell_lost_ends(context: &Rc<Context>) {
    let mut told = BTreeSet::new();
    for ended in context.running.jobs().list() {
        let JobStage::Ended(end) = ended.control.stage() else { continue };
        let (job, disk) = (ended.name.clone(), ended.disk.clone());
        let is_lost = context.events.has_begun(&job) || context.state.borrow().auto_dismisses(&job);
        let outcome = match end {
            _ if !is_lost => continue,
            JobEnd::Failed(error) => Event::JobFailed { job, disk, error },
            JobEnd::Completed { .. } => Event::JobEnded { job, disk, outcome: "completed".into() },
            JobEnd::Cancelled => Event::JobEnded { job, disk, outcome: "cancelled".into() },
        };
        take(context, outcome);
        told.insert(ended.name.clone());
    }
    context.events.set_ended_early(told);
}

/// Updates the names of a disk's nodes after a job has changed its chain.
fn follow_disk(context: &Context, job: &str, disk: &str) {
    let Ok(job) = context.running.jobs().find(job) else { return };
    let end = job.control.stage();
    let is_switched =
        matches!(end, JobStage::Ended(JobEnd::Completed { completion: Completion::Switch, .. }));
    let mut state = context.state.borrow_mut();
    match (job.kind, &job.target_disk) {
        ("mirror", Some(target)) if is_switched => state.move_to(disk, target),
        ("commit" | "stream", _) => match job.left_out.get() {
            Some(layers) => state.leave_out(disk, |_| layers.clone()),
            None if job.kind == "commit" => state.pop_top(disk),
            None => state.leave_out(disk, |nodes| 1..nodes),
        },
        _ => {}
    }
}

/// Sends the events of a job's end, and dismisses the job if it was started with `auto-dismiss`.
fn end(context: &Context, job: &str, before: &[&str], (name, data): (&str, Value)) {
    let events = &context.events;
    events.tell_begin(job);
    before.iter().for_each(|status| events.tell_status(job, status));
    events.tell(name, data);
    events.tell_status(job, "concluded");
    events.forget_job(job);
    if context.state.borrow().auto_dismisses(job) && context.running.jobs().dismiss(job).is_ok() {
        context.forget_job(job);
    }
}

/// The data of a block job's events.
fn block_job(context: &Context, name: &str) -> Value {
    let found = context.running.jobs().find(name).ok();
    let progress = found.as_ref().map_or_else(JobProgress::default, |job| job.control.progress());
    let speed = found.as_ref().and_then(|job| job.control.speed());
    json!({
        "device": name,
        "type": found.map_or("stream", |job| job.kind),
        "len": progress.total,
        "offset": offset(progress),
        "speed": speed.map_or(0, |speed| speed.get()),
    })
}

/// The number of bytes that the job has completed.
pub(super) fn offset(progress: JobProgress) -> u64 {
    progress.total.saturating_sub(progress.remaining)
}
