//! Logs changes of an image that paused guests' writes.

use blockhouse_disk::Pause;

use crate::running::RunningDisk;

/// Logs a change of an image. Returns for how long guests' changes were held off, in microseconds.
pub(super) fn log(disk: &RunningDisk, pause: Pause, what: &str) -> u64 {
    let image = disk.path();
    let image = image.display();
    tracing::info!("{image}: {what}; changes were held off for {:?}", pause.length);
    pause.length.as_micros().try_into().unwrap_or(u64::MAX)
}
