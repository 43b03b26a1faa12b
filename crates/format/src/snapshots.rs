//! Snapshots of an image: those of a format that has snapshots, or of a storage that takes
//! snapshots of itself.

use std::time::Duration;

use blockhouse_core::{
    ByteRange, Error, ErrorKind, Result, SnapshotChange, Storage, StorageChange, StorageSnapshot,
};

use crate::qcow2::{InternalSnapshots, PreparedChange, SnapshotPlan};
use crate::{Flat, Format, NewSnapshot, Qcow2, Snapshot, VmStateTables, VmStates};

impl<S: Storage> Format<S> {
    /// The image's snapshots: its own, or for a raw image those of its storage.
    ///
    /// # Errors
    /// `Unsupported` if neither the format nor the storage has snapshots.
    pub fn snapshots(&self) -> Result<Snapshots<'_, S>> {
        match (self.qcow2(), self) {
            (Some(image), _) => Ok(Snapshots::Internal(image.snapshots())),
            (None, Self::Flat(Flat::Raw(raw))) if raw.storage().has_snapshots() => {
                Ok(Snapshots::OfStorage(raw.storage()))
            }
            (None, _) => Err(without_snapshots(self)),
        }
    }

    /// The machine states in the image's snapshots.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots.
    pub fn vm_states(&self) -> Result<VmStates<'_, S>> {
        self.qcow2().map(Qcow2::vm_states).ok_or_else(|| without_snapshots(self))
    }
}

/// The snapshots of an image. A change is atomic, and durable when it returns. The caller ensures
/// that no change of guest data is in flight meanwhile.
pub enum Snapshots<'a, S: Storage> {
    /// Snapshots inside the image.
    Internal(InternalSnapshots<'a, S>),
    /// Snapshots that the storage of a raw image takes.
    OfStorage(&'a S),
}

impl<'a, S: Storage> Snapshots<'a, S> {
    /// Succeeds if snapshots can be taken.
    ///
    /// # Errors
    /// `Unsupported` for an image with a data file.
    pub fn check_possible(&self) -> Result<()> {
        match self {
            Self::Internal(image) => image.check_possible(),
            Self::OfStorage(_) => Ok(()),
        }
    }

    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// As [`InternalSnapshots::list`] and [`Storage::list_snapshots`].
    pub async fn list(&self) -> Result<Vec<Snapshot>> {
        match self {
            Self::Internal(image) => image.list().await,
            Self::OfStorage(storage) => {
                let listed = storage.list_snapshots().await?;
                Ok(listed.into_iter().map(described).collect())
            }
        }
    }

    /// The parts of `range` that have changed since a snapshot was taken, as
    /// [`Storage::changes_since`].
    ///
    /// # Errors
    /// As [`Storage::changes_since`]; `Unsupported` if the format takes the snapshots.
    pub async fn changes_since(&self, name: &str, range: ByteRange) -> Result<Vec<StorageChange>> {
        match self {
            Self::Internal(image) => {
                let what = "its snapshots do not tell what has changed since";
                let error = Error::new(ErrorKind::Unsupported, what).on(image.image_name());
                Err(error.hint("a bitmap does: 'blockhouse bitmap add', and 'backup'"))
            }
            Self::OfStorage(storage) => {
                let name = find_name(*storage, name).await?;
                storage.changes_since(&name, range).await
            }
        }
    }

    /// Prepares a change while the guest continues to write, so that the change itself is short for
    /// any amount of mapped data. `None` if there is nothing to prepare: the caller
    /// [creates](Self::create) or [deletes](Self::delete) the snapshot directly. A prepared change
    /// that is dropped has changed nothing; [`give_back`](Self::give_back) frees its space.
    ///
    /// # Errors
    /// `ReadOnly`, `Unsupported`, or errors of the storage.
    pub async fn prepare(&self, plan: SnapshotPlan) -> Result<Option<PreparedChange<'a, S>>> {
        match self {
            Self::Internal(image) => image.prepare(plan).await.map(Some),
            Self::OfStorage(_) => Ok(None),
        }
    }

    /// Frees the space that completed or dropped changes no longer need. Without this call, the
    /// next flushes free it.
    pub async fn give_back(&self) {
        if let Self::Internal(image) = self {
            image.give_back().await;
        }
    }

    /// Takes a snapshot of the disk, and of the machine's state if there is one.
    ///
    /// # Errors
    /// As [`InternalSnapshots::create`] and [`Storage::change_snapshots`]; `Unsupported` for a
    /// machine's state if the storage takes the snapshots.
    pub async fn create(
        &self,
        new: &NewSnapshot,
        state: Option<&VmStateTables>,
    ) -> Result<Snapshot> {
        let storage = match self {
            Self::Internal(image) => return image.create(new, state).await,
            Self::OfStorage(storage) => *storage,
        };
        if state.is_some() {
            let what = "its snapshots have no machine's state";
            return Err(Error::new(ErrorKind::Unsupported, what).on(storage.name()));
        }
        storage.change_snapshots(SnapshotChange::Create(&new.name)).await?;
        let listed = storage.list_snapshots().await?;
        let taken = listed.into_iter().find(|snapshot| snapshot.name == new.name);
        taken.map(described).ok_or_else(|| no_snapshot(storage, &new.name))
    }

    /// Reverts the disk to its state when the snapshot was taken.
    ///
    /// # Errors
    /// As [`InternalSnapshots::apply`] and [`Storage::change_snapshots`].
    pub async fn apply(&self, name: &str) -> Result<()> {
        match self {
            Self::Internal(image) => image.apply(name).await,
            Self::OfStorage(storage) => {
                let name = find_name(*storage, name).await?;
                storage.change_snapshots(SnapshotChange::Apply(&name)).await
            }
        }
    }

    /// Deletes a snapshot.
    ///
    /// # Errors
    /// As [`InternalSnapshots::delete`] and [`Storage::change_snapshots`].
    pub async fn delete(&self, name: &str) -> Result<()> {
        match self {
            Self::Internal(image) => image.delete(name).await,
            Self::OfStorage(storage) => {
                let name = find_name(*storage, name).await?;
                storage.change_snapshots(SnapshotChange::Delete(&name)).await
            }
        }
    }

    /// Gives a snapshot another name.
    ///
    /// # Errors
    /// As [`InternalSnapshots::rename`] and [`Storage::change_snapshots`].
    pub async fn rename(&self, name: &str, new_name: &str) -> Result<()> {
        match self {
            Self::Internal(image) => image.rename(name, new_name).await,
            Self::OfStorage(storage) => {
                let name = find_name(*storage, name).await?;
                let change = SnapshotChange::Rename { from: &name, to: new_name };
                storage.change_snapshots(change).await
            }
        }
    }
}

fn without_snapshots<S: Storage>(format: &Format<S>) -> Error {
    let what = format!("a {} image has no snapshots", format.name());
    Error::new(ErrorKind::Unsupported, what)
        .on(format.storage().name())
        .hint("snapshots need a qcow2 image")
}

/// The description of a storage's snapshot, which has no machine's state.
fn described(snapshot: StorageSnapshot) -> Snapshot {
    let StorageSnapshot { id, name, created, size } = snapshot;
    Snapshot {
        id: id.to_string(),
        name,
        created,
        vm_clock: Duration::ZERO,
        vm_state_size: 0,
        disk_size: size,
        instruction_count: None,
    }
}

/// The name of the storage's snapshot that has this name, or this id.
async fn find_name<S: Storage>(storage: &S, name: &str) -> Result<String> {
    let listed = storage.list_snapshots().await?;
    let named = listed.iter().find(|snapshot| snapshot.name == name);
    let found = named.or_else(|| listed.iter().find(|snapshot| snapshot.id.to_string() == name));
    found.map(|snapshot| snapshot.name.clone()).ok_or_else(|| no_snapshot(storage, name))
}

fn no_snapshot(storage: &impl Storage, name: &str) -> Error {
    let what = format!("has no snapshot '{name}'");
    let error = Error::new(ErrorKind::InvalidInput, what).on(storage.name());
    error.hint("'snapshot list' names those that it has")
}
