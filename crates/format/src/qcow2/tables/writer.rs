//! Writes the tables of an open image, and flushes them, without the image's lock.
//!
//! 1. A write owns its bytes. A write is counted as in flight until the storage has completed it,
//!    even if its future was dropped, so that a later write of the same table can wait for it
//!    ([`TableWriter::drained`]).
//! 2. Writes of the header are made one at a time, because each replaces whole blocks.
//! 3. The first failure is stored, and no table is written until the image is opened again. ENOSPC
//!    of a write is not stored: the write is repeated, which also completes a partial write. ENOSPC
//!    of a flush is stored.

use std::future::Future;
use std::ops::Range;

use async_lock::Semaphore;
use blockhouse_core::sync::{ErrorLatch, WaitGroup, run_all};
use blockhouse_core::{Buffer, ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode};

use crate::qcow2::layout::header::SECTOR;
use crate::qcow2::layout::table_io;
use crate::qcow2::layout::table_write::TableWrite;

/// Maximum number of table writes in flight.
const MAX_IN_FLIGHT: usize = 16;
/// Bytes of zeros in one write.
const CHUNK_SIZE: u64 = 1 << 20;

/// The hint about tables that could not be written.
const FAILED_HINT: &str = "metadata could not be written: run check, then open the image again";

/// The writer of an image's tables.
pub(crate) struct TableWriter<S> {
    storage: S,
    /// The data file, if the guest's clusters are not in `storage`.
    data: Option<S>,
    /// The first failure to write tables.
    failure: ErrorLatch,
    writes: WaitGroup,
    /// Held by the task that changes the header.
    header_lock: Semaphore,
    header_writes: WaitGroup,
}

impl<S: Storage> TableWriter<S> {
    pub(crate) fn new(storage: S) -> Self {
        Self {
            storage,
            data: None,
            failure: ErrorLatch::new(FAILED_HINT),
            writes: WaitGroup::new(),
            header_lock: Semaphore::new(1),
            header_writes: WaitGroup::new(),
        }
    }

    /// Sets the data file, which has the guest's clusters.
    pub(crate) fn set_data_file(&mut self, data: S) {
        self.data = Some(data);
    }

    /// The image's own file, which has the tables.
    pub(crate) fn storage(&self) -> &S {
        &self.storage
    }

    /// The data file, if the image has a data file and this file is open.
    pub(crate) fn data_file(&self) -> Option<&S> {
        self.data.as_ref()
    }

    /// Writes tables concurrently, and waits for all writes that were begun, even if one of them
    /// fails.
    pub(crate) async fn write(&self, writes: &[TableWrite], durability: Durability) -> Result<()> {
        let writes = writes.iter().map(|write| self.write_one(write, durability));
        run_all(MAX_IN_FLIGHT, writes).await
    }

    fn write_one(
        &self,
        write: &TableWrite,
        durability: Durability,
    ) -> impl Future<Output = Result<()>> {
        let block = self.storage.capabilities().alignment.offset as usize;
        let mut buffer = Buffer::new(write.bytes.len().next_multiple_of(block));
        buffer.bytes_mut()[..write.bytes.len()].copy_from_slice(&write.bytes);
        let vector = buffer.lend().with_guard(self.writes.enter());
        self.storage.write(write.offset, vector, durability)
    }

    /// Fills a range with zeros, so that the host has space for the range.
    pub(crate) async fn write_zeros(&self, range: ByteRange) -> Result<()> {
        let mut at = range.offset();
        while at < range.end() {
            let length = (range.end() - at).min(CHUNK_SIZE);
            let mut zeros = Buffer::new(length as usize);
            let vector = zeros.lend().with_guard(self.writes.enter());
            self.storage.write(at, vector, Durability::None).await?;
            at += length;
        }
        Ok(())
    }

    /// Fills a range with written zeros without transferring data. Not durable before the next full
    /// flush.
    pub(crate) async fn prepare_zeros(&self, range: ByteRange) -> Result<()> {
        let held = Buffer::new(0).lend().with_guard(self.writes.enter());
        self.storage.prepare_zeroes(range, held).await
    }

    /// Changes the first sector, which holds all fields of the header that ever change. The change
    /// is durable with the next flush.
    pub(crate) async fn write_header<T>(&self, patch: impl FnOnce(&mut [u8]) -> T) -> Result<T> {
        self.write_header_part(0..SECTOR, patch).await
    }

    /// Changes a part of the first cluster, by a write of whole blocks. The change is durable with
    /// the next flush. Changes are made one at a time, so that no change restores bytes that
    /// another change has replaced.
    pub(crate) async fn write_header_part<T>(
        &self,
        part: Range<usize>,
        patch: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        let _alone = self.header_lock.acquire().await;
        // A write whose future was dropped may still be in flight.
        self.header_writes.wait().await;
        let block = (self.storage.capabilities().alignment.offset as usize).max(SECTOR);
        let start = part.start / block * block;
        let length = part.end.next_multiple_of(block) - start;
        let mut bytes = table_io::read(&self.storage, start as u64, length).await?;
        let patched = patch(&mut bytes[part.start - start..part.end - start]);
        let mut buffer = Buffer::new(bytes.len());
        buffer.bytes_mut().copy_from_slice(&bytes);
        let guards = (self.writes.enter(), self.header_writes.enter());
        let vector = buffer.lend().with_guard(guards);
        self.storage.write(start as u64, vector, Durability::None).await?;
        Ok(patched)
    }

    /// Waits until no write of tables is in flight.
    pub(crate) async fn drained(&self) {
        self.writes.wait().await;
    }

    /// The table writes in flight, for callers that wait for them in another way.
    pub(crate) fn writes(&self) -> &WaitGroup {
        &self.writes
    }

    /// Flushes the data file, then the image. Tables that refer to the data are written afterwards.
    /// A failure of any kind is recorded, because data that tables are about to refer to may be
    /// lost.
    pub(crate) async fn flush(&self, sync: SyncMode) -> Result<()> {
        let data = match &self.data {
            Some(data) => data.flush(sync).await.inspect_err(|error| self.fail(error)),
            None => Ok(()),
        };
        data.and(self.flush_image(sync).await)
    }

    /// As [`flush`](Self::flush), without the data file.
    pub(crate) async fn flush_image(&self, sync: SyncMode) -> Result<()> {
        self.storage.flush(sync).await.inspect_err(|error| self.fail(error))
    }

    /// Returns a range of the file to the host. The punch is a hint: if it fails, the file keeps
    /// the space.
    pub(crate) async fn punch(&self, range: ByteRange) {
        if let Some(range) = table_io::whole_blocks(&self.storage, range) {
            let _ = self.storage.discard(range).await;
        }
    }

    /// The first failure, if there was one.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Fails if tables could not be written before.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn check_failure(&self) -> Result<()> {
        self.failure.check()
    }

    /// Records the reason why tables could not be written, unless the reason is ENOSPC.
    pub(crate) fn record(&self, error: &Error) {
        if error.kind() != ErrorKind::NoSpace {
            self.fail(error);
        }
    }

    /// Records a failure of any kind, unless an earlier failure is recorded.
    pub(crate) fn fail(&self, error: &Error) {
        self.failure.set(error);
    }
}
