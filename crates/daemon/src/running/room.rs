//! Thresholds of the free space on the hosts of disks, and write thresholds of images.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use blockhouse_config::threshold::Threshold;
use blockhouse_engine::sleep;

use super::Running;
use super::disk::RunningDisk;

/// The interval of the checks of both kinds of thresholds.
const LOOK: Duration = Duration::from_millis(500);

/// Sets the free space below which a disk causes an event; `None`: no event.
///
/// # Errors
/// There is no such disk, or its free space is unknown.
pub(crate) async fn set_threshold(
    running: &Running,
    name: &str,
    threshold: Option<Threshold>,
) -> Result<()> {
    let claimed = running.claim_disk(name).await?;
    if threshold.is_some() && claimed.disk.disk.room_left().await?.is_none() {
        anyhow::bail!(
            "nothing tells how much room the disk {name:?} has left: it has all its space, or another server has it"
        );
    }
    watch_room(running, &claimed.disk, threshold);
    Ok(())
}

/// Sets the space above which a disk's image causes one event; `None`: no event.
///
/// # Errors
/// There is no such disk, or its image's use of space is unknown.
pub(crate) async fn set_write_threshold(
    running: &Running,
    name: &str,
    threshold: Option<u64>,
) -> Result<()> {
    let claimed = running.claim_disk(name).await?;
    if threshold.is_some() && claimed.disk.disk.end_in_use().await?.is_none() {
        anyhow::bail!(
            "the disk {name:?} has no write threshold: only a qcow2 image that has its own data tells how much of its file it uses"
        );
    }
    watch_use(running, &claimed.disk, threshold);
    Ok(())
}

/// As [`set_write_threshold`], for a disk that is claimed or not served yet.
pub(crate) fn watch_use(running: &Running, disk: &Arc<RunningDisk>, threshold: Option<u64>) {
    if disk.room.set_write_threshold(threshold) {
        begin_watch(running, disk);
    }
}

/// As [`set_threshold`], for a disk that is claimed or not served yet.
pub(super) fn watch_room(running: &Running, disk: &Arc<RunningDisk>, threshold: Option<Threshold>) {
    if disk.room.set(threshold) {
        begin_watch(running, disk);
    }
}

fn begin_watch(running: &Running, disk: &Arc<RunningDisk>) {
    let Some(handle) = running.loops.first() else { return };
    let disk = Arc::downgrade(disk);
    // The task ends with the disk, with its thresholds, or with the loop.
    drop(handle.spawn(move || async move {
        loop {
            let Some(disk) = disk.upgrade().filter(|disk| disk.room.goes_on()) else { return };
            if disk.threshold().is_some() {
                match disk.disk.room_left().await {
                    Ok(Some(room)) => disk.room.note(room),
                    Ok(None) => {}
                    Err(error) => tracing::debug!("{error}"),
                }
            }
            if disk.write_threshold().is_some() {
                match disk.disk.end_in_use().await {
                    Ok(Some(end)) => disk.room.note_end(end),
                    Ok(None) => {}
                    Err(error) => tracing::debug!("{error}"),
                }
            }
            drop(disk);
            sleep(LOOK).await;
        }
    }));
}
