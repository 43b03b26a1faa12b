//! One type for the storages of the tests that are none of the simulator's: the whole path is
//! compiled for each type that it stands on, which takes longer than most of the tests.

mod broken;
mod flawed;
mod immediate;
pub mod log_words;
mod lying;
mod memory;

use std::time::Duration;

use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, IoVector, Result, Storage, SyncMode, Unmap,
};
use blockhouse_engine::HostFile;

pub use broken::{Broken, Policy};
pub use flawed::{Flaw, FlawedMemory, FlawedStorage};
pub use immediate::Immediate;
pub use lying::{Lie, Lying};
pub use memory::Memory;

/// A storage of one of the tests.
pub enum AnyStorage {
    Broken(Broken),
    Flawed(FlawedStorage),
    HostFile(HostFile),
    Immediate(Immediate),
    Lying(Lying),
    Memory(Memory),
}

/// The same expression for whichever it is.
macro_rules! each {
    ($any:expr, $storage:ident => $call:expr) => {
        match $any {
            AnyStorage::Broken($storage) => $call,
            AnyStorage::Flawed($storage) => $call,
            AnyStorage::HostFile($storage) => $call,
            AnyStorage::Immediate($storage) => $call,
            AnyStorage::Lying($storage) => $call,
            AnyStorage::Memory($storage) => $call,
        }
    };
}

impl Storage for AnyStorage {
    fn name(&self) -> &str {
        each!(self, storage => storage.name())
    }

    fn capabilities(&self) -> Capabilities {
        each!(self, storage => storage.capabilities())
    }

    fn size(&self) -> u64 {
        each!(self, storage => storage.size())
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        each!(self, storage => storage.read(offset, into).await)
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        each!(self, storage => storage.write(offset, from, durability).await)
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        each!(self, storage => storage.write_zeroes(range, unmap).await)
    }

    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        each!(self, storage => storage.prepare_zeroes(range, held).await)
    }

    async fn free_space(&self) -> Result<Option<u64>> {
        each!(self, storage => storage.free_space().await)
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        each!(self, storage => storage.discard(range).await)
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        each!(self, storage => storage.flush(sync).await)
    }

    async fn resize(&self, size: u64) -> Result<()> {
        each!(self, storage => storage.resize(size).await)
    }

    fn check_size(&self, size: u64) -> Result<()> {
        each!(self, storage => storage.check_size(size))
    }

    async fn extend_hint(&self, size: u64) {
        each!(self, storage => storage.extend_hint(size).await)
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        each!(self, storage => storage.block_status(range).await)
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        each!(self, storage => storage.prefetch(range).await)
    }

    async fn last_change(&self) -> Result<Option<Duration>> {
        each!(self, storage => storage.last_change().await)
    }

    fn needs_close(&self) -> bool {
        each!(self, storage => storage.needs_close())
    }

    async fn close(&self) -> Result<()> {
        each!(self, storage => storage.close().await)
    }
}
