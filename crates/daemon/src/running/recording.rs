//! Raw disks that record their changes from the first bitmap on that they get while they are served.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use blockhouse_disk::{
    Access, ImageDisk, ImageFormat, ImageOptions, VOUCHER_RENEWAL, start_recording,
};
use blockhouse_engine::sleep;

use super::{Running, RunningDisk};
use crate::open::image_options;

impl Running {
    /// Gives a disk, which is claimed, a place for bitmaps, if it is a raw file that has none: for how long its changes were held
    /// off. Nothing becomes of other disks.
    ///
    /// # Errors
    /// A job works on the disk; the sandbox does not let the server make files beside the image; as [`start_recording`].
    pub(crate) async fn make_room_for_bitmaps(&self, disk: &RunningDisk) -> Result<Duration> {
        if !disk.disk.lacks_sidecar() {
            return Ok(Duration::ZERO);
        }
        // A mirror is about to put another image in its place.
        self.jobs.check_free(disk.name())?;
        let setup = &disk.setup;
        let (path, cache) = match disk.moved() {
            Some(moved) => (moved.path, moved.cache),
            None => (setup.path.clone(), setup.cache),
        };
        self.sandbox().check(&path)?;
        let usual = image_options(setup, &self.state_use(setup)?)?;
        let options = ImageOptions { format: Some(ImageFormat::Raw), cache, ..usual };
        let pause = start_recording(&disk.disk, &path, &options).await.with_context(|| {
            format!("the raw disk {:?} cannot have bitmaps while it is served", disk.name())
        })?;
        self.keep_vouching(&disk.disk);
        tracing::info!(
            "{}: its changes are recorded beside it; they were held off for {:?}",
            path.display(),
            pause.length
        );
        Ok(pause.length)
    }

    /// Renews what is vouched for of a raw disk with a sidecar, as long as it is open.
    pub(super) fn keep_vouching(&self, disk: &Arc<ImageDisk>) {
        let Some(handle) = self.loops.first().filter(|_| disk.has_sidecar()) else { return };
        if disk.opened_access() == Access::ReadOnly {
            return;
        }
        let disk = Arc::downgrade(disk);
        // It ends with the disk, or with the loop.
        drop(handle.spawn(move || async move {
            loop {
                sleep(VOUCHER_RENEWAL).await;
                let Some(disk) = disk.upgrade() else { return };
                disk.renew_voucher().await;
            }
        }));
    }
}
