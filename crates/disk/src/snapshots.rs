//! Snapshots of an open disk, also while it is served.
//!
//! A snapshot holds exactly the changes that completed before it was begun, and of those in flight
//! then each as a whole: the disk waits for them, holds off new ones for as long as the image's tables
//! take, and says how long that was. Reads go on. Before, everything is flushed once while guests go on
//! writing, so that little is left to flush during the pause.

use std::time::{Duration, Instant, SystemTime};

use blockhouse_core::{Result, Storage, SyncMode};
use blockhouse_format::{NewSnapshot, Snapshot, Snapshots, VmStateTables};

use crate::disk::Disk;
use crate::durability::FlushTracker;

/// What a change of the snapshots did to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// How long the guest's writes, zero writes and discards were held off.
    pub length: Duration,
}

impl<S: Storage> Disk<S> {
    /// The disk's snapshots.
    pub fn snapshots(&self) -> DiskSnapshots<'_, S> {
        DiskSnapshots { disk: self }
    }
}

/// The snapshots of an open disk. See the module's page.
pub struct DiskSnapshots<'a, S: Storage> {
    disk: &'a Disk<S>,
}

impl<S: Storage> DiskSnapshots<'_, S> {
    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots; `Corrupt` where the table contradicts the format.
    pub async fn list(&self) -> Result<Vec<Snapshot>> {
        self.disk.format().snapshots()?.list().await
    }

    /// Takes a snapshot of the disk; durable when it returns.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots, an image with a data file, or when refcounts are too
    /// narrow; `InvalidInput` for a name that is taken, empty or longer than 255 bytes; `ReadOnly`;
    /// `NoSpace`. Nothing has changed then.
    pub async fn create(&self, name: &str) -> Result<(Snapshot, Pause)> {
        let new = new_snapshot(name);
        self.while_quiesced(async |snapshots| snapshots.create(&new, None).await).await
    }

    /// Makes the disk what it was when the snapshot was taken, its size included; durable when it
    /// returns. Its users see its bytes change: meant for disks that are not in use.
    ///
    /// # Errors
    /// As [`create`](Self::create); `InvalidInput` when there is no such snapshot.
    pub async fn apply(&self, name: &str) -> Result<Pause> {
        let applied = self.while_quiesced(async |snapshots| snapshots.apply(name).await).await?;
        Ok(applied.1)
    }

    /// Deletes a snapshot; durable when it returns.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub async fn delete(&self, name: &str) -> Result<Pause> {
        let deleted = self.while_quiesced(async |snapshots| snapshots.delete(name).await).await?;
        Ok(deleted.1)
    }

    /// Gives a snapshot another name; durable when it returns.
    ///
    /// # Errors
    /// As [`create`](Self::create); `InvalidInput` when there is no such snapshot.
    pub async fn rename(&self, name: &str, new_name: &str) -> Result<Pause> {
        let renamed =
            self.while_quiesced(async |snapshots| snapshots.rename(name, new_name).await).await?;
        Ok(renamed.1)
    }

    /// Takes a snapshot that has the machine's state.
    pub(crate) async fn create_with_state(
        &self,
        name: &str,
        state: &VmStateTables,
    ) -> Result<Snapshot> {
        let new = new_snapshot(name);
        let made = self.while_quiesced(async |snapshots| snapshots.create(&new, Some(state)).await);
        Ok(made.await?.0)
    }

    /// Runs a change of the whole image while the guest's changes are held off.
    async fn while_quiesced<T>(
        &self,
        change: impl AsyncFnOnce(&Snapshots<'_, FlushTracker<S>>) -> Result<T>,
    ) -> Result<(T, Pause)> {
        self.disk.check_access(0)?;
        self.disk.check_stays()?;
        self.disk.format().snapshots()?.check_possible()?;
        self.disk.format().flush(SyncMode::Data).await?;
        let began = Instant::now();
        let _quiesced = self.disk.quiesce().await;
        // It may have become read-only meanwhile, or another image have taken the place of this one.
        self.disk.check_access(0)?;
        self.disk.check_stays()?;
        let snapshots = self.disk.format().snapshots()?;
        let outcome = change(&snapshots).await?;
        let length = began.elapsed();
        tracing::debug!("{}: changes were held off for {length:?}", self.disk.name());
        Ok((outcome, Pause { length }))
    }
}

/// A snapshot that is taken now.
fn new_snapshot(name: &str) -> NewSnapshot {
    let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    NewSnapshot { name: name.to_owned(), created, vm_clock: Duration::ZERO }
}
