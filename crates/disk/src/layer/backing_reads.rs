//! Reads of the backing file that are in flight.
//!
//! A backing file may be slow, or not answer at all. Such a read holds nothing of the image that
//! other requests wait for. It is listed here, for code that detaches the backing file and for
//! reports of stuck reads.

use std::collections::BTreeMap;

use blockhouse_core::ByteRange;
use blockhouse_core::metrics::{Timestamp, clock};
use blockhouse_core::sync::Condvar;
use parking_lot::Mutex;

/// For which request bytes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// A read.
    Read,
    /// A change: the old bytes around its own.
    Change,
}

/// A read in flight.
#[derive(Clone, Copy)]
pub(super) struct BackingRead {
    pub(super) range: ByteRange,
    pub(super) reader: Reader,
    pub(super) since: Timestamp,
    /// The layer that is read: 1 is the nearest one.
    pub(super) depth: usize,
}

/// See the module's page.
#[derive(Default)]
pub(super) struct BackingReads {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    begun: u64,
    /// By their numbers, so the oldest is the first.
    in_flight: BTreeMap<u64, BackingRead>,
}

/// A read in flight, until this is dropped.
pub(super) struct BackingReadGuard<'a> {
    reads: &'a BackingReads,
    number: u64,
}

impl BackingReads {
    /// A read begins. It sees every change of the backing chain made before an
    /// [`ended`](Self::ended) that does not wait for it.
    pub(super) fn begin(&self, range: ByteRange, reader: Reader) -> BackingReadGuard<'_> {
        let read = BackingRead { range, reader, since: clock::now(), depth: 1 };
        let mut state = self.state.lock();
        let number = state.begun;
        state.begun += 1;
        state.in_flight.insert(number, read);
        BackingReadGuard { reads: self, number }
    }

    /// Waits until all that are in flight now have ended, and for none that begins later.
    pub(super) async fn ended(&self) {
        let end = self.state.lock().begun;
        let is_over = || {
            let state = self.state.lock();
            state.in_flight.keys().next().is_none_or(|first| *first >= end).then_some(())
        };
        self.ended.wait_until(is_over).await;
    }

    /// The oldest of those for a change, else the oldest one.
    pub(super) fn oldest(&self) -> Option<BackingRead> {
        let state = self.state.lock();
        let of_change = state.in_flight.values().find(|read| read.reader == Reader::Change);
        of_change.or_else(|| state.in_flight.values().next()).copied()
    }
}

impl BackingReadGuard<'_> {
    /// The layer that is read is this many steps down the chain.
    pub(super) fn set_depth(&self, depth: usize) {
        if let Some(read) = self.reads.state.lock().in_flight.get_mut(&self.number) {
            read.depth = depth;
        }
    }
}

impl Drop for BackingReadGuard<'_> {
    fn drop(&mut self) {
        self.reads.state.lock().in_flight.remove(&self.number);
        self.reads.ended.notify_all();
    }
}
