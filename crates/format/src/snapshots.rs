//! Snapshots of an image and the machine state in them: the interface of the formats that have them.

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

use crate::{Format, NewSnapshot, Qcow2, Snapshot, VmStateTables};

impl<S: Storage> Format<S> {
    /// The image's snapshots.
    ///
    /// # Errors
    /// `Unsupported` for a format without snapshots.
    pub fn snapshots(&self) -> Result<Snapshots<'_, S>> {
        match self {
            Self::Qcow2(image) => Ok(Snapshots { image }),
            Self::Raw(_) | Self::Foreign(_) => {
                let what = format!("a {} image has no snapshots", self.name());
                Err(Error::new(ErrorKind::Unsupported, what)
                    .on(self.storage().name())
                    .hint("snapshots need a qcow2 image"))
            }
        }
    }
}

/// The snapshots of an image. Changes are durable when they return, and happen as a whole or not at all.
/// The caller keeps changes of the guest's data away while one is made.
pub struct Snapshots<'a, S: Storage> {
    image: &'a Qcow2<S>,
}

impl<'a, S: Storage> Snapshots<'a, S> {
    /// Succeeds where snapshots can be taken.
    ///
    /// # Errors
    /// `Unsupported` for an image with a data file.
    pub fn check_possible(&self) -> Result<()> {
        self.image.check_sharing()
    }

    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// As [`Qcow2::snapshots`].
    pub async fn list(&self) -> Result<Vec<Snapshot>> {
        self.image.snapshots().await
    }

    /// Takes a snapshot of the disk, and of the machine's state if there is one.
    ///
    /// # Errors
    /// As [`Qcow2::create_snapshot`].
    pub async fn create(
        &self,
        new: &NewSnapshot,
        state: Option<&VmStateTables>,
    ) -> Result<Snapshot> {
        self.image.create_snapshot(new, state).await
    }

    /// Makes the disk what it was when the snapshot was taken.
    ///
    /// # Errors
    /// As [`Qcow2::apply_snapshot`].
    pub async fn apply(&self, name: &str) -> Result<()> {
        self.image.apply_snapshot(name).await
    }

    /// Deletes a snapshot.
    ///
    /// # Errors
    /// As [`Qcow2::delete_snapshot`].
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.image.delete_snapshot(name).await
    }

    /// Gives a snapshot another name.
    ///
    /// # Errors
    /// As [`Qcow2::rename_snapshot`].
    pub async fn rename(&self, name: &str, new_name: &str) -> Result<()> {
        self.image.rename_snapshot(name, new_name).await
    }

    /// Bytes of a cluster: machine states are stored in whole ones.
    pub fn cluster_size(&self) -> u64 {
        self.image.cluster_size()
    }

    /// The range, past the end of the disk, of the machine's state in the snapshot that the image was
    /// opened on; empty for a snapshot without one.
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

    /// Allocates one to `limit` clusters in a row for a machine's state. No table refers to them: they
    /// are to be [reserved](VmStateTables::reserve) or [freed](Self::free_clusters).
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
