//! The storages that an image can be on, as one type.

use std::time::Duration;

use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, IoVector, Result, SnapshotChange, Storage,
    StorageChange, StorageSnapshot, SyncMode, Unmap,
};
use blockhouse_engine::HostFile;

use crate::{Concat, NbdStorage, RbdStorage, ViewStorage};

/// A file, or what another server or a cluster has.
///
/// A file's operations are as they would be without this. Those of the others are behind a pointer,
/// so that they do not make these longer.
pub enum ImageStorage {
    /// A file or block device of this host.
    File(HostFile),
    /// An export of an NBD server.
    Nbd(Box<NbdStorage>),
    /// An image in Ceph.
    Rbd(Box<RbdStorage>),
    /// The files of an image that is in several, for reading.
    Concat(Box<Concat<HostFile>>),
    /// Something that another layer has, for reading.
    View(Box<ViewStorage>),
}

impl ImageStorage {
    /// Ends connections to another server, when nothing is in flight; every later request fails
    /// there. A file stays open.
    pub fn disconnect(&self) {
        if let Self::Nbd(nbd) = self {
            nbd.disconnect();
        }
    }

    /// From now on a request to another server that is not answered in this time fails; with `None`
    /// it waits as long as it takes. A file and a cluster of Ceph have limits of their own.
    pub fn set_answer_time(&self, time: Option<Duration>) {
        if let Self::Nbd(nbd) = self {
            nbd.set_answer_time(time);
        }
    }

    /// The file, where it is exactly one.
    pub fn as_file(&self) -> Option<&HostFile> {
        match self {
            Self::File(file) => Some(file),
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) => None,
        }
    }

    /// The files of this host that it consists of; none where another server or a cluster has it.
    pub fn files(&self) -> Vec<&HostFile> {
        match self {
            Self::File(file) => vec![file],
            Self::Concat(files) => files.files().collect(),
            Self::Nbd(_) | Self::Rbd(_) | Self::View(_) => Vec::new(),
        }
    }

    /// The name of the file that has the byte at `offset`, and its place there.
    pub fn locate(&self, offset: u64) -> (&str, u64) {
        match self {
            Self::Concat(files) => files.locate(offset),
            _ => (self.name(), offset),
        }
    }

    /// Its size as the host or the cluster says just now, which another program may have changed.
    /// `None` where it is what it was at the opening.
    ///
    /// # Errors
    /// The host's, or the cluster's.
    pub async fn query_size(&self) -> Result<Option<u64>> {
        match self {
            Self::File(file) => file.query_size().map(Some),
            Self::Nbd(_) | Self::Concat(_) | Self::View(_) => Ok(None),
            Self::Rbd(rbd) => rbd.query_size().await.map(Some),
        }
    }

    /// Takes in a [new size](Self::query_size) that is not less than the one so far.
    pub fn set_min_size(&self, size: u64) {
        match self {
            Self::File(file) => file.set_min_size(size),
            Self::Nbd(_) | Self::Concat(_) | Self::View(_) => {}
            Self::Rbd(rbd) => rbd.set_min_size(size),
        }
    }
}

impl From<HostFile> for ImageStorage {
    fn from(file: HostFile) -> Self {
        Self::File(file)
    }
}

impl Storage for ImageStorage {
    fn name(&self) -> &str {
        match self {
            Self::File(file) => file.name(),
            Self::Nbd(nbd) => nbd.name(),
            Self::Rbd(rbd) => rbd.name(),
            Self::Concat(files) => files.name(),
            Self::View(view) => view.name(),
        }
    }

    fn capabilities(&self) -> Capabilities {
        match self {
            Self::File(file) => file.capabilities(),
            Self::Nbd(nbd) => nbd.capabilities(),
            Self::Rbd(rbd) => rbd.capabilities(),
            Self::Concat(files) => files.capabilities(),
            Self::View(view) => view.capabilities(),
        }
    }

    fn size(&self) -> u64 {
        match self {
            Self::File(file) => file.size(),
            Self::Nbd(nbd) => nbd.size(),
            Self::Rbd(rbd) => rbd.size(),
            Self::Concat(files) => files.size(),
            Self::View(view) => view.size(),
        }
    }

    fn grows_with_zeros(&self) -> bool {
        match self {
            Self::File(file) => file.grows_with_zeros(),
            // A storage of fixed size never becomes longer; new objects of an image in Ceph are
            // empty.
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) => true,
        }
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        match self {
            Self::File(file) => file.read(offset, into).await,
            Self::Nbd(nbd) => Box::pin(nbd.read(offset, into)).await,
            Self::Rbd(rbd) => Box::pin(rbd.read(offset, into)).await,
            Self::Concat(files) => Box::pin(files.read(offset, into)).await,
            Self::View(view) => Box::pin(view.read(offset, into)).await,
        }
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        match self {
            Self::File(file) => file.write(offset, from, durability).await,
            Self::Nbd(nbd) => Box::pin(nbd.write(offset, from, durability)).await,
            Self::Rbd(rbd) => Box::pin(rbd.write(offset, from, durability)).await,
            Self::Concat(files) => Box::pin(files.write(offset, from, durability)).await,
            Self::View(view) => Box::pin(view.write(offset, from, durability)).await,
        }
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        match self {
            Self::File(file) => file.write_zeroes(range, unmap).await,
            Self::Nbd(nbd) => Box::pin(nbd.write_zeroes(range, unmap)).await,
            Self::Rbd(rbd) => Box::pin(rbd.write_zeroes(range, unmap)).await,
            Self::Concat(files) => Box::pin(files.write_zeroes(range, unmap)).await,
            Self::View(view) => Box::pin(view.write_zeroes(range, unmap)).await,
        }
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        match self {
            Self::File(file) => file.discard(range).await,
            Self::Nbd(nbd) => Box::pin(nbd.discard(range)).await,
            Self::Rbd(rbd) => Box::pin(rbd.discard(range)).await,
            Self::Concat(files) => Box::pin(files.discard(range)).await,
            Self::View(view) => Box::pin(view.discard(range)).await,
        }
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        match self {
            Self::File(file) => file.flush(sync).await,
            Self::Nbd(nbd) => Box::pin(nbd.flush(sync)).await,
            Self::Rbd(rbd) => Box::pin(rbd.flush(sync)).await,
            Self::Concat(files) => Box::pin(files.flush(sync)).await,
            Self::View(view) => Box::pin(view.flush(sync)).await,
        }
    }

    async fn resize(&self, size: u64) -> Result<()> {
        match self {
            Self::File(file) => file.resize(size).await,
            Self::Nbd(nbd) => nbd.resize(size).await,
            Self::Rbd(rbd) => rbd.resize(size).await,
            Self::Concat(files) => files.resize(size).await,
            Self::View(view) => view.resize(size).await,
        }
    }

    async fn last_change(&self) -> Result<Option<Duration>> {
        match self {
            Self::File(file) => file.last_change().await,
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) => Ok(None),
        }
    }

    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        match self {
            Self::File(file) => file.prepare_zeroes(range, held).await,
            Self::Nbd(nbd) => nbd.prepare_zeroes(range, held).await,
            Self::Rbd(rbd) => rbd.prepare_zeroes(range, held).await,
            Self::Concat(files) => files.prepare_zeroes(range, held).await,
            Self::View(view) => view.prepare_zeroes(range, held).await,
        }
    }

    async fn free_space(&self) -> Result<Option<u64>> {
        match self {
            Self::File(file) => file.free_space().await,
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) => Ok(None),
        }
    }

    fn check_size(&self, size: u64) -> Result<()> {
        match self {
            Self::File(file) => file.check_size(size),
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) => Ok(()),
        }
    }

    async fn extend_hint(&self, size: u64) {
        match self {
            Self::File(file) => file.extend_hint(size).await,
            Self::Nbd(nbd) => nbd.extend_hint(size).await,
            Self::Rbd(rbd) => rbd.extend_hint(size).await,
            Self::Concat(files) => files.extend_hint(size).await,
            Self::View(view) => view.extend_hint(size).await,
        }
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        match self {
            Self::File(file) => file.block_status(range).await,
            Self::Nbd(nbd) => Box::pin(nbd.block_status(range)).await,
            Self::Rbd(rbd) => Box::pin(rbd.block_status(range)).await,
            Self::Concat(files) => Box::pin(files.block_status(range)).await,
            Self::View(view) => Box::pin(view.block_status(range)).await,
        }
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        match self {
            Self::File(file) => file.prefetch(range).await,
            Self::Nbd(nbd) => nbd.prefetch(range).await,
            Self::Rbd(rbd) => rbd.prefetch(range).await,
            Self::Concat(files) => files.prefetch(range).await,
            Self::View(view) => view.prefetch(range).await,
        }
    }

    fn needs_close(&self) -> bool {
        match self {
            Self::File(file) => file.needs_close(),
            Self::Nbd(nbd) => nbd.needs_close(),
            Self::Rbd(rbd) => rbd.needs_close(),
            Self::Concat(files) => files.needs_close(),
            Self::View(view) => view.needs_close(),
        }
    }

    fn begin_close(&self) {
        match self {
            Self::File(file) => file.begin_close(),
            Self::Nbd(nbd) => nbd.begin_close(),
            Self::Rbd(rbd) => rbd.begin_close(),
            Self::Concat(files) => files.begin_close(),
            Self::View(view) => view.begin_close(),
        }
    }

    async fn close(&self) -> Result<()> {
        match self {
            Self::File(file) => file.close().await,
            Self::Nbd(nbd) => nbd.close().await,
            Self::Rbd(rbd) => Box::pin(rbd.close()).await,
            Self::Concat(files) => files.close().await,
            Self::View(view) => view.close().await,
        }
    }

    fn has_snapshots(&self) -> bool {
        match self {
            Self::File(file) => file.has_snapshots(),
            Self::Nbd(nbd) => nbd.has_snapshots(),
            Self::Rbd(rbd) => rbd.has_snapshots(),
            Self::Concat(files) => files.has_snapshots(),
            Self::View(view) => view.has_snapshots(),
        }
    }

    async fn list_snapshots(&self) -> Result<Vec<StorageSnapshot>> {
        match self {
            Self::File(file) => file.list_snapshots().await,
            Self::Nbd(nbd) => nbd.list_snapshots().await,
            Self::Rbd(rbd) => Box::pin(rbd.list_snapshots()).await,
            Self::Concat(files) => files.list_snapshots().await,
            Self::View(view) => view.list_snapshots().await,
        }
    }

    async fn changes_since(&self, snapshot: &str, range: ByteRange) -> Result<Vec<StorageChange>> {
        match self {
            Self::File(file) => file.changes_since(snapshot, range).await,
            Self::Nbd(nbd) => nbd.changes_since(snapshot, range).await,
            Self::Rbd(rbd) => Box::pin(rbd.changes_since(snapshot, range)).await,
            Self::Concat(files) => files.changes_since(snapshot, range).await,
            Self::View(view) => view.changes_since(snapshot, range).await,
        }
    }

    async fn change_snapshots(&self, change: SnapshotChange<'_>) -> Result<()> {
        match self {
            Self::File(file) => file.change_snapshots(change).await,
            Self::Nbd(nbd) => nbd.change_snapshots(change).await,
            Self::Rbd(rbd) => Box::pin(rbd.change_snapshots(change)).await,
            Self::Concat(files) => files.change_snapshots(change).await,
            Self::View(view) => view.change_snapshots(change).await,
        }
    }
}
