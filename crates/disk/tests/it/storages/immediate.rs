//! A storage that is always done at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, IoVector, Offload, Result, Storage,
    SyncMode, Unmap,
};
use blockhouse_sim::PLAIN_CAPABILITIES;

/// A storage that is always done at once. It counts its reads, writes and flushes.
pub struct Immediate {
    alignment: Alignment,
    calls: Arc<AtomicU64>,
}

impl Immediate {
    pub fn new(alignment: Alignment) -> Self {
        Self { alignment, calls: Arc::default() }
    }

    /// The number of reads, writes and flushes, while it grows.
    pub fn calls(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.calls)
    }

    fn count(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
}

impl Storage for Immediate {
    fn name(&self) -> &str {
        "immediate"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            alignment: self.alignment,
            write_zeroes: Offload::Available,
            discard: Offload::Available,
            ..PLAIN_CAPABILITIES
        }
    }

    fn size(&self) -> u64 {
        1 << 30
    }

    async fn read(&self, _offset: u64, _into: IoVector) -> Result<()> {
        self.count();
        Ok(())
    }

    async fn write(&self, _offset: u64, _from: IoVector, _durability: Durability) -> Result<()> {
        self.count();
        Ok(())
    }

    async fn write_zeroes(&self, _range: ByteRange, _unmap: Unmap) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        self.count();
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
