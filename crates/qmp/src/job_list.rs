//! Jobs of QMP: the server's jobs, backups that clients read, and creations of images.

use blockhouse_jobs::JobStage;
use serde_json::{Value, json};

use super::context::Context;
use super::errors::QmpError;
use super::state::{Pending, Pull};

/// QEMU's statuses of a job that has not ended and does not wait for `job-finalize`.
pub(super) const ACTIVE: &[&str] = &["running", "paused", "ready", "standby"];

/// A job, with the keys of `job.list`.
pub(super) struct Job(pub(super) Value);

impl Job {
    /// The name.
    pub(super) fn name(&self) -> &str {
        self.0["job"].as_str().unwrap_or_default()
    }

    /// A number of the job.
    pub(super) fn number(&self, key: &str) -> u64 {
        self.0[key].as_u64().unwrap_or_default()
    }

    /// Whether it has this status in the server's list.
    pub(super) fn is(&self, status: &str) -> bool {
        self.0["status"] == status
    }

    /// Whether it is paused, in either stage: running or ready.
    pub(super) fn is_paused(&self) -> bool {
        self.is("paused") || self.is("standby")
    }

    /// The status in QEMU.
    pub(super) fn status(&self) -> &'static str {
        match self.0["status"].as_str().unwrap_or_default() {
            "running" => "running",
            "paused" => "paused",
            "standby" => "standby",
            "pending" => "pending",
            // In QEMU a job that is completing is still ready.
            "ready" | "completing" => "ready",
            _ => "concluded",
        }
    }

    /// The reason of its failure, if it has failed or was cancelled.
    pub(super) fn error(&self) -> Option<&str> {
        if self.is("cancelled") { Some("Operation canceled") } else { self.0["error"].as_str() }
    }

    /// Whether it is a block job of QEMU.
    pub(super) fn is_of_disk(&self) -> bool {
        self.0["kind"] != "create"
    }

    /// The number of bytes that the job has completed.
    pub(super) fn offset(&self) -> u64 {
        self.number("total").saturating_sub(self.number("remaining"))
    }

    /// Refuses a command unless the job's status is one of `statuses`.
    pub(super) fn check(&self, verb: &str, statuses: &[&str]) -> Result<(), QmpError> {
        match (self.status(), self.name()) {
            (status, _) if statuses.contains(&status) => Ok(()),
            (status, name) => Err(QmpError::generic(format!(
                "Job '{name}' in state '{status}' cannot accept command verb '{verb}'"
            ))),
        }
    }
}

/// All jobs of QMP: the server's jobs, and commands that are jobs only in QEMU.
pub(super) async fn list(context: &Context) -> Result<Vec<Job>, QmpError> {
    let mut jobs: Vec<_> = match context.call("job.list", json!({})).await? {
        Value::Array(jobs) => jobs.into_iter().map(|job| of_server(context, job)).collect(),
        _ => Vec::new(),
    };
    jobs.extend(pulls(context).into_iter().chain(creations(context)).map(Job));
    Ok(jobs)
}

/// A job of the server. QEMU has its own statuses for a job that is ready: `standby` if it is
/// paused, and `pending` if it waits for `job-finalize`; after that `concluded`.
fn of_server(context: &Context, told: Value) -> Job {
    let mut job = Job(told);
    let found = context.running.jobs().find(job.name()).ok();
    if job.is("paused") && found.is_some_and(|job| job.control.stage() == JobStage::Ready) {
        job.0["status"] = "standby".into();
    }
    let is_ready = ["ready", "standby", "completing"].iter().any(|status| job.is(status));
    match context.state.borrow().pending(job.name()).filter(|_| is_ready) {
        Some(Pending::Waits { .. }) => job.0["status"] = "pending".into(),
        Some(Pending::Finalized) => job.0["status"] = "concluded".into(),
        None => {}
    }
    job
}

/// The job of this name.
pub(super) async fn find(context: &Context, name: &str) -> Result<Option<Job>, QmpError> {
    Ok(list(context).await?.into_iter().find(|job| job.name() == name))
}

/// The backups that clients read, with the keys of `job.list`.
fn pulls(context: &Context) -> Vec<Value> {
    let told = |(name, pull): (&String, &Pull)| {
        let size = context.running.disks().find(&pull.disk).map_or(0, |disk| disk.disk.size());
        json!({
            "job": name,
            "kind": "backup",
            "disk": pull.disk,
            "status": match pull.end {
                None => "running",
                Some(None) => "cancelled",
                Some(Some(_)) => "failed",
            },
            "error": pull.end.clone().flatten(),
            "total": size,
            "remaining": size,
            // The job copies nothing by itself.
            "idle": true,
        })
    };
    context.state.borrow().pulls.iter().map(told).collect()
}

/// The creations of images, with the keys of `job.list`.
fn creations(context: &Context) -> Vec<Value> {
    let told = |(name, end): (&String, &Option<Option<String>>)| {
        let status = match end {
            None => "running",
            Some(None) => "completed",
            Some(Some(_)) => "failed",
        };
        let remaining = u64::from(end.is_none());
        let error = end.clone().flatten();
        json!({ "job": name, "kind": "create", "status": status, "total": 1, "remaining": remaining, "error": error })
    };
    context.state.borrow().creations.iter().map(told).collect()
}
