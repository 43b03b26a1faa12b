//! Runs writebacks, and lets tasks wait for a running writeback.

use std::ops::Range;

use async_lock::SemaphoreGuard;
use blockhouse_core::{Capabilities, Fua, FuaCost, Offload, Result, Storage, SyncMode, rare};
use event_listener::EventListener;

use crate::MetadataSync;
use crate::qcow2::tables::{WritebackBatch, WritebackReason};

use super::Metadata;
use super::order::{BatchWriter, Flushed, MAX_FUA_WRITES};

/// The next step of a task that needs changes to be durable.
enum WritebackStep {
    /// No step: the changes are durable.
    Durable,
    /// Another task runs a writeback.
    Wait(EventListener),
    /// The task runs a writeback.
    Run,
}

/// The guard of the only running writeback. When the guard is dropped, another writeback may run.
/// If the dropped writeback is unfinished, the tables that it has copied become dirty again.
struct WritebackGuard<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    batch: Option<WritebackBatch>,
    /// Clusters that are freeable once the writes in flight have completed.
    abandoned: Vec<Range<u64>>,
}

impl<S: Storage> Drop for WritebackGuard<'_, S> {
    fn drop(&mut self) {
        let mut state = self.metadata.state.lock();
        if let Some(batch) = self.batch.take() {
            state.tables.abort_writeback(batch);
            state.allocator.frees.abort_writeback();
        }
        for clusters in self.abandoned.drain(..) {
            state.allocator.frees.abandon(clusters);
        }
        state.is_running = false;
        drop(state);
        self.metadata.done.notify(usize::MAX);
    }
}

/// Blocks writebacks and decrements of refcounts. No metadata is dirty when the block begins.
pub(crate) struct WritebackBlock<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    _no_frees: SemaphoreGuard<'a>,
}

impl<S: Storage> Drop for WritebackBlock<'_, S> {
    fn drop(&mut self) {
        self.metadata.state.lock().is_running = false;
        self.metadata.done.notify(usize::MAX);
    }
}

impl<S: Storage> Metadata<S> {
    /// Makes everything that was linked so far durable: data first, then metadata. Waits for data
    /// writes that are in flight.
    pub(crate) async fn flush(&self, sync: SyncMode) -> Result<()> {
        match (self.make_durable(WritebackReason::PendingData).await?, sync) {
            (Flushed::Yes, SyncMode::Data) => Ok(()),
            _ => self.sync(sync).await,
        }
    }

    /// Makes the metadata of all linked changes durable, with their data.
    pub(crate) async fn sync_metadata(&self) -> Result<()> {
        self.make_durable(WritebackReason::StableData).await.map(drop)
    }

    /// As [`sync_metadata`](Self::sync_metadata); covers the data writes in flight, too.
    pub(crate) async fn sync_data_and_metadata(&self) -> Result<()> {
        self.make_durable(WritebackReason::PendingData).await.map(drop)
    }

    /// The way to make extents durable with the fewest operations. FUA is used if few changes are
    /// pending, few slices are dirty, and all data that dirty slices refer to is stable. A flush is
    /// used if FUA implies a flush, as it does when the file grows, because one flush for data and
    /// refcounts is cheaper than one flush for each.
    pub(crate) fn metadata_sync_mode(&self) -> MetadataSync {
        let Capabilities { fua, fua_cost, prepare_zeroes, .. } = self.storage().capabilities();
        let mut state = self.state.lock();
        let pending = state.mapping.pending_changes();
        if prepare_zeroes == Offload::Available && pending > 0 {
            state.allocator.want_prepared();
        }
        let headers = &state.tables.headers;
        let is_crowd = pending > MAX_FUA_WRITES;
        let is_resizing = headers.wanted().size != headers.disk().size;
        let fua_flushes =
            fua_cost == FuaCost::ExtraFlush || state.allocator.is_growing(&state.tables);
        let is_costly = is_crowd || is_resizing || fua_flushes;
        if fua == Fua::Native && !is_costly && state.tables.cache.has_few_dirty(2 * MAX_FUA_WRITES)
        {
            MetadataSync::Fua
        } else {
            MetadataSync::Flush
        }
    }

    /// Writes all changes to the disk: afterwards no frees are pending.
    pub(crate) async fn write_everything(&self) -> Result<()> {
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            state.allocator.release_reserve(&mut state.tables);
        }
        // Each writeback frees clusters and so changes refcounts, which need another writeback.
        while self.has_changes() {
            rare(write_back_and_free(self)).await?;
        }
        // A dropped writeback may still be in flight.
        self.writer.drained().await;
        Ok(())
    }

    fn has_changes(&self) -> bool {
        let state = self.state.lock();
        state.tables.has_dirty() || state.allocator.frees.has_any()
    }

    /// Waits until the changes made so far are durable, running writebacks if no other task does.
    /// Returns whether the operation included a flush that began after the call.
    async fn make_durable(&self, reason: WritebackReason) -> Result<Flushed> {
        let target = self.state.lock().tables.version();
        let mut flushed = Flushed::No;
        loop {
            self.writer.check_failure()?;
            match self.next_step(target) {
                WritebackStep::Durable => return Ok(flushed),
                WritebackStep::Wait(event) => event.await,
                WritebackStep::Run => flushed = rare(self.write_back(reason)).await?,
            }
        }
    }

    fn next_step(&self, target: u64) -> WritebackStep {
        let state = self.state.lock();
        if state.tables.is_durable(target) {
            WritebackStep::Durable
        } else if state.is_running {
            WritebackStep::Wait(self.done.listen())
        } else {
            WritebackStep::Run
        }
    }

    /// Writes all dirty metadata, or waits for the running writeback. Slices of the cache become
    /// clean.
    pub(crate) async fn write_back_all(&self) -> Result<()> {
        self.writer.check_failure()?;
        rare(self.write_back(WritebackReason::Full)).await.map(drop)
    }

    /// Writes all dirty metadata, and blocks writebacks. The result also blocks decrements of
    /// refcounts, because a task decrements them after the end of its writeback.
    pub(crate) async fn block_writeback(&self) -> Result<WritebackBlock<'_, S>> {
        loop {
            self.writer.check_failure()?;
            let no_frees = self.free_lock.acquire().await;
            let waiting = {
                let mut state = self.state.lock();
                if state.is_running {
                    Some(self.done.listen())
                } else if state.tables.has_dirty() || state.allocator.frees.has_any() {
                    None
                } else {
                    state.is_running = true;
                    return Ok(WritebackBlock { metadata: self, _no_frees: no_frees });
                }
            };
            drop(no_frees);
            match waiting {
                Some(event) => event.await,
                None => rare(write_back_and_free(self)).await?,
            }
        }
    }

    /// Runs a writeback if none runs, else waits for the running writeback.
    pub(super) async fn write_back(&self, reason: WritebackReason) -> Result<Flushed> {
        let waiting = {
            let mut state = self.state.lock();
            let is_running = std::mem::replace(&mut state.is_running, true);
            is_running.then(|| self.done.listen())
        };
        if let Some(event) = waiting {
            event.await;
            return Ok(Flushed::No);
        }
        let mut running = WritebackGuard { metadata: self, batch: None, abandoned: Vec::new() };
        running.abandoned = self.state.lock().allocator.frees.take_abandoned();
        if reason == WritebackReason::PendingData {
            self.data_writes.synchronize().await;
        }
        self.writer.drained().await;
        self.writer.check_failure()?;
        for clusters in running.abandoned.drain(..) {
            self.state.lock().allocator.frees.defer_unlinked(clusters);
        }
        running.batch = self.begin_writeback(reason);
        let mut flushed = Flushed::No;
        if let Some(batch) = &running.batch {
            let outcome = BatchWriter(self).write(batch).await;
            flushed = outcome.inspect_err(|error| self.writer.record(error))?;
        }
        if let Some(batch) = running.batch.take() {
            let mut state = self.state.lock();
            state.tables.finish_writeback(batch);
            state.allocator.frees.finish_writeback();
        }
        drop(running);
        // Neither a flush nor a write fails if earlier changes' clusters remain allocated: their
        // changes are durable. The next writeback tries again.
        let _ = self.process_frees().await;
        Ok(flushed)
    }

    /// Copies the dirty metadata. If nothing is dirty, returns `None`, and pending frees become
    /// freeable.
    fn begin_writeback(&self, reason: WritebackReason) -> Option<WritebackBatch> {
        let mut state = self.state.lock();
        state.allocator.frees.begin_writeback();
        let batch = state.tables.begin_writeback(reason);
        if batch.is_none() {
            state.allocator.frees.finish_writeback();
        }
        batch
    }
}

/// As [`Metadata::write_back_all`], and fails if clusters cannot be freed.
async fn write_back_and_free<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    metadata.write_back(WritebackReason::Full).await?;
    metadata.process_frees().await.map(drop)
}
