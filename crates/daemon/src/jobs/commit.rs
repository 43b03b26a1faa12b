//! Commits of served disks: copies an overlay's data into its backing file, on which the guest then
//! continues.
//!
//! After a crash: as long as there is no record beside the overlay (`images/moved_record`), the
//! overlay is the disk, over a backing file that has some of the overlay's data and is not a
//! consistent disk by itself. The record is written durably after all data is durable in the
//! backing file, and before the guest writes to the backing file: from then on the backing file
//! alone is the disk. If the commit then fails, the record is removed.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_core::Storage;
use blockhouse_disk::ImageDisk;
use blockhouse_engine::LoopClock;
use blockhouse_images::{
    LeftFiles, Secrets, StateUse, forget_moved, is_forked, keep_state, open_base, record_committed,
    record_moved,
};
use blockhouse_jobs::{CopyMode, JobEnd, Mirror};

use super::commit_setup::CommitSetup;
use super::layer_commit::start_layer_commit;
use super::{JobSetup, RunningJob, run_job};
use crate::running::open::image_options;
use crate::running::recording::keep_vouching;
use crate::running::rollbacks::check_nobody_stands;
use crate::running::{Running, RunningDisk};

/// Starts a commit. When this returns, the backing file is open for writing and has the disk's
/// size, and the job is listed.
///
/// # Errors
/// There is no such disk, it is read-only or has a job, or its backing file cannot be written to,
/// because others use it or it is longer. The image is encrypted, its backing file is not, and the
/// setup does not allow that. For layers, as [`start_layer_commit`].
pub(crate) async fn start_commit(
    running: &Running,
    setup: JobSetup,
    images: CommitSetup,
) -> Result<Arc<RunningJob>> {
    let claimed = running.claim_disk(&setup.disk).await?;
    let source = Arc::clone(&claimed.disk);
    if source.setup.is_read_only() {
        bail!(
            "the disk {:?} is read-only: commit its image with 'blockhouse commit', or open it for writing",
            setup.disk
        );
    }
    running.check_free(&setup.disk)?;
    if let Some(top) = images.layer(&source).map(Path::to_owned) {
        return start_layer_commit(running, source, setup, &top, images).await;
    }
    images.check_for_image(&source)?;
    if !images.decrypt {
        check_encryption(&source)?;
    }
    let files = if images.delete {
        check_nobody_stands(running, &source, 0..=0)?;
        Some(LeftFiles::of_image(&source.disk).await?)
    } else {
        None
    };
    let state = running.state_use(&source.setup)?;
    // A name that is taken fails the job before its base is open for writing.
    let name = running.jobs().new_name(setup.name, "commit")?;
    let base = base_of(running, &source).await?;
    let target = (base.image().image_name().to_owned(), None);
    let of = (&*setup.disk, &source.disk);
    let (job, handle) = running.jobs().register_as(&name, "commit", of, target)?;
    job.control.set_speed(setup.speed);
    let mode = setup.mode;
    run_job(&handle, &job, running.events(), async move |job: &RunningJob| {
        let end = commit(job, &source, base, mode, state).await;
        if let (JobEnd::Completed { .. }, Some(files)) = (&end, files) {
            files.remove_beside(&source.disk).await;
        }
        end
    });
    Ok(job)
}

/// The backing file of a disk, opened for writing and made as long as the disk.
async fn base_of(running: &Running, source: &RunningDisk) -> Result<Arc<ImageDisk>> {
    let disk = &source.disk;
    if let Some(base) = disk.jobs().base() {
        disk.jobs().settle_base().await?;
        record_begun(base, source)?;
        return fit(base, disk.size()).await.map(|()| Arc::clone(base));
    }
    if let Some(behind) = disk.image().layer_at(1) {
        check_size(behind.name, behind.size, disk.size())?;
        running.sandbox().check_image(Path::new(behind.name))?;
    }
    check_nobody_stands(running, source, 1..=1)?;
    let options = image_options(&source.setup, &StateUse::Off, Secrets::of(disk))?;
    let (base, locks) = open_base(disk, &source.path(), options).await?;
    // A change of the base's size is the first change. Otherwise it begins after the waits below,
    // so that the layer still has the disk's content at the fork if these fail.
    if base.size() < disk.size() {
        record_begun(&base, source)?;
    }
    let attached = match fit(&base, disk.size()).await {
        Ok(()) => disk.jobs().attach_base(Arc::clone(&base)).await.map_err(Into::into),
        Err(error) => Err(error),
    };
    if let Err(error) = attached {
        // Only the first error is reported.
        let _ = base.close().await;
        return Err(error);
    }
    locks.keep();
    keep_vouching(running, &base);
    disk.jobs().settle_base().await?;
    record_begun(&base, source)?;
    Ok(base)
}

/// Records that the base no longer has the disk's content at the fork, if it is the layer of one.
fn record_begun(base: &ImageDisk, source: &RunningDisk) -> Result<()> {
    let layer = Path::new(base.image().image_name());
    if is_forked(layer) {
        record_committed(layer, &source.path())?;
    }
    Ok(())
}

/// Refuses to store an encrypted image's data in an unencrypted backing file.
fn check_encryption(source: &RunningDisk) -> Result<()> {
    let Some(behind) = source.disk.image().layer_at(1) else { return Ok(()) };
    if source.disk.image().is_encrypted() && !behind.is_encrypted {
        bail!(
            "{}: is encrypted, and its backing file {} is not: what is committed would be stored there in the clear; if that \
             is meant, say decrypt ('blockhouse ctl SOCKET commit DISK --decrypt')",
            source.disk.name(),
            behind.name
        );
    }
    Ok(())
}

fn check_size(base: &str, size: u64, wanted: u64) -> Result<()> {
    if size > wanted {
        bail!(
            "{base}: has {size} bytes, more than the disk, which has {wanted}; the disk would get longer: make it as long \
             first ('blockhouse ctl SOCKET resize')"
        );
    }
    Ok(())
}

/// Makes the backing file as long as the disk.
async fn fit(base: &ImageDisk, size: u64) -> Result<()> {
    check_size(base.image().image_name(), base.size(), size)?;
    if base.size() < size {
        base.resize(size).await?;
    }
    Ok(())
}

/// Runs a commit to its end.
async fn commit(
    job: &RunningJob,
    source: &RunningDisk,
    base: Arc<ImageDisk>,
    mode: CopyMode,
    state: StateUse,
) -> JobEnd {
    let disk = Arc::clone(&source.disk);
    // There is no record if the image is on another server.
    let overlay = disk.image().file().map(|file| PathBuf::from(file.name()));
    let (kept, name) = (overlay.clone(), job.name.clone());
    let layer = PathBuf::from(base.image().image_name());
    let was_forked = is_forked(&layer);
    let forget = move || {
        let forgotten = kept.iter().try_for_each(|image| {
            forget_moved(image)?;
            if was_forked { record_committed(&layer, image) } else { Ok(()) }
        });
        forgotten.unwrap_or_else(|error| tracing::error!("{name}: {error}"));
    };
    let target = Arc::clone(&base);
    let record = move || {
        let (base, overlay, state) = (Arc::clone(&target), overlay.clone(), state.clone());
        Box::pin(async move {
            base.image().settle().await?;
            // The base may be the layer of the fork that created the overlay, and now becomes the
            // disk again. Its record is removed first, because two records that name each other
            // would leave no disk.
            if overlay.is_some() {
                forget_moved(Path::new(base.image().image_name()))?;
            }
            overlay.iter().try_for_each(|image| record_moved(image, base.image().image_name()))?;
            // The state file is created before the guest writes to the base, so that acknowledged
            // writes survive a crash of the process as before.
            keep_state(&base, &PathBuf::from(base.name()), &state).await;
            Ok(())
        }) as _
    };
    let (control, clock) = (Arc::clone(&job.control), Rc::new(LoopClock::new()));
    let end = match Mirror::commit(Arc::clone(&disk), mode, control, clock) {
        Ok(commit) => commit.before_switch(record).source_kept(forget).run().await,
        Err(error) => JobEnd::Failed(error.to_string()),
    };
    match end {
        JobEnd::Completed { .. } => disk.jobs().unlock_former(),
        // The base is settled, so that a later crash does not leave it marked as open.
        JobEnd::Cancelled | JobEnd::Failed(_) => {
            let settled = base.image().settle().await;
            settled.unwrap_or_else(|error| tracing::warn!("{}: {error}", job.name));
        }
    }
    end
}
