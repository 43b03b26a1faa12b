//! Jobs. Those of QEMU that wait to be finalized are not possible: all finalize themselves.

use std::rc::Rc;
use std::time::{Duration, Instant};

use blockhouse_engine::{sleep, spawn_detached};
use serde_json::{Value, json};

use super::arguments::{Arguments, is_well_formed};
use super::backups;
use super::context::Context;
use super::creation;
use super::errors::{QmpError, Returned};
use super::events::forget;
use super::state::JobTraits;

/// A job, as `job.list` tells of it.
struct Job(Value);

impl Job {
    fn name(&self) -> &str {
        self.0["job"].as_str().unwrap_or_default()
    }

    fn number(&self, key: &str) -> u64 {
        self.0[key].as_u64().unwrap_or_default()
    }

    fn is(&self, status: &str) -> bool {
        self.0["status"] == status
    }

    fn status(&self) -> &'static str {
        match self.0["status"].as_str().unwrap_or_default() {
            "running" => "running",
            "paused" => "paused",
            // It is asked to complete, and does.
            "ready" | "completing" => "ready",
            _ => "concluded",
        }
    }

    /// Why it has no result, if it has ended so.
    fn error(&self) -> Option<&str> {
        match self.is("cancelled") {
            true => Some("Operation canceled"),
            false => self.0["error"].as_str(),
        }
    }

    /// Whether it is a block job of QEMU.
    fn is_of_disk(&self) -> bool {
        self.0["kind"] != "create"
    }

    fn offset(&self) -> u64 {
        self.number("total").saturating_sub(self.number("remaining"))
    }

    /// Refuses a command that has no meaning in the job's status.
    fn check(&self, verb: &str, statuses: &[&str]) -> Result<(), QmpError> {
        match (self.status(), self.name()) {
            (status, _) if statuses.contains(&status) => Ok(()),
            (status, name) => Err(QmpError::generic(format!(
                "Job '{name}' in state '{status}' cannot accept command verb '{verb}'"
            ))),
        }
    }
}

async fn list(context: &Context) -> Result<Vec<Job>, QmpError> {
    let mut jobs: Vec<_> = match context.call("job.list", json!({})).await? {
        Value::Array(jobs) => jobs.into_iter().map(Job).collect(),
        _ => Vec::new(),
    };
    jobs.extend(backups::pulls(context).into_iter().chain(creation::listed(context)).map(Job));
    Ok(jobs)
}

async fn find(context: &Context, name: &str) -> Result<Option<Job>, QmpError> {
    Ok(list(context).await?.into_iter().find(|job| job.name() == name))
}

/// The job of the argument `id`.
async fn of_id(context: &Context, mut given: Arguments) -> Result<Job, QmpError> {
    let id = given.text("id")?;
    given.end()?;
    find(context, &id).await?.ok_or_else(|| QmpError::generic("Job not found"))
}

/// The block job of the argument `device`, or of another one.
async fn of_device(context: &Context, given: &mut Arguments, key: &str) -> Result<Job, QmpError> {
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
            "paused": job.is("paused"),
            "ready": job.is("ready"),
            "io-status": "ok",
            "auto-finalize": true,
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

/// `block-stream`: of the whole backing chain.
pub(super) async fn stream(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let why = "a stream copies the whole backing chain";
    ["base", "base-node", "bottom", "backing-file", "snapshot-file"]
        .iter()
        .try_for_each(|name| given.only(name, &[], why))?;
    start(context, given, "stream").await
}

/// `block-commit`: of the image of the disk into its backing file.
pub(super) async fn commit(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let (base, top) = (given.some_text("base")?, given.some_text("top")?);
    let (base_node, top_node) = (given.some_text("base-node")?, given.some_text("top-node")?);
    given.only("backing-file", &[], "no other image gets a backing file by a commit")?;
    let device = given.text("device")?;
    let name = context.disk(&device)?;
    let disk = context.running.find(&name);
    let disk = disk.ok_or_else(|| QmpError::no_node(&device, &device))?;
    let nodes = context.state.borrow().nodes_of(&name);
    let is_node = |depth: usize, node: &str| nodes.get(depth).is_some_and(|own| own.name == node);
    let is_top = top_node.is_none_or(|node| node == device || is_node(0, &node))
        && top.is_none_or(|top| disk.path().as_os_str() == top.as_str());
    let behind = disk.layer_at(1);
    let is_base = match (&base, &base_node) {
        (Some(_), Some(_)) => {
            return Err(QmpError::generic("'base' and 'base-node' are mutually exclusive"));
        }
        (Some(base), None) => behind.as_ref().is_none_or(|behind| behind.name == base),
        (None, Some(node)) => is_node(1, node),
        // QEMU commits to the end of the chain.
        (None, None) => disk.layer_at(2).is_none(),
    };
    if !(is_top && is_base) {
        let why = "a commit goes from the image of the disk into its backing file here: 'base' or 'base-node' names that";
        return Err(QmpError::generic(why));
    }
    given.put_back("device", &device);
    start(context, given, "commit").await
}

/// `blockdev-mirror`: to the disk of another node.
pub(super) async fn mirror(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let (device, target) = (given.text("device")?, given.text("target")?);
    let modes = ["top", "full", "none", "bitmap", "incremental"];
    let sync = given.needed_word("sync", &modes)?;
    let mode = given.word("copy-mode", &["background", "write-blocking"])?;
    given.only("replaces", &[], "the disk goes on in the target")?;
    // Changes are tracked in units of the job's own.
    given.some_unsigned("granularity")?;
    given.some_unsigned("buf-size")?;
    let mut job = JobArguments::take(&mut given)?;
    job.is_blocking = mode == Some("write-blocking");
    given.end()?;
    let (disk, target_disk) = (context.disk(&device)?, context.disk(&target)?);
    if disk == target_disk {
        return Err(QmpError::generic("Can't mirror node into itself"));
    }
    check_whole(context, &disk, sync)?;
    job.check(context).await?;
    let mode = if job.is_blocking { "write-blocking" } else { "background" };
    let params = json!({
        "kind": "mirror",
        "disk": disk,
        "target-disk": target_disk,
        "job": job.name,
        "speed": job.speed,
        "mode": mode,
    });
    start_all(context, std::slice::from_ref(&job), ("job.start", params)).await
}

/// Refuses to copy less than all of a disk.
pub(super) fn check_whole(context: &Context, disk: &str, sync: &str) -> Result<(), QmpError> {
    let disk = context.running.find(disk);
    let stands_alone = disk.is_some_and(|disk| disk.layer_at(1).is_none());
    match sync {
        "full" => Ok(()),
        "top" if stands_alone => Ok(()),
        _ => Err(QmpError::generic(format!(
            "Parameter 'sync' is not possible here: all of a disk is copied, and not '{sync}'"
        ))),
    }
}

/// Starts a job of one node.
async fn start(context: &Rc<Context>, mut given: Arguments, kind: &str) -> Returned {
    let device = given.text("device")?;
    given.flag("backing-mask-protocol", false)?;
    let job = JobArguments::take(&mut given)?;
    given.end()?;
    let disk = context.disk(&device)?;
    job.check(context).await?;
    let params = json!({ "kind": kind, "disk": disk, "job": job.name, "speed": job.speed });
    start_all(context, std::slice::from_ref(&job), ("job.start", params)).await
}

/// The arguments that all jobs have.
pub(super) struct JobArguments {
    /// The job's name.
    pub(super) name: String,
    /// Bytes a second; 0: no limit.
    pub(super) speed: u64,
    /// Whether it is listed no longer when it has ended.
    pub(super) auto_dismiss: bool,
    is_blocking: bool,
}

impl JobArguments {
    /// Takes them.
    pub(super) fn take(given: &mut Arguments) -> Result<Self, QmpError> {
        let name = given.some_text("job-id")?.unwrap_or_default();
        let speed = given.some_unsigned("speed")?.unwrap_or_default();
        for name in ["on-error", "on-source-error", "on-target-error"] {
            given.only(name, &[json!("report")], "a job that fails ends")?;
        }
        // There is no such node.
        given.some_text("filter-node-name")?;
        given.only("auto-finalize", &[json!(true)], "jobs finalize themselves")?;
        let auto_dismiss = given.flag("auto-dismiss", true)?;
        Ok(Self { name, speed, auto_dismiss, is_blocking: false })
    }

    /// Refuses a name that cannot be that of a new job.
    pub(super) async fn check(&self, context: &Context) -> Result<(), QmpError> {
        let Self { name, .. } = self;
        if !is_well_formed(name) {
            return Err(QmpError::generic(format!("Invalid job ID '{name}'")));
        }
        match find(context, name).await? {
            Some(_) => Err(QmpError::generic(format!("Job ID '{name}' already in use"))),
            None => Ok(()),
        }
    }
}

/// Starts jobs by one call.
pub(super) async fn start_all(
    context: &Rc<Context>,
    jobs: &[JobArguments],
    (method, params): (&str, Value),
) -> Returned {
    forget_dismissed(context);
    // Before they can end.
    for JobArguments { name, auto_dismiss, is_blocking, .. } in jobs {
        let (auto_dismiss, is_blocking) = (*auto_dismiss, *is_blocking);
        let traits = JobTraits { auto_dismiss, is_started: false, is_blocking };
        context.state.borrow_mut().jobs.insert(name.clone(), traits);
    }
    if let Err(error) = context.call(method, params).await {
        jobs.iter().for_each(|job| _ = context.state.borrow_mut().jobs.remove(&job.name));
        return Err(error);
    }
    for JobArguments { name, .. } in jobs {
        if let Some(traits) = context.state.borrow_mut().jobs.get_mut(name) {
            traits.is_started = true;
        }
        // Of one that has ended already all is told.
        if find(context, name).await?.is_some_and(|job| job.status() != "concluded") {
            context.events.tell_begin(name);
        }
    }
    Ok(json!({}))
}

/// Forgets jobs that were dismissed at the control socket.
fn forget_dismissed(context: &Context) {
    let listed = context.running.jobs().list();
    let mut state = context.state.borrow_mut();
    let pulls: Vec<_> = state.pulls.keys().cloned().collect();
    let is_listed =
        |name: &String| listed.iter().any(|job| job.name == *name) || pulls.contains(name);
    state.jobs.retain(|name, job| !job.is_started || is_listed(name));
}

/// `job-cancel`.
pub(super) async fn cancel(context: &Rc<Context>, given: Arguments) -> Returned {
    let job = of_id(context, given).await?;
    end(context, &job).await
}

/// `block-job-cancel`: a mirror that is ready is a copy of the disk then, with which the guest goes on.
pub(super) async fn cancel_block_job(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let is_forced = given.flag("force", false)?;
    let job = of_device(context, &mut given, "device").await?;
    if job.status() == "ready" && !is_forced {
        if job.0["kind"] == "mirror" {
            return begin_completion(context, &job, json!({ "job": job.name(), "copy": true }));
        }
        return Err(QmpError::generic(format!(
            "Job '{}' is ready, and ends here either with its result (block-job-complete) or without: set 'force' to true",
            job.name()
        )));
    }
    end(context, &job).await
}

async fn end(context: &Context, job: &Job) -> Returned {
    job.check("cancel", &["running", "paused", "ready"])?;
    if backups::end(context, job.name()).await? {
        return Ok(json!({}));
    }
    context.call("job.cancel", json!({ "job": job.name() })).await?;
    Ok(json!({}))
}

/// How long the end of jobs is waited for before the server ends, and how often it is looked at.
const MAX_END: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(5);

/// Ends all jobs without their results.
pub(super) async fn cancel_all(context: &Context) {
    for job in list(context).await.unwrap_or_default() {
        // It may have ended.
        let _ = end(context, &job).await;
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
pub(super) async fn complete(context: &Rc<Context>, given: Arguments) -> Returned {
    let job = of_id(context, given).await?;
    complete_ready(context, &job)
}

/// `block-job-complete`.
pub(super) async fn complete_block_job(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let job = of_device(context, &mut given, "device").await?;
    complete_ready(context, &job)
}

fn complete_ready(context: &Rc<Context>, job: &Job) -> Returned {
    job.check("complete", &["ready"])?;
    begin_completion(context, job, json!({ "job": job.name() }))
}

/// Has a job complete. Events tell when it has.
fn begin_completion(context: &Rc<Context>, job: &Job, params: Value) -> Returned {
    let (context, name) = (Rc::clone(context), job.name().to_owned());
    spawn_detached(async move {
        let Some(_inside) = context.gate.enter().await else { return };
        if let Err(why) = context.call("job.complete", params).await {
            tracing::warn!("the job {name} was asked to complete by QMP: {why:?}");
        }
    });
    Ok(json!({}))
}

/// `job-dismiss`.
pub(super) async fn dismiss(context: &Rc<Context>, given: Arguments) -> Returned {
    let job = of_id(context, given).await?;
    let_go(context, &job).await
}

/// `block-job-dismiss`.
pub(super) async fn dismiss_block_job(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let job = of_device(context, &mut given, "id").await?;
    let_go(context, &job).await
}

async fn let_go(context: &Context, job: &Job) -> Returned {
    job.check("dismiss", &["concluded"])?;
    let is_own = {
        let mut state = context.state.borrow_mut();
        state.pulls.remove(job.name()).is_some() || state.creations.remove(job.name()).is_some()
    };
    if is_own {
        forget(context, job.name());
        return Ok(json!({}));
    }
    context.call("job.dismiss", json!({ "job": job.name() })).await?;
    forget(context, job.name());
    Ok(json!({}))
}

/// `job-finalize`: no job waits for it.
pub(super) async fn finalize(context: &Rc<Context>, given: Arguments) -> Returned {
    of_id(context, given).await?.check("finalize", &[])?;
    Ok(json!({}))
}

/// `block-job-finalize`: no job waits for it.
pub(super) async fn finalize_block_job(context: &Rc<Context>, mut given: Arguments) -> Returned {
    of_device(context, &mut given, "id").await?.check("finalize", &[])?;
    Ok(json!({}))
}

/// `job-pause`.
pub(super) async fn pause(context: &Rc<Context>, given: Arguments) -> Returned {
    let job = of_id(context, given).await?;
    hold(context, &job).await
}

/// `block-job-pause`.
pub(super) async fn pause_block_job(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let job = of_device(context, &mut given, "device").await?;
    hold(context, &job).await
}

async fn hold(context: &Context, job: &Job) -> Returned {
    job.check("pause", &["running", "paused", "ready"])?;
    if job.is("paused") {
        return Err(QmpError::generic("Job is already paused"));
    }
    context.call("job.pause", json!({ "job": job.name() })).await?;
    context.events.tell_status(job.name(), "paused");
    Ok(json!({}))
}

/// `job-resume`.
pub(super) async fn resume(context: &Rc<Context>, given: Arguments) -> Returned {
    let job = of_id(context, given).await?;
    go_on(context, &job).await
}

/// `block-job-resume`.
pub(super) async fn resume_block_job(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let job = of_device(context, &mut given, "device").await?;
    go_on(context, &job).await
}

async fn go_on(context: &Context, job: &Job) -> Returned {
    job.check("resume", &["running", "paused", "ready"])?;
    if !job.is("paused") {
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
    let job = of_device(context, &mut given, "device").await?;
    job.check("set-speed", &["running", "paused", "ready"])?;
    if speed < 0 {
        return Err(QmpError::generic("Parameter 'speed' expects a non-negative value"));
    }
    context.call("job.set-speed", json!({ "job": job.name(), "speed": speed })).await?;
    Ok(json!({}))
}
