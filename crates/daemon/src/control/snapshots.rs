//! Taking and deleting snapshots of a served disk, for both protocols of the control socket.

use anyhow::{Result, bail};

use super::pause_log::log;
use crate::running::RunningDisk;

/// Takes a snapshot. Returns its id, and for how long changes were held off, in microseconds.
pub(super) async fn take_snapshot(
    disk: &RunningDisk,
    name: &str,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<(String, u64)> {
    match disk.disk.snapshots().create_unless(name, is_cancelled).await? {
        Some((snapshot, pause)) => {
            let pause_us = log(disk, pause, &format!("took the snapshot {name:?}"));
            Ok((snapshot.id, pause_us))
        }
        None => bail!("the snapshot {name:?} was cancelled; nothing has changed"),
    }
}

/// Deletes a snapshot. Returns for how long changes were held off, in microseconds.
pub(super) async fn delete_snapshot(
    disk: &RunningDisk,
    name: &str,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<u64> {
    match disk.disk.snapshots().delete_unless(name, is_cancelled).await? {
        Some(pause) => Ok(log(disk, pause, &format!("deleted the snapshot {name:?}"))),
        None => bail!("the deletion of the snapshot {name:?} was cancelled; nothing has changed"),
    }
}
