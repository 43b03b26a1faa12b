//! The side file of a raw disk, which holds its bitmaps: it is made with the first bitmap that is
//! added while the disk is served.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use blockhouse_disk::{Access, ImageDisk, ImageFormat};
use blockhouse_engine::sleep;
use blockhouse_images::{
    ImageOptions, Secrets, VOUCHER_RENEWAL, lacks_side_file, start_recording, stop_recording,
};

use super::Running;
use super::disk::RunningDisk;
use crate::running::open::image_options;

/// Makes a side file for a raw disk that has none. Returns how long the disk's changes were held
/// off; `None` for other disks, which stay as they are. The caller has claimed the disk.
///
/// # Errors
/// A job works on the disk; the sandbox forbids files beside the image; the errors of
/// [`start_recording`].
pub(crate) async fn ensure_side_file(
    running: &Running,
    disk: &RunningDisk,
) -> Result<Option<Duration>> {
    if !lacks_side_file(disk.disk.image()) {
        return Ok(None);
    }
    // The disk must have no job, because a mirror would replace the image.
    running.jobs.check_free(disk.name())?;
    let (path, options) = opened_as_raw(running, disk)?;
    running.sandbox().check(&path)?;
    let pause = start_recording(&disk.disk, &path, &options).await.with_context(|| {
        format!("the raw disk {:?} cannot have bitmaps while it is served", disk.name())
    })?;
    keep_vouching(running, &disk.disk);
    tracing::info!(
        "{}: its changes are recorded beside it; they were held off for {:?}",
        path.display(),
        pause.length
    );
    Ok(Some(pause.length))
}

/// Removes the side file of a disk without bitmaps, after its first bitmap could not be added, or
/// was removed again. A failure is logged, and the disk keeps its side file.
pub(crate) async fn remove_empty_side_file(running: &Running, disk: &RunningDisk) {
    let taken = async {
        let (path, options) = opened_as_raw(running, disk)?;
        anyhow::Ok(stop_recording(&disk.disk, &path, &options).await?)
    };
    if let Err(error) = taken.await {
        tracing::error!("{}: its side file stays: {error:#}", disk.name());
    }
}

/// The present path and options of a raw disk's image.
fn opened_as_raw(running: &Running, disk: &RunningDisk) -> Result<(PathBuf, ImageOptions)> {
    let setup = &disk.setup;
    let (path, cache) = match disk.moved() {
        Some(moved) => (moved.path, moved.cache),
        None => (setup.path.clone(), setup.cache),
    };
    let usual = image_options(setup, &running.state_use(setup)?, Secrets::of(&disk.disk))?;
    let format = Some(ImageFormat::Raw);
    Ok((path, ImageOptions { format, cache, data_file: None, ..usual }))
}

/// Renews the voucher of a raw disk's side file periodically, as long as the disk is open.
pub(crate) fn keep_vouching(running: &Running, disk: &Arc<ImageDisk>) {
    let Some(handle) = running.loops.first().filter(|_| vouches(disk)) else {
        return;
    };
    let disk = Arc::downgrade(disk);
    // The task ends with the disk, with the writable side file, or with the loop.
    drop(handle.spawn(move || async move {
        loop {
            sleep(VOUCHER_RENEWAL).await;
            let Some(disk) = disk.upgrade().filter(|disk| vouches(disk)) else {
                return;
            };
            disk.image().renew_voucher().await;
        }
    }));
}

fn vouches(disk: &ImageDisk) -> bool {
    disk.image().has_side_file() && disk.image().access() == Access::ReadWrite
}
