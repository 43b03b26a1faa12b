//! Carrying rounds out, in the order that no crash can turn into a lie (docs/qcow2.md, "Order"):
//!
//! 1. refcounts and tables that nothing refers to yet; flush: they and all data are durable;
//! 2. if the refcount table changed: its entries, or the header that points to its new place; flush;
//! 3. slices of L2 tables, L1 entries, a new size; flush. A few slices alone carry FUA instead.
//!
//! Rounds run one at a time. Whoever needs one that another is running waits for it, and those who
//! come too late for it share the next. Before a round that serves plain writes begins, it waits for the
//! data of others like them that is in flight: their own round would come right behind. A failed write of a table is remembered, and nothing that
//! depends on it is written any more; only for want of room nothing has begun, and the next round
//! tries again.

use std::future::{Future, ready};
use std::sync::atomic::Ordering;

use async_lock::SemaphoreGuard;
use blockhouse_core::{
    Buffer, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, FuaCost, Result, Storage,
    SyncMode,
};
use event_listener::EventListener;
use futures_util::stream::{self, StreamExt};

use super::header::{Header, Incompatible, SECTOR};
use super::round::{Extent, Occasion, Piece, Round};
use super::slice_cache::DataStability;
use super::{Access, Qcow2, table_io};
use crate::MetadataSync;

/// How many writes of tables are in flight together.
const TOGETHER: usize = 16;
/// Up to how many changes, and pieces of a kind, go down by FUA rather than by a flush. Only one where FUA
/// brings a flush with it.
const FEW: usize = 3;

/// What somebody who needs changes to be durable does next.
enum Turn {
    /// They are.
    Durable,
    /// A round runs.
    Wait(EventListener),
    /// To run one.
    Run,
}

/// The one round that runs. Dropped, it lets others go on; unfinished, what it had taken is put back.
struct Running<'a, S: Storage> {
    image: &'a Qcow2<S>,
    round: Option<Round>,
}

impl<S: Storage> Drop for Running<'_, S> {
    fn drop(&mut self) {
        let mut state = self.image.state.lock();
        if let Some(round) = self.round.take() {
            state.undo_round(round);
        }
        state.round_is_running = false;
        drop(state);
        self.image.round_ended.notify(usize::MAX);
    }
}

impl<S: Storage> Qcow2<S> {
    /// As [`Format::flush`](crate::Format::flush).
    pub async fn flush(&self, sync: SyncMode) -> Result<()> {
        match (self.make_all_durable(Occasion::Shared).await?, sync) {
            (Flushed::Yes, SyncMode::Data) => Ok(()),
            _ => self.sync(sync).await,
        }
    }

    /// As [`Format::sync_metadata`](crate::Format::sync_metadata).
    pub async fn sync_metadata(&self) -> Result<()> {
        self.make_all_durable(Occasion::Alone).await.map(|_| ())
    }

    /// As [`Format::sync_data_and_metadata`](crate::Format::sync_data_and_metadata).
    pub async fn sync_data_and_metadata(&self) -> Result<()> {
        self.make_all_durable(Occasion::Shared).await.map(|_| ())
    }

    /// As [`Format::metadata_sync_mode`](crate::Format::metadata_sync_mode): by FUA while few changes are under way
    /// and the next round is one of few pieces whose data is stable. Not where FUA brings a flush with
    /// it, as it does where the file grows: one for data and refcounts is cheaper than one for each.
    pub fn metadata_sync_mode(&self) -> MetadataSync {
        let Capabilities { fua, fua_cost, .. } = self.storage.capabilities();
        let state = self.state.lock();
        let is_crowd = state.pending.changes() > FEW;
        let is_resizing = state.header.size != state.disk_header.size;
        let fua_flushes = fua_cost == FuaCost::ExtraFlush || state.space.is_growing();
        let is_costly = is_crowd || is_resizing || fua_flushes;
        if fua == Fua::Native && !is_costly && state.cache.is_calm(2 * FEW) {
            MetadataSync::Fua
        } else {
            MetadataSync::Flush
        }
    }

    /// As [`Format::close`](crate::Format::close).
    pub async fn close(&self) -> Result<()> {
        self.write_everything().await?;
        if self.access == Access::ReadWrite {
            self.truncate().await?;
        }
        self.finish().await
    }

    /// Brings all changes to the disk: nothing waits to be freed then.
    pub(super) async fn write_everything(&self) -> Result<()> {
        self.state.lock().give_up_room();
        // Each round frees clusters, which changes refcounts, which takes a round.
        while self.state.lock().has_changes() {
            self.run_round(Occasion::Relief).await?;
        }
        // One that was dropped may still be on its way.
        self.table_writes.wait().await;
        Ok(())
    }

    /// Calls an image clean whose changes are all written.
    pub(super) async fn finish(&self) -> Result<()> {
        self.sync(SyncMode::Data).await?;
        let is_dirty = self.state.lock().disk_header.incompatible.contains(Incompatible::DIRTY);
        if is_dirty && self.access == Access::ReadWrite {
            self.mark(Incompatible::DIRTY, Mark::Clear).await?;
        }
        Ok(())
    }

    /// Waits until the changes made so far are durable, running rounds where nobody else does.
    /// Whether a flush that began after the call was part of it.
    async fn make_all_durable(&self, occasion: Occasion) -> Result<Flushed> {
        let target = self.state.lock().version;
        let mut flushed = Flushed::No;
        loop {
            self.check_failure()?;
            match self.turn(target) {
                Turn::Durable => return Ok(flushed),
                Turn::Wait(event) => event.await,
                Turn::Run => flushed = self.run_round(occasion).await?,
            }
        }
    }

    fn turn(&self, target: u64) -> Turn {
        let state = self.state.lock();
        if state.durable_version >= target {
            Turn::Durable
        } else if state.round_is_running {
            Turn::Wait(self.round_ended.listen())
        } else {
            Turn::Run
        }
    }

    /// Writes all that is changed now, to make room in the cache.
    pub(super) async fn relieve(&self) -> Result<()> {
        self.check_failure()?;
        self.run_round(Occasion::Relief).await.map(|_| ())
    }

    /// Writes everything that is changed, and keeps rounds from running: whoever called this ends that by
    /// `round_is_running` and `round_ended`. While the answer is held no refcount is lowered either: what
    /// a round frees it frees behind its end.
    pub(super) async fn stop_rounds(&self) -> Result<SemaphoreGuard<'_>> {
        loop {
            self.check_failure()?;
            let no_frees = self.freeing.acquire().await;
            let waiting = {
                let mut state = self.state.lock();
                if state.round_is_running {
                    Some(self.round_ended.listen())
                } else if state.has_changes() {
                    None
                } else {
                    state.round_is_running = true;
                    return Ok(no_frees);
                }
            };
            drop(no_frees);
            match waiting {
                Some(event) => event.await,
                None => drop(self.run_round(Occasion::Relief).await?),
            }
        }
    }

    /// Runs a round if none runs, else waits for that one.
    pub(super) async fn run_round(&self, occasion: Occasion) -> Result<Flushed> {
        let waiting = {
            let mut state = self.state.lock();
            let is_running = std::mem::replace(&mut state.round_is_running, true);
            is_running.then(|| self.round_ended.listen())
        };
        if let Some(event) = waiting {
            event.await;
            return Ok(Flushed::No);
        }
        let mut running = Running { image: self, round: None };
        if occasion == Occasion::Shared {
            self.arriving.synchronize().await;
        }
        self.table_writes.wait().await;
        self.check_failure()?;
        running.round = self.state.lock().begin_round(occasion);
        let mut flushed = Flushed::No;
        if let Some(round) = &running.round {
            let outcome = self.write_round(round).await;
            flushed = outcome.inspect_err(|error| self.remember(error))?;
        }
        if let Some(round) = running.round.take() {
            self.state.lock().end_round(round);
        }
        drop(running);
        let freed = self.process_frees().await;
        self.marking(freed).await?;
        Ok(flushed)
    }

    /// Writes a round durably; whether that took a flush.
    async fn write_round(&self, round: &Round) -> Result<Flushed> {
        if round.extent == Extent::WithoutRefcounts {
            self.write_dirty_bit().await?;
        }
        if self.is_small(round) {
            // In this order, each durable: refcounts, then what refers to the clusters.
            self.write_pieces(&round.free, Durability::Data).await?;
            round.exposed.store(true, Ordering::Relaxed);
            self.write_pieces(&round.mappings, Durability::Data).await?;
            return Ok(Flushed::No);
        }
        self.write_pieces(&round.free, Durability::None).await?;
        self.sync(SyncMode::Data).await?;
        round.exposed.store(true, Ordering::Relaxed);
        let is_moving = round.moved_refcount_table.is_some();
        if round.header_is_unsure || is_moving {
            let place = round.moved_refcount_table;
            self.change_header(|header| place.iter().for_each(|place| place.apply(header))).await?;
        }
        self.write_pieces(&round.refcount_table, Durability::None).await?;
        if round.header_is_unsure || is_moving || !round.refcount_table.is_empty() {
            self.sync(SyncMode::Data).await?;
        }
        if let Some(resized) = round.resized {
            self.change_header(|header| resized.apply(header)).await?;
        }
        if round.resized.is_none() && self.go_by_fua(&round.mappings) {
            self.write_pieces(&round.mappings, Durability::Data).await?;
            return Ok(Flushed::Yes);
        }
        self.write_pieces(&round.mappings, Durability::None).await?;
        if round.resized.is_some() || !round.mappings.is_empty() {
            self.sync(SyncMode::Data).await?;
        }
        Ok(Flushed::Yes)
    }

    /// Whether these pieces go down as durable writes rather than with a flush behind them.
    fn go_by_fua(&self, pieces: &[Piece]) -> bool {
        let Capabilities { fua, fua_cost, .. } = self.storage.capabilities();
        let most = match fua_cost {
            FuaCost::NoFlush => FEW,
            FuaCost::ExtraFlush => 1,
        };
        fua == Fua::Native && pieces.len() <= most
    }

    /// Whether the round goes down as a few durable writes and needs no flush: nothing behind it
    /// waits for one.
    fn is_small(&self, round: &Round) -> bool {
        round.stability == DataStability::Stable
            && round.refcount_table.is_empty()
            && round.moved_refcount_table.is_none()
            && round.resized.is_none()
            && !round.header_is_unsure
            && self.go_by_fua(&round.free)
            && self.go_by_fua(&round.mappings)
    }

    /// Marks the image as one whose refcounts may be behind. Durable with the next flush.
    async fn write_dirty_bit(&self) -> Result<()> {
        if self.state.lock().disk_header.incompatible.contains(Incompatible::DIRTY) {
            return Ok(());
        }
        self.mark(Incompatible::DIRTY, Mark::Set).await
    }

    /// Sets or clears a feature bit, durably.
    async fn mark(&self, bit: Incompatible, mark: Mark) -> Result<()> {
        self.rewrite_header(|header| header.incompatible.set(bit, mark == Mark::Set)).await
    }

    /// Marks the image as corrupt, durably, also where tables could not be written before: a storage
    /// that takes no flush any more says so itself.
    pub(super) async fn mark_as_corrupt(&self) -> Result<()> {
        if self.state.lock().is_marked_durably(Incompatible::CORRUPT) {
            return Ok(());
        }
        self.change_header(|header| header.incompatible.insert(Incompatible::CORRUPT)).await?;
        self.sync_in_spite_of_failures(SyncMode::Data).await
    }

    /// Changes the header on disk, durably.
    pub(super) async fn rewrite_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        self.change_header(change).await?;
        self.sync(SyncMode::Data).await
    }

    /// Changes the header on disk: its first sector, which holds all fields that ever change.
    /// Durable with the next flush. One change at a time, so that none brings back what another
    /// has replaced.
    async fn change_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let _alone = self.header_changes.acquire().await;
        // One that was given up may still be on its way.
        self.header_writes.wait().await;
        let block = self.storage.capabilities().alignment.offset as usize;
        let mut bytes = table_io::read(&self.storage, 0, SECTOR.max(block)).await?;
        let number = {
            let mut state = self.state.lock();
            change(&mut state.disk_header);
            state.header.incompatible = state.disk_header.incompatible;
            state.header.autoclear = state.disk_header.autoclear;
            state.disk_header.patch(&mut bytes);
            // Whatever becomes of this write, the next round repeats it before it relies on it.
            state.header_writes.begin()
        };
        let mut buffer = Buffer::new(bytes.len());
        buffer.bytes_mut().copy_from_slice(&bytes);
        let guards = (self.table_writes.enter(), self.header_writes.enter());
        self.storage.write(0, buffer.lend().with_guard(guards), Durability::None).await?;
        self.state.lock().header_writes.ended(number);
        Ok(())
    }

    /// Writes pieces side by side and waits for all of them, also when one fails.
    pub(super) async fn write_pieces(
        &self,
        pieces: &[Piece],
        durability: Durability,
    ) -> Result<()> {
        let both = |sum: Result<()>, one| ready(sum.and(one));
        let writes = pieces.iter().map(|piece| self.write_piece(piece, durability));
        stream::iter(writes).buffer_unordered(TOGETHER).fold(Ok(()), both).await
    }

    fn write_piece(
        &self,
        piece: &Piece,
        durability: Durability,
    ) -> impl Future<Output = Result<()>> {
        let block = self.storage.capabilities().alignment.offset as usize;
        let mut buffer = Buffer::new(piece.bytes.len().next_multiple_of(block));
        buffer.bytes_mut()[..piece.bytes.len()].copy_from_slice(&piece.bytes);
        let vector = buffer.lend().with_guard(self.table_writes.enter());
        self.storage.write(piece.offset, vector, durability)
    }

    /// Gives space of the file back to the host. Only a hint: what fails has no effect but that of not
    /// being done.
    pub(super) async fn punch(&self, range: ByteRange) {
        if let Some(range) = table_io::whole_blocks(&self.storage, range) {
            let _ = self.storage.discard(range).await;
        }
    }

    pub(super) fn check_failure(&self) -> Result<()> {
        match self.failure.get() {
            None => Ok(()),
            Some(error) => Err(error
                .duplicate()
                .hint("the image's tables are behind: check it and open it again")),
        }
    }

    /// Flushes the storage. A failure is remembered whatever its kind: it may have lost data that
    /// tables are about to refer to.
    pub(super) async fn sync(&self, sync: SyncMode) -> Result<()> {
        self.check_failure()?;
        self.sync_in_spite_of_failures(sync).await
    }

    async fn sync_in_spite_of_failures(&self, sync: SyncMode) -> Result<()> {
        let covered = self.state.lock().header_writes.ended;
        // Tables that refer to data are written after this, so both are durable before them.
        let data = match &self.data {
            Some(data) => data.flush(sync).await,
            None => Ok(()),
        };
        let outcome = self.storage.flush(sync).await;
        if outcome.is_ok() {
            self.state.lock().header_writes.covered(covered);
        }
        let outcome = data.and(outcome);
        if let Err(error) = &outcome {
            let _ = self.failure.set(error.duplicate());
        }
        outcome
    }

    /// Remembers why tables could not be written. Only the first counts.
    pub(super) fn remember(&self, error: &Error) {
        if error.kind() != ErrorKind::NoSpace {
            let _ = self.failure.set(error.duplicate());
        }
    }
}

/// Whether a flush was among what was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    Yes,
    No,
}

/// What becomes of a feature bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// It is set.
    Set,
    /// It is cleared.
    Clear,
}
