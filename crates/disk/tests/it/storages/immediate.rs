//! A storage that is always done at once.

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Fua, FuaCost, GroupCommit,
    IoVector, Offload, ReadAfterDiscard, Result, Storage, SyncMode, Unmap, WriteCache,
};

/// A storage that is always done at once.
pub struct Immediate(pub Alignment);

impl Storage for Immediate {
    fn name(&self) -> &str {
        "immediate"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fua: Fua::Native,
            write_cache: WriteCache::Volatile,
            fua_cost: FuaCost::NoFlush,
            group_commit: GroupCommit::Never,
            alignment: self.0,
            write_zeroes: Offload::Available,
            prepare_zeroes: Offload::Unavailable,
            discard: Offload::Available,
            read_after_discard: ReadAfterDiscard::Undefined,
        }
    }

    fn size(&self) -> u64 {
        1 << 30
    }

    async fn read(&self, _offset: u64, _into: IoVector) -> Result<()> {
        Ok(())
    }

    async fn write(&self, _offset: u64, _from: IoVector, _durability: Durability) -> Result<()> {
        Ok(())
    }

    async fn write_zeroes(&self, _range: ByteRange, _unmap: Unmap) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        Ok(())
    }

    async fn resize(&self, _size: u64) -> Result<()> {
        Ok(())
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        Ok((Allocation::Data, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}
