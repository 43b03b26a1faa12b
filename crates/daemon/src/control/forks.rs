//! The methods of forks and rollbacks.

use blockhouse_config::text_fields::{check_absolute, check_image_name};
use blockhouse_images::RolledBack;

use super::fork_methods::{ForkParams, ForkResult, RollbackParams, RollbackResult};
use super::outcome::{Outcome, invalid, result};
use crate::running::Running;
use crate::running::forks::ForkReport;
use crate::running::forks::fork_disks;
use crate::running::rollbacks::roll_back_disk;

/// Forks disks.
pub(super) async fn fork(running: &Running, given: ForkParams) -> Outcome {
    let ForkParams { disks } = given;
    if disks.is_empty() {
        return Err(invalid("no disk is to be forked; name one".into()));
    }
    for disk in &disks {
        let mut children = disk.children.iter();
        disk.overlay.iter().try_for_each(|path| check_absolute(path)).map_err(invalid)?;
        children.try_for_each(|child| check_image_name(&child.path)).map_err(invalid)?;
    }
    let ForkReport { pause, disks } = fork_disks(running, disks).await?;
    result(ForkResult { pause_us: pause.as_micros() as u64, disks })
}

/// Rolls a disk back to the layer that its last fork left.
pub(super) async fn roll_back(running: &Running, given: RollbackParams) -> Outcome {
    let RollbackParams { disk, force } = given;
    let RolledBack { layer, overlay, pause } = roll_back_disk(running, &disk, force).await?;
    result(RollbackResult { layer, overlay, pause_us: pause.length.as_micros() as u64 })
}
