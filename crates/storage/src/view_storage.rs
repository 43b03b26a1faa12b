//! Data that another layer provides, as read-only storage.

use std::sync::Arc;

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, FuaCost,
    GroupCommit, IoVector, Offload, ReadAfterDiscard, Result, Storage, SyncMode, Unmap, WriteCache,
};
use futures_util::future::LocalBoxFuture;

/// The data of a [`ViewStorage`]. Each method behaves as the method of [`Storage`] with the same
/// name. Any range is allowed, also past the end.
pub trait StorageView: Send + Sync + 'static {
    /// The name for messages.
    fn name(&self) -> &str;

    /// The size in bytes; it never changes.
    fn size(&self) -> u64;

    /// Fills `into` with the bytes from `offset` on; bytes past the end are zeros.
    fn read(&self, offset: u64, into: IoVector) -> LocalBoxFuture<'_, Result<()>>;

    /// The status of the start of `range`, and the number of bytes that have this status.
    fn block_status(&self, range: ByteRange) -> LocalBoxFuture<'_, Result<(Allocation, u64)>>;
}

impl<V: StorageView> StorageView for Arc<V> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn size(&self) -> u64 {
        (**self).size()
    }

    fn read(&self, offset: u64, into: IoVector) -> LocalBoxFuture<'_, Result<()>> {
        (**self).read(offset, into)
    }

    fn block_status(&self, range: ByteRange) -> LocalBoxFuture<'_, Result<(Allocation, u64)>> {
        (**self).block_status(range)
    }
}

/// A view as storage. All changes are refused.
pub struct ViewStorage(Box<dyn StorageView>);

impl ViewStorage {
    /// The storage with the data of this view.
    pub fn new(view: impl StorageView) -> Self {
        Self(Box::new(view))
    }

    fn refuse(&self) -> Result<()> {
        Err(Error::new(ErrorKind::ReadOnly, "is only read").on(self.0.name()))
    }
}

impl Storage for ViewStorage {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fua: Fua::Native,
            fua_cost: FuaCost::NoFlush,
            write_cache: WriteCache::None,
            group_commit: GroupCommit::Never,
            alignment: Alignment::BYTE,
            write_zeroes: Offload::Unavailable,
            prepare_zeroes: Offload::Unavailable,
            discard: Offload::Unavailable,
            read_after_discard: ReadAfterDiscard::Undefined,
        }
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        self.0.read(offset, into).await
    }

    async fn write(&self, _offset: u64, _from: IoVector, _durability: Durability) -> Result<()> {
        self.refuse()
    }

    async fn write_zeroes(&self, _range: ByteRange, _unmap: Unmap) -> Result<()> {
        self.refuse()
    }

    async fn discard(&self, _range: ByteRange) -> Result<()> {
        self.refuse()
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        Ok(())
    }

    fn check_size(&self, size: u64) -> Result<()> {
        if size == self.size() { Ok(()) } else { self.refuse() }
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.check_size(size)
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        self.0.block_status(range).await
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}
