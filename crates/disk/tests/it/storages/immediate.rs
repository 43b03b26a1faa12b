//! A storage that is always done at once.

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, IoVector, Offload, Result, Storage,
    SyncMode, Unmap,
};
use blockhouse_sim::PLAIN_CAPABILITIES;

/// A storage that is always done at once.
pub struct Immediate(pub Alignment);

impl Storage for Immediate {
    fn name(&self) -> &str {
        "immediate"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            alignment: self.0,
            write_zeroes: Offload::Available,
            discard: Offload::Available,
            ..PLAIN_CAPABILITIES
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
