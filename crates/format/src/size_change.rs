//! Changes of the disk's size, for all formats.

use blockhouse_core::{Result, Storage, rare};

use crate::Format;

/// Changes of the size of an image's disk.
pub struct SizeChange<'a, S: Storage> {
    format: &'a Format<S>,
}

impl<S: Storage> Format<S> {
    /// Changes of the disk's size.
    pub fn size_change(&self) -> SizeChange<'_, S> {
        SizeChange { format: self }
    }
}

impl<S: Storage> SizeChange<'_, S> {
    /// Checks whether the disk can become `size` bytes long, as far as that is known without a
    /// change. Called before a long preparation.
    ///
    /// # Errors
    /// Errors of [`grow`](Self::grow).
    pub fn check(&self, size: u64) -> Result<()> {
        self.format.qcow2().map_or(Ok(()), |qcow2| qcow2.size_change().check(size))
    }

    /// Lets [`map`](Format::map) for a change accept ranges past the end of the disk, up to `size`.
    /// So the caller can zero the bytes that [`grow`](Self::grow) will add. The disk's size does
    /// not change. The space before `from` is already prepared, or is a part of the disk.
    pub async fn prepare(&self, from: u64, size: u64) -> Result<()> {
        match self.format.qcow2() {
            Some(qcow2) => qcow2.size_change().prepare(from, size).await,
            None => Ok(()),
        }
    }

    /// Makes the guest's disk longer. New bytes read as zeros, except in the last cluster and from
    /// a backing file. Durable with the next full flush. Refuses a size that is no multiple of 512.
    /// The caller keeps requests away from the bytes between the old size and the new one.
    pub async fn grow(&self, size: u64) -> Result<()> {
        match self.format {
            Format::Flat(flat) => flat.resize(size).await,
            Format::Qcow2(qcow2) => rare(qcow2.size_change().grow(size)).await,
        }
    }

    /// Makes the guest's disk shorter. Data past the new size is lost, and its space is freed.
    /// Durable with the next full flush. After a crash before that flush the disk has the old size,
    /// and some bytes past the new size read as zeros or from the backing file. Refuses a size that
    /// is no multiple of 512, images of version 2 with snapshots, and data files of fixed size that
    /// are longer than `size`. The caller keeps requests away from the bytes from the new size on.
    pub async fn shrink(&self, size: u64) -> Result<()> {
        match self.format {
            Format::Flat(flat) => flat.shrink(size).await,
            Format::Qcow2(qcow2) => rare(qcow2.size_change().shrink(size)).await,
        }
    }
}
