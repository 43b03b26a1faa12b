//! Room on the host for tables, before anything relies on them.
//!
//! A new table reaches the disk with a round, long after the request that made it. Were its space
//! found missing only then, no round could end any more, and since space is given back after a round,
//! none would ever come free. So the place of each new table is filled with zeros first. Where there
//! is no room the request that needs the table fails, and nothing has changed.

use std::ops::Range;

use blockhouse_core::{Buffer, Durability, ErrorKind, Result, Storage};

use super::Qcow2;
use super::room::Need;
use super::state::State;

/// How many bytes of zeros are written at a time.
const PIECE: u64 = 1 << 20;

/// By how much the file is longer than needed: an eighth, but at least so many clusters, and at most so
/// many bytes.
const MIN_AHEAD: u64 = 64;
const MAX_AHEAD: u64 = 1 << 30;

impl State {
    /// Counts places for tables down that were not needed in the end.
    pub(crate) fn give_up_room(&mut self) {
        while let Some(cluster) = self.room.take_table() {
            self.free_unlinked(cluster..cluster + 1);
        }
    }

    fn has_own_l2_table(&self, l1_index: usize) -> bool {
        matches!(self.l2_table(l1_index), Ok(Some(table)) if table.is_sole())
    }
}

impl<S: Storage> Qcow2<S> {
    /// Gets what a step lacked.
    ///
    /// # Errors
    /// `NoSpace` when the host has no room; or what else the storage answers.
    pub(super) async fn make_room(&self, need: Need) -> Result<()> {
        match need {
            Need::AtEnd(count) => match self.make_room_at_end(count).await {
                Err(error) if error.kind() == ErrorKind::NoSpace && self.may_do_without() => {
                    self.reclaim().await
                }
                outcome => outcome,
            },
            Need::Length(clusters) => {
                self.make_length(clusters).await;
                Ok(())
            }
            Need::Frees => self.reclaim_at_limit().await,
            Need::L2Table(l1_index) => self.make_room_for_table(l1_index).await,
        }
    }

    /// Makes the file longer than it needs to be now: file systems let writes that make a file longer
    /// through one at a time.
    async fn make_length(&self, needed: u64) {
        let _alone = self.claiming.acquire().await;
        if self.state.lock().space.length() >= needed {
            return;
        }
        let most = MAX_AHEAD >> self.geometry.cluster_bits;
        let length = needed + (needed / 8).clamp(MIN_AHEAD, most.max(MIN_AHEAD));
        self.storage.extend_hint(self.geometry.offset_of(length)).await;
        let size = self.storage.size();
        let mut state = self.state.lock();
        state.space.set_length(length);
        let is_limited = size < self.geometry.offset_of(needed);
        state.space.set_limit(is_limited.then_some(size));
    }

    /// Frees what waits for it, unless the storage becomes longer with what is written to it: such a
    /// storage has only no way to do that ahead.
    ///
    /// # Errors
    /// Why tables cannot be written, which keeps those clusters from being freed.
    async fn reclaim_at_limit(&self) -> Result<()> {
        {
            let mut state = self.state.lock();
            if state.space.limit().is_some_and(|limit| self.storage.size() > limit) {
                state.space.set_limit(None);
                return Ok(());
            }
        }
        self.reclaim().await
    }

    /// Whether a step that found no room at the end may find some elsewhere when it runs again: in
    /// clusters that wait to be freed, or in those that nothing has looked at since the image was opened.
    fn may_do_without(&self) -> bool {
        let mut state = self.state.lock();
        let size = self.storage.size();
        // Behind the limit the next step looks at all that was not looked at. Once: it fails after that.
        let is_unknown = state.space.limit().is_none()
            && !state.space.unseen().is_empty()
            && size < self.geometry.offset_of(state.space.end() + 1);
        if is_unknown {
            state.space.set_limit(Some(size));
        }
        is_unknown || state.frees.gain() > 0
    }

    async fn make_room_at_end(&self, count: u64) -> Result<()> {
        let _alone = self.claiming.acquire().await;
        let claimed = {
            let mut state = self.state.lock();
            if state.room.at_end().is_some() {
                return Ok(());
            }
            state.space.claim(count)
        };
        // Dropped in the middle, the clusters stay unused: the write may still be under way.
        let outcome = self.fill_with_zeros(claimed.clone()).await;
        let mut state = self.state.lock();
        match outcome {
            Ok(()) => {
                state.space.fill_to(claimed.end);
                state.room.put_at_end(claimed);
            }
            Err(_) => state.space.unclaim(claimed.end, claimed.start),
        }
        outcome
    }

    async fn make_room_for_table(&self, l1_index: usize) -> Result<()> {
        let _alone = self.making_tables.acquire().await;
        {
            let state = self.state.lock();
            if state.room.has_table() || state.has_own_l2_table(l1_index) {
                return Ok(());
            }
        }
        let taken = self.step(|state| state.allocate(1)).await?;
        let outcome = self.fill_with_zeros(taken.clone()).await;
        let mut state = self.state.lock();
        match outcome {
            Ok(()) => state.room.put_table(taken.start),
            Err(_) => state.free_unlinked(taken),
        }
        outcome
    }

    async fn fill_with_zeros(&self, clusters: Range<u64>) -> Result<()> {
        let bytes = self.geometry.bytes_of(clusters);
        let mut at = bytes.offset();
        while at < bytes.end() {
            let length = (bytes.end() - at).min(PIECE);
            let mut zeros = Buffer::new(length as usize);
            // Who changes the image as a whole waits for it, also when it was given up.
            let vector = zeros.lend().with_guard(self.table_writes.enter());
            self.storage.write(at, vector, Durability::None).await?;
            at += length;
        }
        Ok(())
    }
}
