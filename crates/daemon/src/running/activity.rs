//! Inactive disks: their images are open for reading only and without a lock, while another program
//! may change them.

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_core::rare;
use blockhouse_disk::is_inactive;
use blockhouse_images::{Secrets, reopen};
use futures_util::future::LocalBoxFuture;

use super::Running;
use super::open::open_disk_with;
use super::recording::keep_vouching;

impl Running {
    /// Makes a disk active or inactive while it is served. A disk that becomes active locks its
    /// image and reads the metadata again.
    ///
    /// # Errors
    /// There is no such disk, a job or a backup uses it, its changes cannot be made durable, or its
    /// image cannot be opened in the new mode. In these cases the disk stays as it was.
    pub fn set_active<'a>(
        &'a self,
        name: &'a str,
        is_active: bool,
    ) -> LocalBoxFuture<'a, Result<()>> {
        rare(async move {
            let claimed = self.claim_disk(name).await?;
            let disk = &claimed.disk;
            if is_inactive(&disk.disk) != is_active {
                return Ok(());
            }
            self.check_unused(name)?;
            let mut setup =
                DiskConfig { is_inactive: !is_active, create: None, ..disk.setup.clone() };
            if let Some(moved) = disk.moved() {
                setup = setup.moved_to(moved.path, moved.format, moved.cache);
            }
            let state = self.state_use(&setup)?;
            reopen(&disk.disk, open_disk_with(&setup, &state, Secrets::of(&disk.disk))).await?;
            keep_vouching(self, &disk.disk);
            tracing::info!("{name}: is {} now", if is_active { "active" } else { "inactive" });
            Ok(())
        })
    }

    /// Fails for an inactive disk.
    pub(super) fn check_active(&self, name: &str) -> Result<()> {
        match self.disks.find(name) {
            Some(disk) if is_inactive(&disk.disk) => bail!(
                "the disk {name:?} is inactive, and is only read; make it active first (blockdev-set-active)"
            ),
            _ => Ok(()),
        }
    }
}
