//! Rollbacks: disks go back to the layers that forks left.

use anyhow::{Result, bail};
use blockhouse_disk::{Access, RolledBack, roll_back};

use super::{Running, RunningDisk};
use crate::events::Event;
use crate::running::open::image_options;
use crate::setup::DiskSetup;

impl Running {
    /// Has a disk go back to the layer that its last fork left, and drops its overlay. With `force`
    /// also while clients use it.
    ///
    /// # Errors
    /// There is no such disk, a job or a backup uses it, or clients do; others stand on the layer,
    /// or it cannot be gone back to. Nothing has changed then.
    pub(crate) async fn roll_back(&self, name: &str, force: bool) -> Result<RolledBack> {
        let claimed = self.claim_disk(name).await?;
        let disk = &claimed.disk;
        self.check_free(name)?;
        if disk.setup.access == Access::ReadOnly {
            bail!("the disk {name:?} is read-only, and stays as it is");
        }
        if !force {
            self.check_unused(name)?;
        }
        self.check_nobody_stands(disk)?;
        let cache = disk.moved().map_or(disk.setup.cache, |moved| moved.cache);
        let setup = DiskSetup { cache, ..disk.setup.clone() };
        let options = image_options(&setup, &self.state_use(&setup)?)?;
        let done = roll_back(&disk.disk, &options).await?;
        let [layer, overlay] = [&done.layer, &done.overlay].map(|path| path.display().to_string());
        tracing::info!(
            "{name}: is {layer} again, and {overlay} is gone; changes were held off for {:?}",
            done.pause.length
        );
        self.events.tell(Event::DiskRolledBack { disk: name.to_owned(), layer, overlay });
        Ok(done)
    }

    /// Refuses to change a disk below clients that know what it holds.
    fn check_unused(&self, name: &str) -> Result<()> {
        for export in self.exports_of(name) {
            let clients = match self.peers(&export) {
                Some(peers) if peers.is_empty() => continue,
                Some(peers) => format!("has clients ({})", peers.join(", ")),
                None => "may be in use".to_owned(),
            };
            bail!(
                "the disk {name:?} {clients} at {}, which would find other bytes than they know of: stop them, or force it",
                export.address
            );
        }
        Ok(())
    }

    /// Refuses to change the layer behind a disk where others stand on that.
    pub(crate) fn check_nobody_stands(&self, disk: &RunningDisk) -> Result<()> {
        let others = self.disks();
        let others = others.iter().filter(|other| other.name() != disk.name());
        let standing = others.filter(|other| other.disk.stands_on_layer_of(&disk.disk));
        let names: Vec<_> = standing.map(|other| format!("{:?}", other.name())).collect();
        if let (false, Some(layer)) = (names.is_empty(), disk.disk.layer_at(1)) {
            bail!(
                "{} is the layer of other disks of this server as well: {}; close them first, or make them independent (stream)",
                layer.name,
                names.join(", ")
            );
        }
        Ok(())
    }
}
