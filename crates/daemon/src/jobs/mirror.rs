//! Mirrors of served disks.
//!
//! After a crash: while the target has its mark (`blockhouse_disk::mark_incomplete`), the source is
//! the disk. Before the mark is removed, a *record* with the target's name is written durably
//! beside the source's image (`images/moved_record`). From then on opening the source is refused
//! with a hint to the target; the target can be opened once its mark is removed. If the mirror does
//! not complete, the record is removed.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use blockhouse_engine::LoopClock;
use blockhouse_images::{check_apart, forget_moved, record_moved};
use blockhouse_jobs::{Completion, CopyMode, JobEnd, Mirror, MirrorOptions};

use super::target::{Target, TargetSetup, check, remove};
use super::{JobSetup, RunningJob, run_job};
use crate::running::claims::{Claim, Name};
use crate::running::{Running, RunningDisk};

/// The target of a mirror.
#[derive(Clone, Debug)]
pub(crate) enum MirrorTarget {
    /// An image that is not open elsewhere.
    Image(TargetSetup),
    /// A disk of this server, by its name.
    Disk(String),
}

/// Starts a mirror. When this returns, the target is open and the job is listed.
///
/// # Errors
/// There is no such disk, it is read-only or has a job, or the target cannot be used.
pub(crate) async fn start_mirror(
    running: &Running,
    setup: JobSetup,
    target: MirrorTarget,
) -> Result<Arc<RunningJob>> {
    let _claimed = claim_mirror(running, &setup.disk, &target).await;
    let source = running.disks().get(&setup.disk)?;
    if source.setup.is_read_only() {
        bail!("the disk {:?} is read-only: copy its image with 'blockhouse convert'", setup.disk);
    }
    running.check_free(&setup.disk)?;
    let (target, names) = open_target(running, &source, target).await?;
    let apart = check_apart(&target.disk, &source.disk);
    let checked = apart.and_then(|()| source.disk.check_replacement(target.disk.image()));
    let taken = names.1.clone().map(|disk| (Arc::clone(running.disks()), disk));
    let registered = match checked {
        Ok(()) => running.jobs().register(setup.name, "mirror", (&setup.disk, &source.disk), names),
        Err(error) => Err(error.into()),
    };
    let (job, handle) = match registered {
        Ok(registered) => registered,
        Err(error) => {
            if taken.is_none() {
                target.give_up().await;
            }
            return Err(error);
        }
    };
    job.control.set_speed(setup.speed);
    let mode = setup.mode;
    run_job(&handle, &job, running.events(), async move |job: &RunningJob| {
        let switched = move || taken.iter().for_each(|(list, disk)| list.forget(disk));
        copy(job, &source, target, mode, switched).await
    });
    Ok(job)
}

async fn claim_mirror<'a>(running: &'a Running, disk: &str, target: &MirrorTarget) -> Claim<'a> {
    let mut names = vec![Name::Disk(disk.to_owned())];
    if let MirrorTarget::Disk(target) = target {
        names.push(Name::Disk(target.clone()));
    }
    running.claims().claim(names).await
}

/// The target, its name, and the name of its disk if it is a disk of this server.
async fn open_target(
    running: &Running,
    source: &RunningDisk,
    target: MirrorTarget,
) -> Result<(Target, (String, Option<String>))> {
    match target {
        MirrorTarget::Image(target) => {
            running.sandbox().check_image(&target.location)?;
            let name = target.location.display().to_string();
            running.jobs().check_target_free(&name)?;
            let state = running.state_use(&source.setup)?;
            let target = target.open(&source.setup, source.disk.size(), state).await?;
            Ok((target, (name, None)))
        }
        MirrorTarget::Disk(name) => {
            let disk = check_target_disk(running, &name, source.name())?;
            let path = disk.path().display().to_string();
            check(&disk.disk, source.disk.size())?;
            let disk = Arc::clone(&disk.disk);
            Ok((Target { disk, is_zero: false, created: None }, (path, Some(name))))
        }
    }
}

/// The disk of this name, if a job may write to it.
pub(crate) fn check_target_disk(
    running: &Running,
    name: &str,
    source: &str,
) -> Result<Arc<RunningDisk>> {
    if name == source {
        bail!("the disk {name:?} cannot be copied to itself");
    }
    let disk = running.disks().get(name)?;
    running.check_free(name)?;
    if disk.setup.is_read_only() {
        bail!("the disk {name:?} is read-only, and cannot be written to");
    }
    if let Some(export) = running.exports().of_disk(name).first() {
        bail!(
            "the disk {name:?} is served at {}, and all that is in it would be lost; remove its exports first",
            export.address
        );
    }
    Ok(disk)
}

/// Asks a job to complete, and waits for its end. Returns for how long the guest's changes were
/// held off. When this returns, the job's result is durable.
///
/// # Errors
/// There is no such job; it fails or is cancelled; or it cannot complete yet and continues.
pub(crate) async fn complete_job(
    running: &Running,
    name: &str,
    completion: Completion,
) -> Result<Duration> {
    let job = running.jobs().find(name)?;
    if completion != Completion::Switch && job.kind != "mirror" {
        bail!("the job {name:?} is a {}: only a mirror can be completed so", job.kind);
    }
    // A backup is never the disk's new image.
    let completion = if job.kind == "backup" { Completion::Copy } else { completion };
    let postponed = job.control.postponements();
    // A job that completes by itself may have done so already.
    let is_early = || job.completes_by_itself() && job.status() == "completed";
    if !job.control.complete(completion) && !is_early() {
        bail!("the job {name:?} is {}, and cannot be completed so", job.status());
    }
    match job.control.ended_or_postponed(postponed).await {
        Ok(JobEnd::Completed { pause, .. }) => Ok(pause),
        Ok(JobEnd::Cancelled) => bail!("the job {name:?} was cancelled"),
        Ok(JobEnd::Failed(error)) => bail!("the job {name:?} failed: {error}"),
        Err(why) => bail!("the job {name:?} cannot complete yet, and goes on: {why}"),
    }
}

/// Runs a mirror to its end, then closes or removes the target, or unlocks the former image,
/// according to the outcome.
async fn copy(
    job: &RunningJob,
    source: &RunningDisk,
    target: Target,
    mode: CopyMode,
    switched: impl Fn() + 'static,
) -> JobEnd {
    let Target { disk: target, is_zero, created } = target;
    let disk = Arc::clone(&source.disk);
    let options = MirrorOptions { is_target_zero: is_zero, mode, ..MirrorOptions::default() };
    let (control, clock) = (Arc::clone(&job.control), Rc::new(LoopClock::new()));
    // The record is for the disk's present image, because the disk may have been moved before. It
    // is not for a side file, because users open the image.
    let image = disk.image().file().map(|_| PathBuf::from(disk.image().image_name()));
    let (recorded, name) = (image.clone(), job.target.clone());
    let record = move || recorded.iter().try_for_each(|image| record_moved(image, &name));
    let (kept, name) = (image.clone(), job.name.clone());
    let forget = move || {
        let forgotten = kept.iter().try_for_each(|image| forget_moved(image));
        forgotten.unwrap_or_else(|error| tracing::error!("{name}: {error}"));
    };
    let mirror = Mirror::new(Arc::clone(&disk), Arc::clone(&target), options, control, clock);
    // The target may be a former image of the disk with a record that names the present source. The
    // target's mark prevents opening it from now on, so its record is removed: after a crash the
    // two images' records would otherwise name each other.
    let former = target.image().file().map(|_| PathBuf::from(&job.target));
    let marked = move || former.iter().try_for_each(|image| forget_moved(image));
    let end = match mirror {
        Ok(mirror) => {
            let mirror = mirror.marked(marked).before_completion(record).source_kept(forget);
            mirror.switched(switched).run().await
        }
        Err(error) => JobEnd::Failed(error.to_string()),
    };
    let completion = match &end {
        JobEnd::Completed { completion, .. } => Some(*completion),
        JobEnd::Cancelled | JobEnd::Failed(_) => None,
    };
    if completion != Some(Completion::Switch) && job.target_disk.is_none() {
        let closed = target.close().await;
        closed.unwrap_or_else(|error| tracing::warn!("{}: {error}", job.name));
    }
    match completion {
        None => remove(created.as_deref()),
        Some(Completion::Copy) => {}
        Some(Completion::Switch | Completion::HandOver) => disk.jobs().unlock_former(),
    }
    end
}
