//! Streams of served disks. A stream copies the backing file's data into an overlay, and detaches
//! the backing file. With a base, it copies only the data of the layers above the base, and makes
//! the base the backing file.
//!
//! After a kill at any moment, the overlay is still the disk. While its header names the backing
//! file, the overlay needs that file, and another stream continues the work.

use std::num::NonZeroU64;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_disk::ImageDisk;
use blockhouse_engine::{LoopClock, spawn_detached, timeout};
use blockhouse_images::{LeftFiles, find_further_base, note_passed_over};
use blockhouse_jobs::{CopyMode, JobEnd, Stream};

use super::commit_setup::check_base_is_read;
use super::{JobSetup, MAX_TIDY_TIME, RunningJob, run_job};
use crate::running::rollbacks::check_nobody_stands;
use crate::running::{Running, RunningDisk};

/// The reaction of a stream to a range that it cannot fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnFailure {
    /// The stream fails.
    Fail,
    /// The stream retries after a pause, see [`Stream::try_again`].
    TryAgain,
}

/// Starts the stream that a disk's setup requests, if its image still has a backing file. An error
/// is only logged: the disk is served anyway.
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

/// Starts a stream. It keeps `base`, a file further down the backing chain. With `delete`, it
/// removes the files of the layers above `base` at the end.
///
/// # Errors
/// There is no such disk; it is read-only or has a job; its image has no backing file, lacks this
/// base, or has snapshots; other disks use layers whose files are to be removed.
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
    if let Some(base) = &base {
        // `left_out` is set only once.
        let _ = job.left_out.set(1..base.steps());
    }
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

/// Releases detached backing files, and removes `files`, when the last read from them has ended.
/// Usually no read is in flight, so this happens at once.
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
