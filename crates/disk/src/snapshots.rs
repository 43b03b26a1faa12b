//! Snapshots of an open disk, also while it is served.
//!
//! A snapshot contains all changes that completed before the snapshot was requested. It also
//! contains each later change that completes before the moment of the snapshot, as a whole. Most of
//! its tables are written and flushed while guests continue. Then the disk waits for the changes in
//! flight, and holds off new ones until the remaining tables are written. Reads continue. The call
//! returns the length of this pause. Deleting a snapshot works in the same way. All other changes
//! of snapshots hold off guests' changes from begin to end.

use std::ops::ControlFlow;
use std::time::{Duration, Instant, SystemTime};

use blockhouse_core::{
    ByteRange, Error, ErrorKind, Result, Storage, StorageChange, SyncMode, rare,
};
use blockhouse_format::{
    NewSnapshot, Preparation, Snapshot, SnapshotPlan, Snapshots, VmStateTables,
};

use crate::disk::{Disk, flush_ahead, flush_in_rounds};
use crate::durability::FlushTracker;
use crate::image::Image;

/// The effect of a change of snapshots or bitmaps on the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// The total time for which the guest's writes, zero writes and discards were held off.
    pub length: Duration,
}

impl<S: Storage> Disk<S> {
    /// The disk's snapshots.
    pub fn snapshots(&self) -> DiskSnapshots<'_, S> {
        DiskSnapshots { disk: self }
    }
}

/// The outcome of a change prepared while guests write.
enum Prepared {
    /// The change is made: the snapshot is taken or deleted.
    Taken(Snapshot),
    /// The whole change must be made at once, while guests' changes are held off.
    AtOnce,
    Cancelled,
}

/// The snapshots of an open disk. See the module's page.
pub struct DiskSnapshots<'a, S: Storage> {
    disk: &'a Disk<S>,
}

impl<S: Storage> DiskSnapshots<'_, S> {
    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots; `Corrupt` if the table contradicts the format.
    pub async fn list(&self) -> Result<Vec<Snapshot>> {
        rare(self.disk.begin_use().format().snapshots()?.list()).await
    }

    /// The parts of `range` that have changed since a snapshot was taken, in order. `range` lies
    /// inside the disk. Only for snapshots that the storage takes.
    ///
    /// # Errors
    /// `Unsupported` if the format takes the snapshots, or snapshots are not supported;
    /// `InvalidInput` if there is no such snapshot, or the snapshot is younger than the one that
    /// the disk was opened on.
    pub async fn changes_since(&self, name: &str, range: ByteRange) -> Result<Vec<StorageChange>> {
        self.disk.image().check_inside(range)?;
        self.disk.begin_use().format().snapshots()?.changes_since(name, range).await
    }

    /// Takes a snapshot of the disk. The snapshot is durable when the call returns.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots, an image with a data file, or refcounts that
    /// are too narrow; `InvalidInput` for a name that is taken, empty or longer than 255 bytes;
    /// `ReadOnly`; `NoSpace`. On error nothing has changed.
    pub async fn create(&self, name: &str) -> Result<(Snapshot, Pause)> {
        self.create_unless(name, || false).await?.ok_or_else(|| self.cancelled())
    }

    /// As [`create`](Self::create), but once `is_cancelled` returns true, the result is `None`, and
    /// nothing has changed. `is_cancelled` is called often, but never while changes are held off.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub async fn create_unless(
        &self,
        name: &str,
        is_cancelled: impl Fn() -> bool,
    ) -> Result<Option<(Snapshot, Pause)>> {
        let at_once = async || rare(self.create_at_once(name, None)).await;
        self.change_unless(
            SnapshotPlan::Create(new_snapshot(name)),
            is_cancelled,
            at_once,
            |taken| taken,
        )
        .await
    }

    /// Makes a change while guests write. If that is impossible, calls `at_once`.
    async fn change_unless<T>(
        &self,
        plan: SnapshotPlan,
        is_cancelled: impl Fn() -> bool,
        at_once: impl AsyncFn() -> Result<(T, Pause)>,
        outcome_of: impl Fn(Snapshot) -> T,
    ) -> Result<Option<(T, Pause)>> {
        self.check_possible()?;
        // If another image replaces this one during the preparation, `check_current` detects that.
        let image = self.disk.image();
        let snapshots = image.format().snapshots()?;
        let mut pause = Pause { length: Duration::ZERO };
        let outcome =
            match rare(self.prepare_and_take(image, &snapshots, plan, &is_cancelled, &mut pause))
                .await
            {
                Ok(Prepared::Taken(snapshot)) => Ok(Some((outcome_of(snapshot), pause))),
                Ok(Prepared::Cancelled) => Ok(None),
                Ok(Prepared::AtOnce) => at_once().await.map(|(outcome, last)| {
                    Some((outcome, Pause { length: pause.length + last.length }))
                }),
                Err(error) => Err(error),
            };
        rare(snapshots.give_back()).await;
        outcome
    }

    /// Prepares the change and makes it. Adds the time for which changes were held off to `pause`.
    async fn prepare_and_take(
        &self,
        image: &Image<S>,
        snapshots: &Snapshots<'_, FlushTracker<S>>,
        plan: SnapshotPlan,
        is_cancelled: &dyn Fn() -> bool,
        pause: &mut Pause,
    ) -> Result<Prepared> {
        let Some(mut prepared) = snapshots.prepare(plan).await? else {
            return Ok(Prepared::AtOnce);
        };
        loop {
            let round = async || match prepared.update(is_cancelled).await? {
                Preparation::Ready if !is_cancelled() => Ok(ControlFlow::Continue(())),
                Preparation::AtOnce if !is_cancelled() => Ok(ControlFlow::Break(Prepared::AtOnce)),
                _ => Ok(ControlFlow::Break(Prepared::Cancelled)),
            };
            if let ControlFlow::Break(outcome) = flush_in_rounds(round).await? {
                return Ok(outcome);
            }
            let take = async |_: &Snapshots<'_, _>| {
                self.check_current(image)?;
                prepared.take(now()).await
            };
            let (taken, Pause { length }) = self.run_quiesced(take).await?;
            pause.length += length;
            if let Some(snapshot) = taken {
                prepared.free_unreferenced().await;
                return Ok(Prepared::Taken(snapshot));
            }
        }
    }

    fn cancelled(&self) -> Error {
        let what = "the change of its snapshots was cancelled";
        Error::new(ErrorKind::Io, what).on(self.disk.name())
    }

    /// Refuses to change the snapshots of an image that is no longer the disk's image.
    fn check_current(&self, image: &Image<S>) -> Result<()> {
        if std::ptr::eq(&**self.disk.image(), image) {
            return Ok(());
        }
        let what =
            "another image took the disk's place while a change of its snapshots was prepared";
        Err(Error::new(ErrorKind::InvalidInput, what).on(self.disk.name()).hint("ask for it again"))
    }

    /// Takes the whole snapshot while changes are held off.
    async fn create_at_once(
        &self,
        name: &str,
        state: Option<&VmStateTables>,
    ) -> Result<(Snapshot, Pause)> {
        let new = new_snapshot(name);
        self.while_quiesced(async |snapshots| snapshots.create(&new, state).await).await
    }

    /// Reverts the disk, including its size, to the snapshot. The change is durable when the call
    /// returns. Meant for disks that are not in use, because users see the content change.
    ///
    /// # Errors
    /// As [`create`](Self::create); `InvalidInput` when there is no such snapshot.
    pub async fn apply(&self, name: &str) -> Result<Pause> {
        let apply = async |snapshots: &Snapshots<'_, _>| {
            rare(snapshots.apply(name)).await?;
            // If memory is too short for the new size, the transient bitmaps are lost.
            let size = self.disk.size();
            let bitmaps = self.disk.transient_bitmaps.get().resized(size).unwrap_or_default();
            bitmaps.mark(ByteRange::between(0, size));
            self.disk.transient_bitmaps.set(bitmaps, &self.disk.observers);
            Ok(())
        };
        Ok(self.while_quiesced(apply).await?.1)
    }

    /// Deletes a snapshot. The change is durable when the call returns.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub async fn delete(&self, name: &str) -> Result<Pause> {
        self.delete_unless(name, || false).await?.ok_or_else(|| self.cancelled())
    }

    /// As [`delete`](Self::delete), but once `is_cancelled` returns true, the result is `None`, and
    /// nothing has changed. `is_cancelled` is called often, but never while changes are held off.
    ///
    /// # Errors
    /// As [`delete`](Self::delete).
    pub async fn delete_unless(
        &self,
        name: &str,
        is_cancelled: impl Fn() -> bool,
    ) -> Result<Option<Pause>> {
        let at_once = async || {
            let delete = async |snapshots: &Snapshots<'_, _>| rare(snapshots.delete(name)).await;
            self.while_quiesced(delete).await
        };
        let plan = SnapshotPlan::Delete(name.to_owned());
        let deleted = self.change_unless(plan, is_cancelled, at_once, drop).await?;
        Ok(deleted.map(|((), pause)| pause))
    }

    /// Gives a snapshot another name. The change is durable when the call returns.
    ///
    /// # Errors
    /// As [`create`](Self::create); `InvalidInput` when there is no such snapshot.
    pub async fn rename(&self, name: &str, new_name: &str) -> Result<Pause> {
        let renamed = self
            .while_quiesced(async |snapshots| rare(snapshots.rename(name, new_name)).await)
            .await?;
        Ok(renamed.1)
    }

    /// Takes a snapshot that includes the VM state.
    pub(crate) async fn create_with_state(
        &self,
        name: &str,
        state: &VmStateTables,
    ) -> Result<Snapshot> {
        Ok(rare(self.create_at_once(name, Some(state))).await?.0)
    }

    /// Flushes, and then runs a change of the snapshots while the guest's changes are held off.
    async fn while_quiesced<T>(
        &self,
        change: impl AsyncFnOnce(&Snapshots<'_, FlushTracker<S>>) -> Result<T>,
    ) -> Result<(T, Pause)> {
        self.check_possible()?;
        flush_ahead(&[self.disk], SyncMode::Data).await?;
        self.run_quiesced(change).await
    }

    /// Fails if no snapshot can be taken.
    fn check_possible(&self) -> Result<()> {
        self.disk.check_writable()?;
        self.disk.check_stays()?;
        self.disk.format().snapshots()?.check_possible()
    }

    /// As `while_quiesced`, but the caller has flushed.
    async fn run_quiesced<T>(
        &self,
        change: impl AsyncFnOnce(&Snapshots<'_, FlushTracker<S>>) -> Result<T>,
    ) -> Result<(T, Pause)> {
        let began = Instant::now();
        let _quiesced = self.disk.quiesce().await?;
        // The image may have become read-only or been replaced since the first check.
        self.disk.check_writable()?;
        self.disk.check_stays()?;
        let snapshots = self.disk.format().snapshots()?;
        let outcome = change(&snapshots).await?;
        let length = began.elapsed();
        tracing::debug!("{}: changes were held off for {length:?}", self.disk.name());
        Ok((outcome, Pause { length }))
    }
}

/// Takes a snapshot of each of these disks, all at the same moment, with a name that the disk's
/// storage does not have yet. The snapshots are durable when the call returns.
///
/// # Errors
/// As [`DiskSnapshots::create`], for the first disk that fails. The snapshots that were taken
/// before the failure are deleted again, and so is one whose call has timed out: the storage may
/// have taken it.
pub async fn create_together<S: Storage>(all: &[(&Disk<S>, &str)]) -> Result<Pause> {
    all.iter().try_for_each(|(disk, _)| disk.snapshots().check_possible())?;
    let disks: Vec<_> = all.iter().map(|(disk, _)| *disk).collect();
    flush_ahead(&disks, SyncMode::Data).await?;
    let began = Instant::now();
    let mut quiesced = Vec::with_capacity(disks.len());
    for disk in disks {
        quiesced.push(disk.quiesce().await?);
        // The image may have become read-only or been replaced since the first check.
        disk.snapshots().check_possible()?;
    }
    for (index, (disk, name)) in all.iter().enumerate() {
        let taken = disk.format().snapshots()?.create(&new_snapshot(name), None).await;
        if let Err(error) = taken {
            const ETIMEDOUT: i32 = 110;
            let perhaps_taken = index + usize::from(error.errno() == ETIMEDOUT);
            // A cluster that does not answer would hold off the guests for longer.
            drop(quiesced);
            for (disk, name) in &all[..perhaps_taken] {
                delete_unneeded(disk, name).await;
            }
            return Err(error);
        }
    }
    Ok(Pause { length: began.elapsed() })
}

/// Deletes a snapshot of the disk's storage that has no further use. Does not hold off guests'
/// changes; errors are logged.
pub async fn delete_unneeded<S: Storage>(disk: &Disk<S>, name: &str) {
    let deleted = match disk.format().snapshots() {
        Ok(snapshots) => snapshots.delete(name).await,
        Err(error) => Err(error),
    };
    if let Err(error) = deleted {
        tracing::warn!("{error}; the snapshot {name} stays");
    }
}

/// The description of a snapshot that is taken now.
fn new_snapshot(name: &str) -> NewSnapshot {
    NewSnapshot { name: name.to_owned(), created: now(), vm_clock: Duration::ZERO }
}

/// The time since 1970-01-01 UTC.
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
