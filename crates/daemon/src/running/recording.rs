//! Raw disks that record their changes from the first bitmap on that they get while they are
//! served.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use blockhouse_disk::{
    Access, ImageDisk, ImageFormat, ImageOptions, VOUCHER_RENEWAL, start_recording, stop_recording,
};
use blockhouse_engine::sleep;

use super::Running;
use super::disk::RunningDisk;
use crate::running::open::image_options;

/// Gives a disk, which is claimed, a place for bitmaps, if it is a raw file that has none: for how
/// long its changes were held off. `None` for other disks, which stay as they are.
///
/// # Errors
/// A job works on the disk; the sandbox does not let the server make files beside the image; as
/// [`start_recording`].
pub(crate) async fn make_room_for_bitmaps(
    running: &Running,
    disk: &RunningDisk,
) -> Result<Option<Duration>> {
    if !disk.disk.image().lacks_sidecar() {
        return Ok(None);
    }
    // A mirror is about to put another image in its place.
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

/// Takes that place away again, because the first bitmap could not be added, or is removed with
/// what it was for. A failure is logged: the disk goes on with the place.
pub(crate) async fn take_room_back(running: &Running, disk: &RunningDisk) {
    let taken = async {
        let (path, options) = opened_as_raw(running, disk)?;
        anyhow::Ok(stop_recording(&disk.disk, &path, &options).await?)
    };
    if let Err(error) = taken.await {
        tracing::error!("{}: the place for its bitmaps stays: {error:#}", disk.name());
    }
}

/// Where the image of a raw disk is now, and how it is opened.
fn opened_as_raw(running: &Running, disk: &RunningDisk) -> Result<(PathBuf, ImageOptions)> {
    let setup = &disk.setup;
    let (path, cache) = match disk.moved() {
        Some(moved) => (moved.path, moved.cache),
        None => (setup.path.clone(), setup.cache),
    };
    let usual = image_options(setup, &running.state_use(setup)?)?;
    Ok((path, ImageOptions { format: Some(ImageFormat::Raw), cache, ..usual }))
}

/// Renews what is vouched for of a raw disk with a sidecar, as long as it is open.
pub(crate) fn keep_vouching(running: &Running, disk: &Arc<ImageDisk>) {
    let Some(handle) = running.loops.first().filter(|_| disk.image().has_sidecar()) else { return };
    if disk.image().access() == Access::ReadOnly {
        return;
    }
    let disk = Arc::downgrade(disk);
    // It ends with the disk, with the sidecar, or with the loop.
    drop(handle.spawn(move || async move {
        loop {
            sleep(VOUCHER_RENEWAL).await;
            let Some(disk) = disk.upgrade().filter(|disk| disk.image().has_sidecar()) else {
                return;
            };
            disk.image().renew_voucher().await;
        }
    }));
}
