//! A storage that tracks its unstable writes, and skips flushes that would change nothing.
//!
//! Completed writes are counted. The count when a flush begins is the *generation* of the flush.
//!
//! - If the generation of a flush is stable already, the flush issues nothing.
//! - One flush runs at a time; others wait. When a flush ends, each waiting flush whose generation
//!   it covered is done. The next flush covers all other waiting flushes.
//! - A flush does not cover a write that completes while the flush runs.
//! - A write with native FUA is stable when it succeeds, and is not counted. If the write fails, it
//!   is counted, because a part of its data may be written.
//! - If a storage has no FUA, the tracker turns a durable write into a write and a flush; no lower
//!   layer adds the flush. A storage that announces native FUA may refuse the first durable writes.
//!   So until a durable write has succeeded, the memory of each is kept for a second write without
//!   FUA. If only FUA was refused, FUA counts as emulated from then on.
//! - If a storage is open for writing, all earlier writes count as unstable, so the first flush is
//!   never skipped (exception: `after_flush`). Reason: another process may have written and died,
//!   and its acknowledged writes may still be in a cache.
//! - A failed flush is remembered: every later flush and durable write fails with the first errno,
//!   until the storage is opened again. Reason: the host has no record of the lost bytes, and would
//!   report success for the next flush. A failed durable write counts as a failed flush, whatever
//!   its errno, because it may report the loss of an older write, and the host reports a loss only
//!   once. There are two exceptions: a refusal of FUA, and an error that, as the storage knows,
//!   concerns only this write ([`Error::is_confined`]), as on a full host.
//! - If a durable write fails during a flush, data that the flush reports as stable may be lost. So
//!   at its end, a flush waits for the durable writes in flight, and fails if one of them failed.
//! - The first failure is kept in the image's state file, if there is one ([`FlushRecord`]), and is
//!   restored from that file, so it survives a kill of the process. The state file also keeps the
//!   time of the last change.
//! - If one flush for several durable writes in flight is cheaper than FUA for each, the later
//!   writes are written without FUA and share a flush ([`WriteMethod`]: group commit).
//! - An operation whose future is dropped is *detached*: it may end at any time. So after the first
//!   such operation, every flush is issued. By its contract, the storage reports the outcome of a
//!   detached flush or durable write to the next flush.
//!
//! Generations are counted with atomic operations: a plain write costs one addition. Only flushes
//! take a lock, and no flush holds the lock while it waits.

use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use blockhouse_core::sync::{Coalescer, Epochs, ErrorLatch, RunGuard, Turn};
use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, GroupCommit, IoVector,
    Result, SnapshotChange, Storage, StorageChange, StorageSnapshot, SyncMode, Unmap, WriteCache,
    rare,
};

use super::decide::WriteMethod;
use super::group_commit::GroupCommitTrial;
use crate::options::{Access, FlushPolicy};
use crate::state::{FlushRecord, StatePage, TrackedFile};
use crate::stats::{Content, HostOperation, HostStats};

#[cfg(test)]
mod tests;

/// The hint about a failed flush.
const FAILED_HINT: &str = "written data may be lost: check the guest's file systems and reopen";

/// A storage, and the state of its writes that are not stable.
pub struct FlushTracker<S> {
    storage: S,
    policy: FlushPolicy,
    /// The number of completed operations that only a flush makes stable. The writes before the
    /// opening for writing count as one operation. A flush that must not be skipped adds one, too.
    write_generation: AtomicU64,
    /// The number of detached operations: their futures were dropped in flight.
    detached_operations: AtomicU64,
    /// The first failure, which all later flushes and durable writes return.
    failure: ErrorLatch,
    /// The record that outlives the process, if there is one.
    record: OnceLock<FlushRecord>,
    flushes: Coalescer<StableGenerations>,
    fua_writes: Epochs,
    fua_trial: FuaTrial,
    /// The number of durable writes in flight, with FUA or without.
    durable_in_flight: AtomicUsize,
    group_commit: GroupCommitTrial,
    stats: HostStats,
}

/// The generations up to which data, and data with all metadata, is stable.
#[derive(Default)]
struct StableGenerations {
    data: u64,
    full: u64,
}

/// The outcome of the first writes with FUA: the only proof that a storage supports FUA.
#[derive(Default)]
struct FuaTrial {
    /// A write with FUA has succeeded.
    has_succeeded: AtomicBool,
    /// The storage has refused a write with FUA, but accepted the same bytes without it.
    is_refused: AtomicBool,
}

/// An operation in flight. If the guard is dropped before the operation has completed, the
/// operation counts as detached.
struct OperationGuard<'a> {
    detached_operations: &'a AtomicU64,
    record: Option<&'a FlushRecord>,
}

impl<S: Storage> FlushTracker<S> {
    pub(crate) fn new(storage: S, policy: FlushPolicy, access: Access) -> Self {
        let past = match access {
            Access::ReadWrite => 1,
            // Nothing is written to this storage, so nothing must become stable.
            Access::ReadOnly => 0,
        };
        let group_commit = GroupCommitTrial::new(storage.capabilities().group_commit);
        Self {
            storage,
            policy,
            write_generation: AtomicU64::new(past),
            detached_operations: AtomicU64::new(0),
            failure: ErrorLatch::new(FAILED_HINT),
            record: OnceLock::new(),
            flushes: Coalescer::default(),
            fua_writes: Epochs::new(),
            fua_trial: FuaTrial::default(),
            durable_in_flight: AtomicUsize::new(0),
            group_commit,
            stats: HostStats::default(),
        }
    }

    /// A tracker without unstable writes, for a storage whose earlier writes by others are stable.
    /// Until the next write, a data flush issues nothing.
    pub(crate) fn after_flush(mut self) -> Self {
        *self.write_generation.get_mut() = 0;
        self
    }

    /// The storage itself.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    pub(crate) fn stats(&self) -> &HostStats {
        &self.stats
    }

    /// The first failure, if there was one.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Notes that another process may have left unstable writes.
    pub fn note_earlier_writes(&self) {
        self.write_generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Remembers a failure that occurred in another process.
    pub fn remember_failure(&self, error: &Error) {
        self.failure.set(error);
    }

    /// Keeps the time of the last change and the first failure in this page from now on.
    pub(crate) fn keep_record(&self, page: &StatePage, file: TrackedFile) {
        let page = page.clone();
        match self.record.get() {
            Some(record) => record.move_to(page),
            // No other thread sets the record, because the image is being opened.
            None => drop(self.record.set(FlushRecord::new(page, file))),
        }
    }

    /// Remembers the failure that an earlier process has recorded, if there is one, and returns it.
    pub fn restore_failure(&self) -> Option<&Error> {
        let kept = self.record.get()?.failure()?;
        self.failure.set(&kept.on(self.storage.name()));
        self.failure.get()
    }

    /// Begins to change a range.
    fn begin_change(&self, range: ByteRange) -> OperationGuard<'_> {
        if let Some(record) = self.record.get() {
            record.count(range, self.storage.capabilities().alignment.offset.into());
        }
        self.begin_operation()
    }

    /// Begins to zero a range without sending the zeros.
    fn begin_zeroing(&self, range: ByteRange) -> OperationGuard<'_> {
        if let Some(record) = self.record.get() {
            record.count_zeroing(range, self.storage.capabilities().alignment.offset.into());
        }
        self.begin_operation()
    }

    fn begin_operation(&self) -> OperationGuard<'_> {
        let record = self.stamp();
        OperationGuard { detached_operations: &self.detached_operations, record }
    }

    /// Records the time of a change of the storage that begins or has ended now.
    fn stamp(&self) -> Option<&FlushRecord> {
        let record = self.record.get()?;
        record.stamp();
        Some(record)
    }

    /// Remembers the failure of a flush, or of a durable write. The error of the write may report a
    /// loss of data that a flush would have reported otherwise.
    fn fail(&self, error: &Error) {
        self.failure.set(error);
        if let Some(record) = self.record.get() {
            record.set_failure(error);
        }
    }

    /// Ends an operation after which a flush is needed, whether the operation succeeded or failed.
    fn complete_unstable(&self, operation: OperationGuard<'_>) {
        self.write_generation.fetch_add(1, Ordering::SeqCst);
        operation.complete();
    }

    /// A write that is stable when it succeeds.
    async fn write_fua(&self, content: Content, offset: u64, from: IoVector) -> Result<()> {
        self.check_failure()?;
        // Declared first, so dropped last. A running flush that waits for this guard then sees the
        // failure or the detached operation.
        let _in_flight = self.fua_writes.enter();
        let bytes = from.len() as u64;
        let operation = self.begin_change(ByteRange::between(offset, offset.saturating_add(bytes)));
        let timer = self.stats.begin(HostOperation::WriteFua, content, bytes);
        let outcome = self.storage.write(offset, from, Durability::Data).await;
        timer.end(&outcome);
        let Err(error) = &outcome else {
            operation.complete();
            return outcome;
        };
        if error.kind() == ErrorKind::Unsupported {
            // A refusal loses no data. The memory of the next FUA write is kept again.
            self.fua_trial.has_succeeded.store(false, Ordering::Relaxed);
        } else if !error.is_confined() {
            self.fail(error);
        }
        // A part of the data may have been written, and is not stable.
        self.complete_unstable(operation);
        outcome
    }

    /// As [`write_fua`](Self::write_fua), while no write with FUA has succeeded. If the storage
    /// refuses FUA, the data gets a plain write and a flush.
    async fn try_fua(
        &self,
        content: Content,
        offset: u64,
        from: IoVector,
        write_cache: WriteCache,
    ) -> Result<()> {
        let (from, mut kept) = from.keep();
        let refusal = match self.write_fua(content, offset, from).await {
            Ok(()) => {
                self.fua_trial.has_succeeded.store(true, Ordering::Relaxed);
                return Ok(());
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => error,
            Err(error) => return Err(error),
        };
        // The refused operation has ended and dropped its vector.
        let Some(from) = kept.lend() else { return Err(refusal) };
        self.write_plain(content, offset, from, write_cache).await?;
        // The plain write has succeeded, so the storage had refused only FUA.
        self.fua_trial.is_refused.store(true, Ordering::Relaxed);
        self.flush(SyncMode::Data).await
    }

    /// A write without FUA. Only a flush makes the write stable, unless the storage has no volatile
    /// write cache.
    async fn write_plain(
        &self,
        content: Content,
        offset: u64,
        from: IoVector,
        write_cache: WriteCache,
    ) -> Result<()> {
        let bytes = from.len() as u64;
        let operation = self.begin_change(ByteRange::between(offset, offset.saturating_add(bytes)));
        let timer = self.stats.begin(HostOperation::Write, content, bytes);
        let outcome = self.storage.write(offset, from, Durability::None).await;
        timer.end(&outcome);
        match write_cache {
            WriteCache::Volatile => self.complete_unstable(operation),
            WriteCache::None => operation.complete(),
        }
        outcome
    }

    /// Fails with the first failure, if there was one.
    pub(crate) fn check_failure(&self) -> Result<()> {
        self.failure.check()
    }

    /// The generation that a flush called now must cover.
    fn target(&self, sync: SyncMode) -> u64 {
        // A detached write may have completed just now, without being counted. A full flush is
        // never skipped, because durable writes change metadata and are not counted.
        if sync == SyncMode::Full || self.detached_operations.load(Ordering::SeqCst) > 0 {
            self.write_generation.fetch_add(1, Ordering::SeqCst) + 1
        } else {
            self.write_generation.load(Ordering::SeqCst)
        }
    }

    fn turn(&self, target: u64, sync: SyncMode) -> Result<Turn<'_, StableGenerations>> {
        let turn = self.flushes.turn(|stable| stable.of(sync) >= target);
        // This check follows the turn, because a flush that fails sets the latch before it ends its
        // turn.
        self.check_failure()?;
        Ok(turn)
    }

    async fn run(&self, run: RunGuard<'_, StableGenerations>, sync: SyncMode) -> Result<()> {
        let generation = self.write_generation.load(Ordering::SeqCst);
        loop {
            let detached = self.detached_operations.load(Ordering::SeqCst);
            let timer = self.stats.begin(HostOperation::Flush, Content::Metadata, 0);
            let outcome = self.storage.flush(sync).await;
            timer.end(&outcome);
            if let Err(error) = &outcome {
                self.fail(error);
                return outcome;
            }
            self.fua_writes.synchronize().await;
            // If operations were detached meanwhile, the storage reports their errors to its next
            // flush, so one more flush follows.
            if self.detached_operations.load(Ordering::SeqCst) == detached {
                break;
            }
        }
        self.check_failure()?;
        run.complete(|stable| stable.advance(generation, sync));
        Ok(())
    }
}

/// Operations on guests' bytes. A format uses [`Storage`] for its metadata.
impl<S: Storage> FlushTracker<S> {
    /// As [`Storage::read`], of guests' bytes.
    pub(crate) async fn read_data(&self, offset: u64, into: IoVector) -> Result<()> {
        self.read_content(Content::Data, offset, into).await
    }

    /// As [`Storage::write`], of guests' bytes.
    pub(crate) async fn write_data(
        &self,
        offset: u64,
        from: IoVector,
        durability: Durability,
    ) -> Result<()> {
        self.write_content(Content::Data, offset, from, durability).await
    }

    /// As [`Storage::write_zeroes`], of guests' bytes.
    pub(crate) async fn write_data_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        self.zero_content(Content::Data, range, unmap).await
    }

    /// As [`Storage::prepare_zeroes`], of guests' bytes.
    pub(crate) async fn prepare_data_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        self.prepare_content(Content::Data, range, held).await
    }

    /// As [`Storage::discard`], of guests' bytes.
    pub(crate) async fn discard_data(&self, range: ByteRange) -> Result<()> {
        self.discard_content(Content::Data, range).await
    }

    async fn read_content(&self, content: Content, offset: u64, into: IoVector) -> Result<()> {
        into.check_intact()?;
        let bytes = into.len() as u64;
        let timer = self.stats.begin(HostOperation::Read, content, bytes);
        let outcome = self.storage.read(offset, into).await;
        timer.end(&outcome);
        outcome
    }

    async fn write_content(
        &self,
        content: Content,
        offset: u64,
        from: IoVector,
        durability: Durability,
    ) -> Result<()> {
        from.check_intact()?;
        let Capabilities { fua, group_commit, write_cache, alignment, .. } = self.capabilities();
        let range = ByteRange::between(offset, offset.saturating_add(from.len() as u64));
        let fua = match fua {
            // A write of the last partial block cannot use FUA.
            Fua::Native if !range.is_aligned(alignment.offset.into()) => Fua::Emulated,
            fua => fua,
        };
        let counted = InFlightCount::begin(&self.durable_in_flight, durability);
        let in_flight = counted.count;
        let is_concurrent = durability == Durability::Data && fua == Fua::Native && in_flight > 1;
        let is_measured = is_concurrent && matches!(group_commit, GroupCommit::Measured { .. });
        let shares_flush = match group_commit {
            GroupCommit::Never => false,
            GroupCommit::Measured { .. } => is_measured && self.group_commit.begin(in_flight),
            GroupCommit::From(count) => in_flight >= count,
        };
        let outcome = match WriteMethod::decide(durability, fua, shares_flush) {
            WriteMethod::Plain => self.write_plain(content, offset, from, write_cache).await,
            WriteMethod::Fua if self.fua_trial.has_succeeded.load(Ordering::Relaxed) => {
                self.write_fua(content, offset, from).await
            }
            // Boxed, so that the future of the common path stays small.
            WriteMethod::Fua => rare(self.try_fua(content, offset, from, write_cache)).await,
            WriteMethod::PlainThenFlush(sync) => {
                self.check_failure()?;
                self.write_plain(content, offset, from, write_cache).await?;
                self.flush(sync).await
            }
        };
        if is_measured {
            self.group_commit.end(self.storage.name());
        }
        outcome
    }

    async fn zero_content(&self, content: Content, range: ByteRange, unmap: Unmap) -> Result<()> {
        let operation = self.begin_zeroing(range);
        let timer = self.stats.begin(HostOperation::WriteZeroes, content, range.length());
        let outcome = self.storage.write_zeroes(range, unmap).await;
        timer.end(&outcome);
        if let Some(record) = operation.record {
            record.note_zeroed();
        }
        self.complete_unstable(operation);
        outcome
    }

    async fn prepare_content(
        &self,
        content: Content,
        range: ByteRange,
        held: IoVector,
    ) -> Result<()> {
        let operation = self.begin_change(range);
        let timer = self.stats.begin(HostOperation::PrepareZeroes, content, range.length());
        let outcome = self.storage.prepare_zeroes(range, held).await;
        timer.end(&outcome);
        self.complete_unstable(operation);
        outcome
    }

    async fn discard_content(&self, content: Content, range: ByteRange) -> Result<()> {
        let operation = self.begin_change(range);
        let timer = self.stats.begin(HostOperation::Discard, content, range.length());
        let outcome = self.storage.discard(range).await;
        timer.end(&outcome);
        self.complete_unstable(operation);
        outcome
    }
}

/// A durable write in flight, counted until it is dropped.
struct InFlightCount<'a> {
    in_flight: Option<&'a AtomicUsize>,
    /// The number of durable writes in flight when this one began, itself included.
    count: usize,
}

impl<'a> InFlightCount<'a> {
    fn begin(in_flight: &'a AtomicUsize, durability: Durability) -> Self {
        if durability.sync().is_none() {
            return Self { in_flight: None, count: 0 };
        }
        let count = in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        Self { in_flight: Some(in_flight), count }
    }
}

impl Drop for InFlightCount<'_> {
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight {
            in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl StableGenerations {
    fn of(&self, sync: SyncMode) -> u64 {
        match sync {
            SyncMode::Data => self.data,
            SyncMode::Full => self.full,
        }
    }

    fn advance(&mut self, generation: u64, sync: SyncMode) {
        self.data = self.data.max(generation);
        if sync == SyncMode::Full {
            self.full = self.full.max(generation);
        }
    }
}

impl OperationGuard<'_> {
    fn complete(self) {
        // The operation may have changed the file as late as now.
        if let Some(record) = self.record {
            record.stamp();
        }
        std::mem::forget(self);
    }
}

impl Drop for OperationGuard<'_> {
    fn drop(&mut self) {
        self.detached_operations.fetch_add(1, Ordering::SeqCst);
    }
}

impl<S: Storage> Storage for FlushTracker<S> {
    fn name(&self) -> &str {
        self.storage.name()
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = self.storage.capabilities();
        let fua = match (self.policy, capabilities.fua) {
            (FlushPolicy::Ignore, _) => Fua::Ignored,
            (FlushPolicy::Honor, Fua::Native)
                if self.fua_trial.is_refused.load(Ordering::Relaxed) =>
            {
                Fua::Emulated
            }
            (FlushPolicy::Honor, fua) => fua,
        };
        Capabilities { fua, ..capabilities }
    }

    fn size(&self) -> u64 {
        self.storage.size()
    }

    fn grows_with_zeros(&self) -> bool {
        self.storage.grows_with_zeros()
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        self.read_content(Content::Metadata, offset, into).await
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        self.write_content(Content::Metadata, offset, from, durability).await
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        self.zero_content(Content::Metadata, range, unmap).await
    }

    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        self.prepare_content(Content::Metadata, range, held).await
    }

    async fn free_space(&self) -> Result<Option<u64>> {
        self.storage.free_space().await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        self.discard_content(Content::Metadata, range).await
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        if self.capabilities().fua == Fua::Ignored {
            return Ok(());
        }
        let target = self.target(sync);
        let mut has_waited = false;
        loop {
            match self.turn(target, sync)? {
                Turn::Covered => {
                    if has_waited {
                        self.stats.flush_shared()
                    } else {
                        self.stats.flush_skipped()
                    }
                    return Ok(());
                }
                Turn::Wait(ended) => ended.await,
                Turn::Run(run) => return self.run(run, sync).await,
            }
            has_waited = true;
        }
    }

    async fn resize(&self, size: u64) -> Result<()> {
        let operation = self.begin_operation();
        let outcome = self.storage.resize(size).await;
        self.complete_unstable(operation);
        outcome
    }

    async fn last_change(&self) -> Result<Option<Duration>> {
        self.storage.last_change().await
    }

    fn check_size(&self, size: u64) -> Result<()> {
        self.storage.check_size(size)
    }

    async fn extend_hint(&self, size: u64) {
        self.stamp();
        // The hint changes no acknowledged data, so it is not counted.
        self.storage.extend_hint(size).await;
        self.stamp();
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        self.storage.block_status(range).await
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        self.storage.prefetch(range).await
    }

    fn cached_file(&self, range: ByteRange) -> Option<BorrowedFd<'_>> {
        self.storage.cached_file(range)
    }

    fn takes_kernel_pages(&self) -> bool {
        self.storage.takes_kernel_pages()
    }

    fn needs_close(&self) -> bool {
        self.storage.needs_close()
    }

    fn begin_close(&self) {
        self.storage.begin_close();
    }

    async fn close(&self) -> Result<()> {
        self.storage.close().await
    }

    fn has_snapshots(&self) -> bool {
        self.storage.has_snapshots()
    }

    async fn list_snapshots(&self) -> Result<Vec<StorageSnapshot>> {
        self.storage.list_snapshots().await
    }

    async fn changes_since(&self, snapshot: &str, range: ByteRange) -> Result<Vec<StorageChange>> {
        self.storage.changes_since(snapshot, range).await
    }

    async fn change_snapshots(&self, change: SnapshotChange<'_>) -> Result<()> {
        let operation = self.begin_operation();
        let outcome = self.storage.change_snapshots(change).await;
        self.complete_unstable(operation);
        outcome
    }
}
