//! Rollbacks: a disk returns to the layer below the overlay of its last fork.

use std::ops::RangeInclusive;

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_images::{RolledBack, Secrets, reads_layer_of, roll_back};

use super::Running;
use super::disk::RunningDisk;
use crate::events::Event;
use crate::running::open::image_options;

/// Reverts a disk to the layer of its last fork, and drops its overlay. `force` permits this while
/// clients use the disk.
///
/// # Errors
/// There is no such disk; a job, a backup or clients use it; the layer has other overlays, or the
/// disk cannot be reverted to it. After an error nothing has changed.
pub(crate) async fn roll_back_disk(
    running: &Running,
    name: &str,
    force: bool,
) -> Result<RolledBack> {
    let claimed = running.claim_disk(name).await?;
    let disk = &claimed.disk;
    running.check_free(name)?;
    if disk.setup.read_only {
        bail!("the disk {name:?} is read-only, and stays as it is");
    }
    if !force {
        check_unused(running, name)?;
    }
    check_nobody_stands(running, disk, 1..=1)?;
    let cache = disk.moved().map_or(disk.setup.cache, |moved| moved.cache);
    let setup = DiskConfig { cache, ..disk.setup.clone() };
    let options = image_options(&setup, &running.state_use(&setup)?, Secrets::of(&disk.disk))?;
    let done = roll_back(&disk.disk, &options).await?;
    let [layer, overlay] = [&done.layer, &done.overlay].map(|path| path.display().to_string());
    tracing::info!(
        "{name}: is {layer} again, and {overlay} is gone; changes were held off for {:?}",
        done.pause.length
    );
    running.events.tell(Event::DiskRolledBack { disk: name.to_owned(), layer, overlay });
    Ok(done)
}

/// Refuses to change a disk under clients that may have cached its data.
fn check_unused(running: &Running, name: &str) -> Result<()> {
    for export in running.exports.of_disk(name) {
        let clients = match running.exports.peers(&export) {
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

/// Refuses to change the layers at these depths of a disk's chain if another disk of this server
/// reads one of them.
pub(crate) fn check_nobody_stands(
    running: &Running,
    disk: &RunningDisk,
    depths: RangeInclusive<usize>,
) -> Result<()> {
    let (others, image) = (running.disks.all(), disk.disk.image());
    for depth in depths {
        let others = others.iter().filter(|other| other.name() != disk.name());
        let standing = others.filter(|other| reads_layer_of(other.disk.image(), image, depth));
        let names: Vec<_> = standing.map(|other| format!("{:?}", other.name())).collect();
        if let (false, Some(layer)) = (names.is_empty(), image.layer_at(depth)) {
            bail!(
                "{} is the layer of other disks of this server as well: {}; close them first, or make them independent \
                 (stream)",
                layer.name,
                names.join(", ")
            );
        }
    }
    Ok(())
}
