//! Repeats a step until nothing blocks it (`tables/step`). The cause of the block is removed
//! without the lock.

use std::sync::Arc;

use blockhouse_core::{Result, Storage, rare};
use event_listener::Event;
use parking_lot::Mutex;

use crate::qcow2::layout::table_io;
use crate::qcow2::tables::{Blocked, Fetch, SliceId, Step};

use super::fill_reserve::ReserveFiller;
use super::{Metadata, State};

impl<S: Storage> Metadata<S> {
    /// Repeats a step until it is not blocked.
    pub(crate) async fn step<T>(&self, mut step: impl FnMut(&mut State) -> Step<T>) -> Result<T> {
        loop {
            match self.try_step(&mut step).await? {
                Some(value) => return Ok(value),
                None => rare(self.write_back_all()).await?,
            }
        }
    }

    /// Repeats a step until it succeeds; returns `None` if the dirty limit blocks the step.
    pub(crate) async fn try_step<T>(
        &self,
        mut step: impl FnMut(&mut State) -> Step<T>,
    ) -> Result<Option<T>> {
        loop {
            let outcome = {
                let mut state = self.state.lock();
                state.tables.cache.begin_step();
                step(&mut state)
            };
            match outcome {
                Ok(value) => return Ok(Some(value)),
                Err(Blocked::Failed(error)) => return Err(error),
                Err(Blocked::CacheMiss(slice)) => rare(self.load(slice)).await?,
                Err(Blocked::Wait(event) | Blocked::NoRoom(event)) => event.await,
                // Filling the reserve runs steps itself, so the future is boxed.
                Err(Blocked::NeedsReserve(need)) => rare(ReserveFiller(self).fill(need)).await?,
                Err(Blocked::DirtyLimit) => return Ok(None),
            }
        }
    }

    /// Reads a slice into the cache. If several tasks need the slice at the same time, it is read
    /// once.
    async fn load(&self, id: SliceId) -> Result<()> {
        let fetch = self.state.lock().tables.cache.fetch(id.offset);
        let ticket = match fetch {
            Fetch::Present => return Ok(()),
            Fetch::Wait(event) => {
                event.await;
                return Ok(());
            }
            Fetch::Read(ticket) => ticket,
        };
        let load = SliceLoadGuard { state: &self.state, offset: id.offset, ticket };
        let length = self.geometry.slice_size() as usize;
        let bytes = table_io::read(self.storage(), id.offset, length).await?;
        self.state.lock().tables.cache.loaded(id, &load.ticket, bytes.into());
        Ok(())
    }
}

/// A slice that is being read. When dropped, even before the end of the read, the guard wakes the
/// tasks that wait for the slice.
struct SliceLoadGuard<'a> {
    state: &'a Mutex<State>,
    offset: u64,
    ticket: Arc<Event>,
}

impl Drop for SliceLoadGuard<'_> {
    fn drop(&mut self) {
        self.state.lock().tables.cache.fetch_ended(self.offset, &self.ticket);
    }
}
