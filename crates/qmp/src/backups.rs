//! `blockdev-backup`: jobs that copy a disk's content at one moment, and, with `sync` `none`,
//! frozen disks that clients read.
//!
//! With `sync` `none` the target is a node whose backing file is the disk's node. The target's
//! image stays empty: exports of the target's node serve the frozen disk of a `backup` of this
//! server, whose scratch file is in the folder of the target's image.

use std::rc::Rc;

use blockhouse_engine::spawn_detached;
use serde_json::{Value, json};

use super::arguments::Arguments;
use super::bitmaps::Changes;
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::starting::{JobArguments, check_unused, check_whole, start_all};
use super::state::Pull;

/// A requested backup.
pub(super) struct Backup {
    job: JobArguments,
    /// An element of `disk.transaction`'s `backups`.
    params: Value,
    pull: Option<Pull>,
}

/// `blockdev-backup`.
pub(super) async fn start(context: &Rc<Context>, given: Arguments) -> Returned {
    let backup = take(context, &Changes::default(), given).await?;
    begin(context, Vec::new(), vec![backup]).await
}

/// Begins backups, and changes bitmaps, at one moment.
pub(super) async fn begin(
    context: &Rc<Context>,
    changes: Vec<Value>,
    backups: Vec<Backup>,
) -> Returned {
    let params: Vec<_> = backups.iter().map(|backup| backup.params.clone()).collect();
    let (mut jobs, mut pulls) = (Vec::new(), Vec::new());
    for Backup { job, pull, .. } in backups {
        pulls.extend(pull.map(|pull| (job.name.clone(), pull)));
        jobs.push(job);
    }
    jobs.iter().try_for_each(|job| check_unused(context, &job.name))?;
    // Recorded before the backups are listed.
    let names: Vec<_> = pulls.iter().map(|(name, _)| name.clone()).collect();
    context.state.borrow_mut().pulls.extend(pulls);
    let call = ("disk.transaction", json!({ "bitmaps": changes, "backups": params }));
    let started = start_all(context, &jobs, call).await;
    if started.is_err() {
        names.iter().for_each(|name| _ = context.state.borrow_mut().pulls.remove(name));
    }
    started
}

/// Takes the arguments of a backup. `changes` are changes of bitmaps that are made before it
/// begins.
pub(super) async fn take(
    context: &Context,
    changes: &Changes,
    mut given: Arguments,
) -> Result<Backup, QmpError> {
    let (device, target) = (given.text("device")?, given.text("target")?);
    let modes = ["top", "full", "none", "bitmap", "incremental"];
    let sync = given.needed_word("sync", &modes)?;
    let bitmap = given.some_text("bitmap")?;
    let mode = given.word("bitmap-mode", &["on-success", "never", "always"])?;
    given.only("compress", &[json!(false)], "a backup has the clusters of its target")?;
    given.only("discard-source", &[json!(false)], "the disk goes on as it is")?;
    given.some_object("x-perf")?.iter_mut().for_each(|perf| _ = perf.rest());
    let job = JobArguments::take(&mut given)?;
    given.end()?;
    let (disk, target_disk) = (context.disk(&device)?, context.disk(&target)?);
    let is_synced = check_bitmap(context, changes, &disk, (sync, bitmap.as_deref(), mode)).await?;
    if disk == target_disk {
        return Err(QmpError::generic("Source and target cannot be the same"));
    }
    context.check_alone(&device, &disk)?;
    job.check(context).await?;
    let mut params = json!({ "disk": disk, "name": job.name });
    if sync == "none" {
        let pull = pull(context, (disk, device), (target_disk, target), &job)?;
        let image = context.running.disks().find(&pull.target).map(|disk| disk.path());
        params["scratch"] = json!(image.as_deref().and_then(|path| path.parent()));
        return Ok(Backup { job, params, pull: Some(pull) });
    }
    match &bitmap {
        Some(bitmap) => params["bitmap"] = bitmap.as_str().into(),
        None => check_whole(context, &disk, sync)?,
    }
    params["sync-bitmap"] = is_synced.into();
    params["target-disk"] = target_disk.into();
    params["speed"] = job.speed.into();
    Ok(Backup { job, params, pull: None })
}

/// Checks `bitmap` and `bitmap-mode`. Returns whether the bitmap is synced: after the backup it has
/// the changes since the backup's moment.
async fn check_bitmap(
    context: &Context,
    changes: &Changes,
    disk: &str,
    (sync, bitmap, mode): (&str, Option<&str>, Option<&str>),
) -> Result<bool, QmpError> {
    let refuse = |why: String| Err(QmpError::generic(why));
    let is_of_bitmap = ["bitmap", "incremental"].contains(&sync);
    let Some(bitmap) = bitmap else {
        return match (is_of_bitmap, mode) {
            (true, _) => refuse(format!("must provide a valid bitmap name for '{sync}' sync mode")),
            (false, Some(_)) => {
                refuse("Cannot specify bitmap sync mode without a bitmap".to_owned())
            }
            (false, None) => Ok(false),
        };
    };
    if sync == "incremental" && mode.is_some_and(|mode| mode != "on-success") {
        return refuse(
            "Bitmap sync mode must be 'on-success' when using sync mode 'incremental'".to_owned(),
        );
    }
    if !changes.exists(context, disk, bitmap).await? {
        return refuse(format!("Bitmap '{bitmap}' could not be found"));
    }
    let mode = match (mode, sync) {
        (Some(mode), _) => mode,
        (None, "incremental") => "on-success",
        (None, _) => {
            return refuse("Bitmap sync mode must be given when providing a bitmap".to_owned());
        }
    };
    match (is_of_bitmap, mode) {
        (true, "on-success") => Ok(true),
        (true, "never") => Ok(false),
        (true, mode) => refuse(format!(
            "Parameter 'bitmap-mode' is not possible here: a bitmap is synced when the backup is complete, and not '{mode}'"
        )),
        (false, _) if sync == "none" => {
            refuse("sync mode 'none' does not produce meaningful bitmap outputs".to_owned())
        }
        (false, "never") => refuse(format!(
            "Bitmap sync mode 'never' has no meaningful effect when combined with sync mode '{sync}'"
        )),
        (false, _) => refuse(format!(
            "Parameter 'bitmap' is not possible here with sync '{sync}': clear it in the transaction that begins the backup"
        )),
    }
}

/// A backup for clients of the target's node.
fn pull(
    context: &Context,
    (disk, device): (String, String),
    (target, node): (String, String),
    job: &JobArguments,
) -> Result<Pull, QmpError> {
    let state = context.state.borrow();
    if state.over.get(state.top_of(&target)) != Some(&device) {
        return Err(QmpError::generic(format!(
            "Node '{node}' does not stand on '{device}': add it with 'backing': '{device}' for a backup with sync 'none'"
        )));
    }
    if state.pull_to(&target).is_some() {
        return Err(QmpError::generic(format!(
            "Node '{node}' is busy: block device is in use by block job: backup"
        )));
    }
    let frozen = format!("{disk}@{}", job.name);
    Ok(Pull { disk, target, frozen, end: None })
}

/// Ends a backup that clients read. Returns false if no such backup has this name.
pub(super) async fn end(context: &Context, name: &str) -> Result<bool, QmpError> {
    if !context.state.borrow().pulls.contains_key(name) {
        return Ok(false);
    }
    // `BackupEnded` concludes the job.
    context.call("backup.end", json!({ "backup": name })).await.map(|_| true)
}

/// Concludes a backup that clients read, if it runs; `error` says why it has failed.
pub(super) fn conclude(context: &Rc<Context>, name: &str, error: Option<String>) {
    let mut state = context.state.borrow_mut();
    let auto_dismisses = state.auto_dismisses(name);
    let Some(pull) = state.pulls.get_mut(name).filter(|pull| pull.end.is_none()) else {
        return;
    };
    pull.end = Some(error.clone());
    let size = context.running.disks().find(&pull.disk).map_or(0, |disk| disk.disk.size());
    if auto_dismisses {
        state.pulls.remove(name);
    }
    drop(state);
    let mut data =
        json!({ "device": name, "type": "backup", "len": size, "offset": 0, "speed": 0 });
    let event = if error.is_some() { "BLOCK_JOB_COMPLETED" } else { "BLOCK_JOB_CANCELLED" };
    if let Some(error) = error {
        data["error"] = error.into();
        release(context, name.to_owned());
    }
    let events = &context.events;
    events.tell_begin(name);
    events.tell_status(name, "aborting");
    events.tell(event, data);
    events.tell_status(name, "concluded");
    events.forget_job(name);
    if auto_dismisses {
        context.forget_job(name);
    }
}

/// Ends a backup that has failed, so that it no longer uses a disk or a file.
fn release(context: &Rc<Context>, name: String) {
    let context = Rc::clone(context);
    spawn_detached(async move {
        let Some(_inside) = context.gate.enter().await else { return };
        // The backup may have been ended at the control socket.
        let _ = context.call("backup.end", json!({ "backup": name })).await;
    });
}
