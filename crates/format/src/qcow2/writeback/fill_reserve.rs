//! Fills the reserve (`allocator/reserve`): allocates space on the host for metadata before a step
//! uses the space.
//!
//! If the host has no space, the request that needs the space fails without any change.

use blockhouse_core::{ErrorKind, Result, Storage, SyncMode, rare};

use crate::qcow2::allocator::Room;
use crate::qcow2::tables::ReserveRequest;

use super::Metadata;

/// The file is extended beyond the needed length by an eighth of this length, but by at least
/// `MIN_AHEAD` clusters, and at most `MAX_AHEAD` bytes.
const MIN_AHEAD: u64 = 64;
const MAX_AHEAD: u64 = 1 << 30;

/// Allocates the host space that blocked steps need.
pub(super) struct ReserveFiller<'a, S: Storage>(pub(super) &'a Metadata<S>);

impl<S: Storage> ReserveFiller<'_, S> {
    /// Allocates the host space that a blocked step needs.
    ///
    /// # Errors
    /// `NoSpace` if the host has no space; other storage errors.
    pub(super) async fn fill(&self, need: ReserveRequest) -> Result<()> {
        match need {
            ReserveRequest::AtEnd(count) => match self.fill_at_end(count).await {
                Err(error) if error.kind() == ErrorKind::NoSpace && self.may_have_space() => {
                    self.0.reclaim().await
                }
                outcome => outcome,
            },
            ReserveRequest::Row { count, total } => match self.fill_at_end(total).await {
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    match self.fill_in_row(count).await? {
                        true => Ok(()),
                        false if self.may_have_space() => self.0.reclaim().await,
                        false => Err(error),
                    }
                }
                outcome => outcome,
            },
            ReserveRequest::Length(clusters) => {
                self.extend_file(clusters).await;
                Ok(())
            }
            ReserveRequest::WrittenZeros => self.prepare_zeros().await,
            ReserveRequest::Frees => self.reclaim_at_limit().await,
            ReserveRequest::L2Table(l1_index) => self.fill_for_l2(l1_index).await,
        }
    }

    /// Makes the file longer than needed now, because file systems serialize writes that extend a
    /// file.
    async fn extend_file(&self, needed: u64) {
        let _alone = self.0.end_lock.acquire().await;
        if !self.0.state.lock().allocator.is_file_short(needed) {
            return;
        }
        let limit = MAX_AHEAD >> self.0.geometry.cluster_bits;
        let length = needed + (needed / 8).clamp(MIN_AHEAD, limit.max(MIN_AHEAD));
        self.0.storage().extend_hint(self.0.geometry.offset_of(length)).await;
        let size = self.0.storage().size();
        let mut state = self.0.state.lock();
        state.allocator.note_extended(self.0.geometry, length, needed, size);
    }

    /// Prepares clusters at the end of the file for durable writes, if the storage can prepare
    /// clusters and the host has enough space.
    ///
    /// If the host cannot prepare clusters, no error is returned, and unprepared clusters are
    /// allocated. A failed flush is recorded as a failure of the image, as any other failed flush.
    async fn prepare_zeros(&self) -> Result<()> {
        let _alone = self.0.end_lock.acquire().await;
        // As in `fill_at_end`, a transaction that freezes the tables later waits for the guard.
        let free = self.0.storage().free_space().await.unwrap_or(Some(0));
        let claim = self.0.step(|state| {
            state.tables.freeze.wait_thawed()?;
            let claimed = state.allocator.claim_to_prepare(&mut state.tables, free)?;
            Ok(claimed.map(|claimed| (claimed, self.0.writer.writes().enter())))
        });
        let Some((claimed, _writing)) = rare(claim).await? else { return Ok(()) };
        // If this future is dropped in the middle, the clusters remain unused, because they may
        // still be zeroed at any time.
        let range = self.0.geometry.bytes_of(claimed.clone());
        let outcome = self.0.writer.prepare_zeros(range).await;
        let outcome = match outcome {
            Ok(()) => self.0.sync(SyncMode::Full).await,
            Err(error) => Err(error),
        };
        let mut state = self.0.state.lock();
        let state = &mut *state;
        match outcome {
            // A transaction that waits for the guard may allocate the clusters, so this task must
            // not use them.
            Ok(()) if !state.tables.freeze.is_active() => {}
            Ok(()) => state.allocator.put_prepared(claimed),
            Err(_) => state.allocator.give_up_preparing(&mut state.tables, claimed),
        }
        Ok(())
    }

    /// Processes pending frees, unless writes have made the storage longer. In this case only the
    /// extension in advance has failed.
    ///
    /// # Errors
    /// The reason why tables cannot be written, which prevents the clusters from being freed.
    async fn reclaim_at_limit(&self) -> Result<()> {
        if self.0.state.lock().allocator.lift_limit(self.0.storage().size()) {
            return Ok(());
        }
        self.0.reclaim().await
    }

    fn may_have_space(&self) -> bool {
        let mut state = self.0.state.lock();
        let state = &mut *state;
        state.allocator.may_have_space(&state.tables, self.0.storage().size())
    }

    async fn fill_at_end(&self, count: u64) -> Result<()> {
        let _alone = self.0.end_lock.acquire().await;
        // A transaction that freezes the tables later waits for the guard, so this task does not
        // reserve, write or free clusters that the transaction has allocated.
        let reserve = self.0.step(|state| {
            state.tables.freeze.wait_thawed()?;
            let reserved = state.allocator.begin_end_reserve(&mut state.tables, count);
            Ok(reserved.map(|reserved| (reserved, self.0.writer.writes().enter())))
        });
        let Some((reserved, _writing)) = rare(reserve).await? else { return Ok(()) };
        // If this future is dropped in the middle, the clusters remain unused, because the write
        // may still be in flight.
        let outcome = self.0.writer.write_zeros(self.0.geometry.bytes_of(reserved.clone())).await;
        let mut state = self.0.state.lock();
        match outcome {
            Ok(()) => state.allocator.put_end_reserve(reserved),
            Err(_) => state.tables.file.unreserve(reserved.end, reserved.start),
        }
        outcome
    }

    /// Reserves clusters in a row elsewhere, if the end of the file has no space. Returns whether
    /// another try is worthwhile.
    async fn fill_in_row(&self, count: u64) -> Result<bool> {
        let _alone = self.0.end_lock.acquire().await;
        let found = self.0.step(|state| {
            state.tables.freeze.wait_thawed()?;
            state.tables.check_dirty_limit()?;
            let found = state.allocator.find_room(&mut state.tables, count)?;
            if matches!(found, Room::Row(_)) {
                state.tables.note_change();
            }
            Ok(found)
        });
        let row = match rare(found).await? {
            Room::Row(row) => row,
            Room::End => return Ok(true),
            Room::None => return Ok(false),
        };
        // If this future is dropped in the middle, the clusters remain allocated and leak, because
        // the write may still be in flight.
        let outcome = self.0.writer.write_zeros(self.0.geometry.bytes_of(row.clone())).await;
        let mut state = self.0.state.lock();
        let state = &mut *state;
        match outcome {
            Ok(()) => {
                state.allocator.put_row(&mut state.tables, row);
                Ok(true)
            }
            Err(error) => {
                state.allocator.free_unlinked(&mut state.tables, row);
                if error.kind() == ErrorKind::NoSpace { Ok(false) } else { Err(error) }
            }
        }
    }

    async fn fill_for_l2(&self, l1_index: usize) -> Result<()> {
        let _alone = self.0.l2_alloc_lock.acquire().await;
        {
            let state = self.0.state.lock();
            if state.allocator.has_l2_table() || state.tables.has_writable_l2_table(l1_index) {
                return Ok(());
            }
        }
        let allocated = self.0.step(|state| {
            state.tables.freeze.wait_thawed()?;
            state.allocator.allocate(&mut state.tables, 1)
        });
        let allocated = allocated.await?;
        let outcome = self.0.writer.write_zeros(self.0.geometry.bytes_of(allocated.clone())).await;
        let mut state = self.0.state.lock();
        let state = &mut *state;
        match outcome {
            Ok(()) => state.allocator.put_l2_table(allocated.start),
            Err(_) => state.allocator.free_unlinked(&mut state.tables, allocated),
        }
        outcome
    }
}
