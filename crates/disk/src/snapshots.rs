//! Snapshots of an open disk, also while it is served.
//!
//! A snapshot holds the changes that had completed when it was asked for, and of later ones each as a whole: what
//! completes before a certain moment. Its tables are made while guests go on, and everything is flushed. Then the
//! disk waits for the changes in flight, holds off new ones for as long as the rest of the tables takes, and says how
//! long that was. Reads go on. What else changes the snapshots does all of it while changes are held off.

use std::time::{Duration, Instant, SystemTime};

use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode};
use blockhouse_format::{NewSnapshot, Preparation, Snapshot, Snapshots, VmStateTables};

use crate::disk::Disk;
use crate::durability::FlushTracker;

/// What a change of the snapshots did to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// How long the guest's writes, zero writes and discards were held off, all in all.
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
        let taken = self.create_unless(name, || false).await?;
        Ok(taken.expect("a snapshot that is not cancelled"))
    }

    /// As [`create`](Self::create), unless `is_cancelled` says that it is not wanted any more: `None` then, and nothing
    /// has changed. It is asked often before changes are held off, and not after that.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub async fn create_unless(
        &self,
        name: &str,
        is_cancelled: impl Fn() -> bool,
    ) -> Result<Option<(Snapshot, Pause)>> {
        self.check_possible()?;
        // In this order: where another image takes its place in between, that is found out.
        let image = self.disk.current();
        let snapshots = image.format().snapshots()?;
        let outcome = self.prepare_and_take(image, &snapshots, name, &is_cancelled).await;
        snapshots.give_back().await;
        outcome
    }

    async fn prepare_and_take(
        &self,
        image: &Disk<S>,
        snapshots: &Snapshots<'_, FlushTracker<S>>,
        name: &str,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<(Snapshot, Pause)>> {
        let Some(mut prepared) = snapshots.prepare().await? else {
            return self.create_at_once(name, None).await.map(Some);
        };
        let mut length = Duration::ZERO;
        loop {
            let prepared_now = prepared.update(&new_snapshot(name), is_cancelled).await?;
            if prepared_now == Preparation::Cancelled || is_cancelled() {
                return Ok(None);
            }
            if prepared_now == Preparation::AtOnce {
                drop(prepared);
                let (snapshot, pause) = self.create_at_once(name, None).await?;
                return Ok(Some((snapshot, Pause { length: length + pause.length })));
            }
            let take = async |_: &Snapshots<'_, _>| {
                self.check_current(image)?;
                prepared.take(&new_snapshot(name)).await
            };
            let (taken, pause) = self.run_quiesced(take).await?;
            length += pause.length;
            if let Some(snapshot) = taken {
                return Ok(Some((snapshot, Pause { length })));
            }
        }
    }

    /// Refuses to take a snapshot of an image that no request goes to any more.
    fn check_current(&self, image: &Disk<S>) -> Result<()> {
        if std::ptr::eq(self.disk.current(), image) {
            return Ok(());
        }
        let what = "another image took the disk's place while the snapshot was prepared";
        Err(Error::new(ErrorKind::InvalidInput, what).on(self.disk.name()).hint("ask for it again"))
    }

    /// All of it while changes are held off.
    async fn create_at_once(
        &self,
        name: &str,
        state: Option<&VmStateTables>,
    ) -> Result<(Snapshot, Pause)> {
        let new = new_snapshot(name);
        self.while_quiesced(async |snapshots| snapshots.create(&new, state).await).await
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
        Ok(self.create_at_once(name, Some(state)).await?.0)
    }

    /// Runs a change of the whole image while the guest's changes are held off.
    async fn while_quiesced<T>(
        &self,
        change: impl AsyncFnOnce(&Snapshots<'_, FlushTracker<S>>) -> Result<T>,
    ) -> Result<(T, Pause)> {
        self.check_possible()?;
        self.disk.format().flush(SyncMode::Data).await?;
        self.run_quiesced(change).await
    }

    fn check_possible(&self) -> Result<()> {
        self.disk.check_access(0)?;
        self.disk.check_stays()?;
        self.disk.format().snapshots()?.check_possible()
    }

    /// The same, after a flush.
    async fn run_quiesced<T>(
        &self,
        change: impl AsyncFnOnce(&Snapshots<'_, FlushTracker<S>>) -> Result<T>,
    ) -> Result<(T, Pause)> {
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
