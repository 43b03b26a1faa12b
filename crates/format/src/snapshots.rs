//! Snapshots of an image and the machine state in them: the interface of the formats that have
//! them, and of storages that take snapshots of themselves.

use std::time::Duration;

use blockhouse_core::{
    ByteRange, Error, ErrorKind, Result, SnapshotChange, Storage, StorageChange, StorageSnapshot,
};

use crate::qcow2::{PreparedChange, SnapshotPlan};
use crate::{Format, NewSnapshot, Qcow2, Snapshot, VmStateTables};

impl<S: Storage> Format<S> {
    /// The image's snapshots: its own, or for a raw image those of its storage.
    ///
    /// # Errors
    /// `Unsupported` where neither the format nor the storage has any.
    pub fn snapshots(&self) -> Result<Snapshots<'_, S>> {
        match self {
            Self::Qcow2(image) => Ok(Snapshots { keeper: Keeper::Format(image) }),
            Self::Raw(raw) if raw.storage().has_snapshots() => {
                Ok(Snapshots { keeper: Keeper::Storage(raw.storage()) })
            }
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Err(self.without_snapshots()),
        }
    }

    /// Where the image's snapshots keep states of machines.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots.
    pub fn vm_states(&self) -> Result<VmStates<'_, S>> {
        match self {
            Self::Qcow2(image) => Ok(VmStates { image }),
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Err(self.without_snapshots()),
        }
    }

    fn without_snapshots(&self) -> Error {
        let what = format!("a {} image has no snapshots", self.name());
        Error::new(ErrorKind::Unsupported, what)
            .on(self.storage().name())
            .hint("snapshots need a qcow2 image")
    }
}

/// The snapshots of an image. Changes are durable when they return, and happen as a whole or not at
/// all. The caller keeps changes of the guest's data away while one is made.
pub struct Snapshots<'a, S: Storage> {
    keeper: Keeper<'a, S>,
}

/// The keeper of the snapshots.
enum Keeper<'a, S: Storage> {
    Format(&'a Qcow2<S>),
    Storage(&'a S),
}

impl<'a, S: Storage> Snapshots<'a, S> {
    /// Succeeds where snapshots can be taken.
    ///
    /// # Errors
    /// `Unsupported` for an image with a data file.
    pub fn check_possible(&self) -> Result<()> {
        match self.keeper {
            Keeper::Format(image) => image.check_sharing(),
            Keeper::Storage(_) => Ok(()),
        }
    }

    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// As [`Qcow2::snapshots`] and [`Storage::list_snapshots`].
    pub async fn list(&self) -> Result<Vec<Snapshot>> {
        match self.keeper {
            Keeper::Format(image) => image.snapshots().await,
            Keeper::Storage(storage) => {
                let listed = storage.list_snapshots().await?;
                Ok(listed.into_iter().map(described).collect())
            }
        }
    }

    /// The parts of `range` that have changed since a snapshot was taken, as
    /// [`Storage::changes_since`].
    ///
    /// # Errors
    /// As there; `Unsupported` where the format takes the snapshots.
    pub async fn changes_since(&self, name: &str, range: ByteRange) -> Result<Vec<StorageChange>> {
        match self.keeper {
            Keeper::Format(image) => {
                let what = "its snapshots do not tell what has changed since";
                let error = Error::new(ErrorKind::Unsupported, what).on(image.storage().name());
                Err(error.hint("a bitmap does: 'blockhouse bitmap add', and 'backup'"))
            }
            Keeper::Storage(storage) => {
                let name = find_name(storage, name).await?;
                storage.changes_since(&name, range).await
            }
        }
    }

    /// A change that is prepared while the guest's data is changed, so that making it takes a
    /// moment however much is mapped. `None` where nothing is to be prepared: the snapshot is
    /// [created](Self::create) or [deleted](Self::delete) at once. What is dropped before it is
    /// taken has changed nothing; [`give_back`](Self::give_back) frees its space.
    ///
    /// # Errors
    /// `ReadOnly`, `Unsupported`, or what the storage answers.
    pub async fn prepare(&self, plan: SnapshotPlan) -> Result<Option<PreparedChange<'a, S>>> {
        match self.keeper {
            Keeper::Format(image) => image.prepare_change(plan).await.map(Some),
            Keeper::Storage(_) => Ok(None),
        }
    }

    /// Frees what changes that were made or dropped no longer need. Otherwise that is done with the
    /// next flushes.
    pub async fn give_back(&self) {
        if let Keeper::Format(image) = self.keeper {
            image.give_back().await;
        }
    }

    /// Takes a snapshot of the disk, and of the machine's state if there is one.
    ///
    /// # Errors
    /// As [`Qcow2::create_snapshot`] and [`Storage::change_snapshots`]; `Unsupported` for a
    /// machine's state where the storage takes the snapshots.
    pub async fn create(
        &self,
        new: &NewSnapshot,
        state: Option<&VmStateTables>,
    ) -> Result<Snapshot> {
        let storage = match self.keeper {
            Keeper::Format(image) => return image.create_snapshot(new, state).await,
            Keeper::Storage(storage) => storage,
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

    /// Makes the disk what it was when the snapshot was taken.
    ///
    /// # Errors
    /// As [`Qcow2::apply_snapshot`] and [`Storage::change_snapshots`].
    pub async fn apply(&self, name: &str) -> Result<()> {
        match self.keeper {
            Keeper::Format(image) => image.apply_snapshot(name).await,
            Keeper::Storage(storage) => {
                let name = find_name(storage, name).await?;
                storage.change_snapshots(SnapshotChange::Apply(&name)).await
            }
        }
    }

    /// Deletes a snapshot.
    ///
    /// # Errors
    /// As [`Qcow2::delete_snapshot`] and [`Storage::change_snapshots`].
    pub async fn delete(&self, name: &str) -> Result<()> {
        match self.keeper {
            Keeper::Format(image) => image.delete_snapshot(name).await,
            Keeper::Storage(storage) => {
                let name = find_name(storage, name).await?;
                storage.change_snapshots(SnapshotChange::Delete(&name)).await
            }
        }
    }

    /// Gives a snapshot another name.
    ///
    /// # Errors
    /// As [`Qcow2::rename_snapshot`] and [`Storage::change_snapshots`].
    pub async fn rename(&self, name: &str, new_name: &str) -> Result<()> {
        match self.keeper {
            Keeper::Format(image) => image.rename_snapshot(name, new_name).await,
            Keeper::Storage(storage) => {
                let name = find_name(storage, name).await?;
                let change = SnapshotChange::Rename { from: &name, to: new_name };
                storage.change_snapshots(change).await
            }
        }
    }
}

/// A storage's snapshot, which has no machine's state.
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

/// The machines' states in an image's snapshots.
pub struct VmStates<'a, S: Storage> {
    image: &'a Qcow2<S>,
}

impl<S: Storage> VmStates<'_, S> {
    /// Succeeds where snapshots can be taken.
    ///
    /// # Errors
    /// `Unsupported` for an image with a data file.
    pub fn check_possible(&self) -> Result<()> {
        self.image.check_sharing()
    }

    /// Bytes of a cluster: machine states are stored in whole ones.
    pub fn cluster_size(&self) -> u64 {
        self.image.cluster_size()
    }

    /// The range, past the end of the disk, of the machine's state in the snapshot that the image
    /// was opened on; empty for a snapshot without one.
    ///
    /// # Errors
    /// As [`Qcow2::vm_state`].
    pub fn vm_state(&self) -> Result<ByteRange> {
        self.image.vm_state()
    }

    /// The tables of a new machine state, which refer to nothing yet.
    pub fn new_vm_state(&self) -> VmStateTables {
        self.image.new_vm_state()
    }

    /// Allocates one to `limit` clusters in a row for a machine's state. No table refers to them:
    /// they are to be [reserved](VmStateTables::reserve) or [freed](Self::free_clusters).
    ///
    /// # Errors
    /// As [`Qcow2::allocate_clusters`].
    pub async fn allocate_clusters(&self, limit: u64) -> Result<ByteRange> {
        self.image.allocate_clusters(limit).await
    }

    /// Frees clusters that no table refers to and that no operation writes to. Never waits.
    pub fn free_clusters(&self, range: ByteRange) {
        self.image.free_clusters(range);
    }
}
