//! Streams of served disks: copies the backing file's data into an overlay, and detaches the
//! backing file; or copies only the data of the layers above a base, and makes the base the backing
//! file.
//!
//! After a kill: the overlay is the disk at any moment. As long as its header names the backing
//! file, it needs that file, and another stream continues the work.

use std::num::NonZeroU64;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_disk::{ImageDisk, LeftFiles, find_further_base, note_passed_over};
use blockhouse_engine::{LoopClock, spawn_detached, timeout};
use blockhouse_jobs::{CopyMode, JobEnd, Stream};

use super::commit_setup::check_base_is_read;
use super::{JobSetup, MAX_TIDY_TIME, RunningJob, run_job};
use crate::running::rollbacks::check_nobody_stands;
use crate::running::{Running, RunningDisk};

/// The treatment of ranges that cannot be filled by a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnFailure {
    /// It fails.
    Fail,
    /// It goes on after a pause, see [`Stream::try_again`].
    TryAgain,
}

/// Starts the stream that a disk's description asks for, if its image has a backing file still.
/// Why it cannot be started is logged: the disk is served all the same.
pub(crate) async fn begin_prefetch(running: &Running, disk: &RunningDisk) {
    let Some(speed) = disk.setup.prefetch.filter(|_| disk.disk.image().backing_file().is_some())
    else {
        return;
    };
    let setup = JobSetup {
        name: None,
        disk: disk.name().to_owned(),
        mode: CopyMode::Auto,
        speed: NonZeroU64::new(speed),
    };
    if let Err(error) = start_stream(running, setup, (None, false), OnFailure::TryAgain).await {
        tracing::error!("{}: cannot be filled from its backing file: {error:#}", disk.name());
    }
}

/// Starts a stream; down to `base`, a backing file further down the chain, which is kept. The files
/// of the layers before that are removed in the end where `delete` says so.
///
/// # Errors
/// There is no such disk, it is read-only or has a job, or its image has no backing file, or not
/// this base, or snapshots; other disks stand on layers whose files are to be removed.
pub(crate) async fn start_stream(
    running: &Running,
    setup: JobSetup,
    (base, delete): (Option<&Path>, bool),
    on_failure: OnFailure,
) -> Result<Arc<RunningJob>> {
    let claimed = running.claim_disk(&setup.disk).await?;
    let source = Arc::clone(&claimed.disk);
    if source.setup.is_read_only() {
        bail!("the disk {:?} is read-only: open it for writing", setup.disk);
    }
    running.check_free(&setup.disk)?;
    let disk = Arc::clone(&source.disk);
    check_base_is_read(&disk, &setup.disk)?;
    let base = base.map(|base| find_further_base(&disk, base)).transpose()?;
    let files = match base.as_ref().filter(|_| delete) {
        Some(base) => {
            check_nobody_stands(running, &source, 1..=base.steps() - 1)?;
            Some(LeftFiles::of(&disk, base).await?)
        }
        None if delete => bail!("the files of a whole chain are not removed: say base"),
        None => None,
    };
    let guard = disk.jobs().begin_populating().await?;
    let target = disk.name().to_owned();
    let (job, handle) = running.jobs().register(
        setup.name,
        "stream",
        (&setup.disk, &source.disk),
        (target, None),
    )?;
    job.control.set_speed(setup.speed);
    run_job(&handle, &job, running.events(), async move |job: &RunningJob| {
        let (control, clock) = (Arc::clone(&job.control), Rc::new(LoopClock::new()));
        let stream = Stream::new(Arc::clone(&disk), guard, control, clock);
        let stream = match on_failure {
            OnFailure::Fail => stream,
            OnFailure::TryAgain => stream.try_again(),
        };
        let stream = match base {
            Some(base) => stream.down_to(base),
            None => stream,
        };
        let end = stream.run().await;
        if matches!(end, JobEnd::Completed { .. }) {
            if let Err(error) = note_passed_over(&disk) {
                tracing::warn!("{}: {error}", disk.name());
            }
            release_detached(disk, files).await;
        }
        end
    });
    Ok(job)
}

/// Gives back what is held of backing files that were detached, and removes `files` of them, when
/// the last read there has ended: at once, mostly.
pub(super) async fn release_detached(disk: Arc<ImageDisk>, files: Option<LeftFiles>) {
    let release = move |disk: &ImageDisk| {
        disk.jobs().release_detached();
        files.into_iter().for_each(LeftFiles::remove);
    };
    if timeout(MAX_TIDY_TIME, disk.jobs().detached_reads_ended()).await.is_some() {
        return release(&disk);
    }
    tracing::warn!(
        "{}: its former backing file stays open until the reads there have ended",
        disk.name()
    );
    spawn_detached(async move {
        disk.jobs().detached_reads_ended().await;
        release(&disk);
    });
}
