//! A storage of zeros that keeps nothing, for targets that never look at data. For any thread.

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Fua, FuaCost, GroupCommit,
    IoVector, Offload, ReadAfterDiscard, Result, Storage, SyncMode, Unmap, WriteCache,
};

/// A storage of this many bytes.
pub struct Null(pub u64);

impl Storage for Null {
    fn name(&self) -> &str {
        "null"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fua: Fua::Native,
            write_cache: WriteCache::Volatile,
            fua_cost: FuaCost::NoFlush,
            group_commit: GroupCommit::Never,
            alignment: Alignment { offset: 512, memory: 512 },
            write_zeroes: Offload::Available,
            prepare_zeroes: Offload::Unavailable,
            discard: Offload::Available,
            read_after_discard: ReadAfterDiscard::Zeros,
        }
    }

    fn size(&self) -> u64 {
        self.0
    }

    async fn read(&self, _offset: u64, mut into: IoVector) -> Result<()> {
        into.fill(0);
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
        Ok((Allocation::Hole, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}
