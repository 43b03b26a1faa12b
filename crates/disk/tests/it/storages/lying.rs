//! A simulated disk that says what is not so.

use blockhouse_core::{
    ByteRange, Capabilities, Durability, IoVector, Result, Storage, SyncMode, Unmap, WriteCache,
};
use blockhouse_sim::{SimDisk, forward_storage};

/// A storage that breaks its promises in one way.
pub struct Lying {
    pub disk: SimDisk,
    pub lie: Lie,
}

#[derive(Clone, Copy, Debug)]
pub enum Lie {
    /// Durable writes are plain ones.
    DurableWrites,
    /// Flushes do nothing.
    Flushes,
    /// It claims to have no volatile cache.
    NoCache,
    /// A flush that fails says that it did not.
    FlushesSucceed,
    /// Zero writes stop short of the end of their range.
    ShortZeroes,
}

impl Storage for Lying {
    forward_storage!(disk: name, size, read, prepare_zeroes, free_space, discard, resize, block_status, prefetch);

    fn capabilities(&self) -> Capabilities {
        let capabilities = self.disk.capabilities();
        match self.lie {
            Lie::NoCache => Capabilities { write_cache: WriteCache::None, ..capabilities },
            _ => capabilities,
        }
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        match self.lie {
            Lie::DurableWrites => self.disk.write(offset, from, Durability::None).await,
            _ => self.disk.write(offset, from, durability).await,
        }
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        let block = u64::from(self.disk.capabilities().alignment.offset).max(16);
        match self.lie {
            Lie::ShortZeroes if range.length() > block => {
                self.disk.write_zeroes(range.truncate(range.length() - block), unmap).await
            }
            _ => self.disk.write_zeroes(range, unmap).await,
        }
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        match self.lie {
            Lie::Flushes => Ok(()),
            Lie::FlushesSucceed => {
                let _ = self.disk.flush(sync).await;
                Ok(())
            }
            _ => self.disk.flush(sync).await,
        }
    }
}
