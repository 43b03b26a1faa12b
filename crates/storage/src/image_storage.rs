//! The storages that an image can be on, as one type.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, IoVector, Result, SnapshotChange, Storage,
    StorageChange, StorageSnapshot, SyncMode, Unmap,
};
use blockhouse_engine::HostFile;

use crate::{Concat, NbdStorage, NullStorage, RbdStorage, ViewStorage};

/// A file, or an image or export on another server or cluster.
///
/// An operation of a file or of the null device allocates no future. The futures of the other
/// storages are boxed, so that they do not make the future of a file's operation larger.
pub enum ImageStorage {
    /// A file or block device of this host.
    File(HostFile),
    /// An export of an NBD server.
    Nbd(Box<NbdStorage>),
    /// An image in Ceph.
    Rbd(Box<RbdStorage>),
    /// The files of an image that consists of several files, or a part of one file.
    Concat(Box<Concat<HostFile>>),
    /// Data that another layer provides, read-only.
    View(Box<ViewStorage>),
    /// A null device: reads return zeros, and writes are dropped.
    Null(NullStorage),
}

impl ImageStorage {
    /// Closes the connections to an NBD server; no request may be in flight. Every later request to
    /// the server fails. Has no effect on other storages.
    pub fn disconnect(&self) {
        if let Self::Nbd(nbd) = self {
            nbd.disconnect();
        }
    }

    /// From now on a request to an NBD server fails if the server does not answer within this time;
    /// with `None` the request waits without limit. Has no effect on files and Ceph images, whose
    /// time limits the host or the cluster sets.
    pub fn set_answer_time(&self, time: Option<Duration>) {
        if let Self::Nbd(nbd) = self {
            nbd.set_answer_time(time);
        }
    }

    /// The file, if the storage is exactly one file.
    pub fn as_file(&self) -> Option<&HostFile> {
        match self {
            Self::File(file) => Some(file),
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) | Self::Null(_) => None,
        }
    }

    /// The files of this host that the storage consists of; none if it is on another server or a
    /// cluster.
    pub fn files(&self) -> Vec<&HostFile> {
        match self {
            Self::File(file) => vec![file],
            Self::Concat(files) => files.files().collect(),
            Self::Nbd(_) | Self::Rbd(_) | Self::View(_) | Self::Null(_) => Vec::new(),
        }
    }

    /// The name of the file that has the byte at `offset`, and the byte's offset in that file.
    pub fn locate(&self, offset: u64) -> (&str, u64) {
        match self {
            Self::Concat(files) => files.locate(offset),
            _ => (self.name(), offset),
        }
    }

    /// The current size according to the host or the cluster; another program may have changed it.
    /// `None` if it cannot change after opening.
    ///
    /// # Errors
    /// The error of the host or of the cluster.
    pub async fn query_size(&self) -> Result<Option<u64>> {
        match self {
            Self::File(file) => file.query_size().map(Some),
            Self::Nbd(_) | Self::Concat(_) | Self::View(_) | Self::Null(_) => Ok(None),
            Self::Rbd(rbd) => rbd.query_size().await.map(Some),
        }
    }

    /// Accepts a [new size](Self::query_size). A size that is less than the current one is ignored.
    pub fn set_min_size(&self, size: u64) {
        match self {
            Self::File(file) => file.set_min_size(size),
            Self::Nbd(_) | Self::Concat(_) | Self::View(_) | Self::Null(_) => {}
            Self::Rbd(rbd) => rbd.set_min_size(size),
        }
    }
}

impl From<HostFile> for ImageStorage {
    fn from(file: HostFile) -> Self {
        Self::File(file)
    }
}

/// Calls a method of the storage in the enum.
macro_rules! ask {
    ($self:ident.$method:ident($($argument:ident),*)) => {
        match $self {
            Self::File(file) => file.$method($($argument),*),
            Self::Nbd(nbd) => nbd.$method($($argument),*),
            Self::Rbd(rbd) => rbd.$method($($argument),*),
            Self::Concat(files) => files.$method($($argument),*),
            Self::View(view) => view.$method($($argument),*),
            Self::Null(null) => null.$method($($argument),*),
        }
    };
}

/// Carries out an operation of the storage in the enum.
macro_rules! carry_out {
    ($self:ident.$method:ident($($argument:ident),*)) => {
        match $self {
            Self::File(file) => file.$method($($argument),*).await,
            Self::Nbd(nbd) => Box::pin(nbd.$method($($argument),*)).await,
            Self::Rbd(rbd) => Box::pin(rbd.$method($($argument),*)).await,
            Self::Concat(files) => Box::pin(files.$method($($argument),*)).await,
            Self::View(view) => Box::pin(view.$method($($argument),*)).await,
            Self::Null(null) => null.$method($($argument),*).await,
        }
    };
}

impl Storage for ImageStorage {
    fn name(&self) -> &str {
        ask!(self.name())
    }

    fn capabilities(&self) -> Capabilities {
        ask!(self.capabilities())
    }

    fn size(&self) -> u64 {
        ask!(self.size())
    }

    fn grows_with_zeros(&self) -> bool {
        match self {
            Self::File(file) => file.grows_with_zeros(),
            // A storage of fixed size never becomes longer; new objects of an image in Ceph are
            // empty.
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) | Self::Null(_) => true,
        }
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        carry_out!(self.read(offset, into))
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        carry_out!(self.write(offset, from, durability))
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        carry_out!(self.write_zeroes(range, unmap))
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        carry_out!(self.discard(range))
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        carry_out!(self.flush(sync))
    }

    async fn resize(&self, size: u64) -> Result<()> {
        carry_out!(self.resize(size))
    }

    async fn last_change(&self) -> Result<Option<Duration>> {
        match self {
            Self::File(file) => file.last_change().await,
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) | Self::Null(_) => {
                Ok(None)
            }
        }
    }

    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        carry_out!(self.prepare_zeroes(range, held))
    }

    async fn free_space(&self) -> Result<Option<u64>> {
        match self {
            Self::File(file) => file.free_space().await,
            Self::Nbd(_) | Self::Rbd(_) | Self::Concat(_) | Self::View(_) | Self::Null(_) => {
                Ok(None)
            }
        }
    }

    fn check_size(&self, size: u64) -> Result<()> {
        ask!(self.check_size(size))
    }

    async fn extend_hint(&self, size: u64) {
        carry_out!(self.extend_hint(size))
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        carry_out!(self.block_status(range))
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        carry_out!(self.prefetch(range))
    }

    fn cached_file(&self, range: ByteRange) -> Option<BorrowedFd<'_>> {
        ask!(self.cached_file(range))
    }

    fn takes_kernel_pages(&self) -> bool {
        ask!(self.takes_kernel_pages())
    }

    fn needs_close(&self) -> bool {
        ask!(self.needs_close())
    }

    fn begin_close(&self) {
        ask!(self.begin_close())
    }

    async fn close(&self) -> Result<()> {
        carry_out!(self.close())
    }

    fn has_snapshots(&self) -> bool {
        ask!(self.has_snapshots())
    }

    async fn list_snapshots(&self) -> Result<Vec<StorageSnapshot>> {
        carry_out!(self.list_snapshots())
    }

    async fn changes_since(&self, snapshot: &str, range: ByteRange) -> Result<Vec<StorageChange>> {
        carry_out!(self.changes_since(snapshot, range))
    }

    async fn change_snapshots(&self, change: SnapshotChange<'_>) -> Result<()> {
        carry_out!(self.change_snapshots(change))
    }
}
