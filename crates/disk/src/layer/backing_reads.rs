//! Reads of the backing file that are in flight.
//!
//! A backing file may be slow, or never complete a read. Such a read holds nothing of the image for
//! which other requests wait. Reads are listed here, for code that detaches the backing file and
//! for reports of stuck reads.

use std::collections::BTreeMap;

use blockhouse_core::ByteRange;
use blockhouse_core::metrics::{Timestamp, clock};
use blockhouse_core::sync::Condvar;
use parking_lot::Mutex;

/// The request that needs the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// A read.
    Read,
    /// A change that needs the old bytes around its own.
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
    /// Reads by their numbers: the oldest is the first.
    in_flight: BTreeMap<u64, BackingRead>,
}

/// A read in flight, until this is dropped.
pub(super) struct BackingReadGuard<'a> {
    reads: &'a BackingReads,
    number: u64,
}

impl BackingReads {
    /// Begins a read. If a call of [`ended`](Self::ended) does not wait for this read, the read
    /// sees every change of the backing chain made before that call.
    pub(super) fn begin(&self, range: ByteRange, reader: Reader) -> BackingReadGuard<'_> {
        let read = BackingRead { range, reader, since: clock::now(), depth: 1 };
        let mut state = self.state.lock();
        let number = state.begun;
        state.begun += 1;
        state.in_flight.insert(number, read);
        BackingReadGuard { reads: self, number }
    }

    /// Waits until all reads in flight now have ended, but not for later ones.
    pub(super) async fn ended(&self) {
        let end = self.state.lock().begun;
        let is_over = || {
            let state = self.state.lock();
            state.in_flight.keys().next().is_none_or(|first| *first >= end).then_some(())
        };
        self.ended.wait_until(is_over).await;
    }

    /// The oldest read for a change; if there is none, the oldest read.
    pub(super) fn oldest(&self) -> Option<BackingRead> {
        let state = self.state.lock();
        let of_change = state.in_flight.values().find(|read| read.reader == Reader::Change);
        of_change.or_else(|| state.in_flight.values().next()).copied()
    }
}

impl BackingReadGuard<'_> {
    /// Sets the layer that is read: this many steps down the chain.
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
