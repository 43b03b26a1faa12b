//! Snapshots of an open disk, also while it is served.
//!
//! A snapshot holds exactly the changes that completed before it was begun, and of those in flight
//! then each as a whole: the disk waits for them, holds off new ones for as long as the image's tables
//! take, and says how long that was. Reads go on. Before, everything is flushed once while guests go on
//! writing, so that little is left to flush during the pause.

use std::time::{Duration, Instant, SystemTime};

use blockhouse_core::{Result, Storage, SyncMode};
use blockhouse_format::{NewSnapshot, Snapshot, Snapshots, VmStateTables};

use crate::Disk;
use crate::durability::FlushTracker;

/// What a change of the snapshots did to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// How long the guest's writes, zero writes and discards were held off.
    pub length: Duration,
}

impl<S: Storage> Disk<S> {
    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots; `Corrupt` where the table contradicts the format.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        self.format.snapshots()?.list().await
    }

    /// Takes a snapshot of the disk; durable when it returns.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots, an image with a data file, or when refcounts are too
    /// narrow; `InvalidInput` for a name that is taken, empty or longer than 255 bytes; `ReadOnly`;
    /// `NoSpace`. Nothing has changed then.
    pub async fn create_snapshot(&self, name: &str) -> Result<(Snapshot, Pause)> {
        let new = named(name);
        self.alone(async |snapshots| snapshots.create(&new, None).await).await
    }

    /// Makes the disk what it was when the snapshot was taken, its size included; durable when it
    /// returns. Whoever has the disk open sees its bytes change: meant for disks that nobody uses.
    ///
    /// # Errors
    /// As [`create_snapshot`](Self::create_snapshot); `InvalidInput` when there is no such snapshot.
    pub async fn apply_snapshot(&self, name: &str) -> Result<Pause> {
        let applied = self.alone(async |snapshots| snapshots.apply(name).await).await?;
        Ok(applied.1)
    }

    /// Deletes a snapshot; durable when it returns.
    ///
    /// # Errors
    /// As [`apply_snapshot`](Self::apply_snapshot).
    pub async fn delete_snapshot(&self, name: &str) -> Result<Pause> {
        let deleted = self.alone(async |snapshots| snapshots.delete(name).await).await?;
        Ok(deleted.1)
    }

    /// Gives a snapshot another name; durable when it returns.
    ///
    /// # Errors
    /// As [`create_snapshot`](Self::create_snapshot); `InvalidInput` when there is no such snapshot.
    pub async fn rename_snapshot(&self, name: &str, new_name: &str) -> Result<Pause> {
        let renamed = self.alone(async |snapshots| snapshots.rename(name, new_name).await).await?;
        Ok(renamed.1)
    }

    /// Takes a snapshot that has the machine's state.
    pub(crate) async fn create_snapshot_with(
        &self,
        name: &str,
        state: &VmStateTables,
    ) -> Result<Snapshot> {
        let new = named(name);
        let made = self.alone(async |snapshots| snapshots.create(&new, Some(state)).await);
        Ok(made.await?.0)
    }

    /// Runs a change of the whole image while the guest's changes are held off.
    async fn alone<T>(
        &self,
        change: impl AsyncFnOnce(&Snapshots<'_, FlushTracker<S>>) -> Result<T>,
    ) -> Result<(T, Pause)> {
        self.check_access(0)?;
        let snapshots = self.format.snapshots()?;
        snapshots.check_possible()?;
        self.format.flush(SyncMode::Data).await?;
        let began = Instant::now();
        let _alone = self.gate.shut().await;
        let outcome = change(&snapshots).await?;
        let length = began.elapsed();
        tracing::debug!("{}: changes were held off for {length:?}", self.name());
        Ok((outcome, Pause { length }))
    }
}

/// A snapshot that is taken now.
fn named(name: &str) -> NewSnapshot {
    let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    NewSnapshot { name: name.to_owned(), created, vm_clock: Duration::ZERO }
}
