//! Looking how much room the hosts of disks have left.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use blockhouse_engine::sleep;

use super::{Running, RunningDisk};
use crate::options::threshold::Threshold;

/// How often it is looked how much is left.
const LOOK: Duration = Duration::from_millis(500);

impl Running {
    /// Has it told from now on when a disk has less room than this, or never.
    ///
    /// # Errors
    /// There is no such disk, or nothing tells how much room it has.
    pub(crate) async fn set_threshold(
        &self,
        name: &str,
        threshold: Option<Threshold>,
    ) -> Result<()> {
        let claimed = self.claim_disk(name).await?;
        if threshold.is_some() && claimed.disk.disk.room_left().await?.is_none() {
            anyhow::bail!(
                "nothing tells how much room the disk {name:?} has left: it has all its space, or another server has it"
            );
        }
        self.watch_room(&claimed.disk, threshold);
        Ok(())
    }

    /// The same, of a disk that is claimed or not served yet.
    pub(super) fn watch_room(&self, disk: &Arc<RunningDisk>, threshold: Option<Threshold>) {
        let Some(handle) = self.loops.first().filter(|_| disk.room.set(threshold)) else { return };
        let disk = Arc::downgrade(disk);
        // It ends with the disk, with the threshold, or with the loop.
        drop(handle.spawn(move || async move {
            loop {
                let Some(disk) = disk.upgrade().filter(|disk| disk.room.goes_on()) else { return };
                match disk.disk.room_left().await {
                    Ok(Some(room)) => disk.room.note(room),
                    Ok(None) => {}
                    Err(error) => tracing::debug!("{error}"),
                }
                drop(disk);
                sleep(LOOK).await;
            }
        }));
    }
}
