//! What the guest changes while its disk is copied.
//!
//! In the background mode a change makes its granules dirty, after it was carried out. In the write-blocking mode the bytes
//! of a write are *forwarded*: the copier writes them to the target while the guest's request writes them to the source, and
//! the request waits for both. All other changes (zeros, discards, long writes, writes that overlap one that is forwarded)
//! wait until the copier has copied their range. So what is dirty only becomes less, but for what waits.
//!
//! Guarantees: while a forwarded write is *live*, from before it is begun at the source until both writes have ended, no copy
//! of its range begins; it is written to the target after those that were begun before. So the target gets its bytes last, as
//! the source does. The guest's request touches nothing but its own disk: the copier alone writes to the target, and its
//! errors are not the guest's. The bytes of forwarded writes take `MAX_FORWARDED_BYTES` at most.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::sync::Condvar;
use blockhouse_core::{BufferPool, ByteRange, IoVector};
use blockhouse_disk::{ChangeId, ChangeObserver, ChangeWait, DirtyMap};
use futures_channel::oneshot;
use futures_util::future::select;
use parking_lot::Mutex;

/// Bytes of forwarded writes whose write to the target has not ended.
const MAX_FORWARDED_BYTES: u64 = 16 << 20;
/// Writes that are live together. Each new one is compared with all of them.
const MAX_LIVE: usize = 1024;
/// The name of a change that is not forwarded.
const NOT_FORWARDED: ChangeId = 0;

/// Observes the disk that is copied.
pub(crate) struct Tracker {
    dirty: DirtyMap,
    /// Notified when there is work that a request waits for.
    work_added: Condvar,
    buffers: BufferPool,
    is_blocking: AtomicBool,
    release: Arc<Release>,
    state: Mutex<State>,
}

/// Lets all requests go that wait, whatever they wait for.
#[derive(Default)]
struct Release {
    is_released: AtomicBool,
    released: Condvar,
}

#[derive(Default)]
struct State {
    is_blocking: bool,
    copies: VecDeque<UrgentCopy>,
    forwarded: VecDeque<ForwardedWrite>,
    live: Vec<LiveWrite>,
    forwarded_bytes: u64,
    last_id: ChangeId,
}

/// A forwarded write that has not ended at both disks.
struct LiveWrite {
    id: ChangeId,
    range: ByteRange,
    has_source_ended: bool,
    has_target_ended: bool,
    /// Resolves when the target has it.
    stored: Option<oneshot::Receiver<()>>,
}

/// What a guest's request waits for.
pub(crate) enum UrgentWork {
    Copy(UrgentCopy),
    Write(ForwardedWrite),
}

/// Whole granules that are to be copied. The request goes on when all parts of them are dropped.
pub(crate) struct UrgentCopy {
    pub(crate) range: ByteRange,
    waiter: Arc<oneshot::Sender<()>>,
}

/// Bytes that are to be written to the target.
pub(crate) struct ForwardedWrite {
    id: ChangeId,
    pub(crate) range: ByteRange,
    pub(crate) from: IoVector,
    /// Dropped: the request goes on.
    stored: oneshot::Sender<()>,
}

impl ForwardedWrite {
    /// The bytes, and what is left of it to be [ended](Tracker::end_forwarded).
    pub(crate) fn into_parts(self) -> (IoVector, ForwardedEnd) {
        (self.from, ForwardedEnd { id: self.id, range: self.range, _stored: self.stored })
    }
}

/// A forwarded write that the target is getting.
pub(crate) struct ForwardedEnd {
    id: ChangeId,
    range: ByteRange,
    _stored: oneshot::Sender<()>,
}

impl Tracker {
    pub(crate) fn new(dirty: DirtyMap) -> Arc<Self> {
        let buffers = BufferPool::new(MAX_FORWARDED_BYTES as usize);
        let (is_blocking, work_added) = (AtomicBool::new(false), Condvar::new());
        let (release, state) = Default::default();
        Arc::new(Self { dirty, work_added, buffers, is_blocking, release, state })
    }

    /// What is to be copied.
    pub(crate) fn dirty(&self) -> &DirtyMap {
        &self.dirty
    }

    /// Notified when there is [urgent work](Self::next_urgent).
    pub(crate) fn work_added(&self) -> &Condvar {
        &self.work_added
    }

    /// Has changes wait for the target from now on.
    pub(crate) fn block_writes(&self) {
        self.state.lock().is_blocking = true;
        self.is_blocking.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_blocking(&self) -> bool {
        self.is_blocking.load(Ordering::SeqCst)
    }

    /// Has no change wait any more, for ever: those that do go on at once, whatever the target does, and what they wait for
    /// is dirty.
    pub(crate) fn release_writes(&self) {
        self.is_blocking.store(false, Ordering::SeqCst);
        self.release.is_released.store(true, Ordering::SeqCst);
        self.release.released.notify_all();
        let (copies, live) = {
            let state = &mut *self.state.lock();
            state.is_blocking = false;
            state.forwarded.clear();
            (std::mem::take(&mut state.copies), std::mem::take(&mut state.live))
        };
        copies.iter().for_each(|copy| _ = self.dirty.mark(copy.range));
        live.iter().for_each(|write| _ = self.dirty.mark(write.range));
    }

    /// The next work that a change waits for and that `is_free` of other copies admits: at most `limit` bytes of a copy.
    pub(crate) fn next_urgent(
        &self,
        limit: u64,
        is_free: impl Fn(ByteRange) -> bool,
    ) -> Option<UrgentWork> {
        if !self.is_blocking() {
            return None;
        }
        let state = &mut *self.state.lock();
        if let Some(index) = state.forwarded.iter().position(|write| is_free(write.range)) {
            return state.forwarded.remove(index).map(UrgentWork::Write);
        }
        let is_live = |range: ByteRange| state.live.iter().any(|write| write.range.overlaps(range));
        let first = |copy: &UrgentCopy| copy.range.truncate(limit.min(copy.range.length()));
        let is_ready = |copy: &UrgentCopy| is_free(first(copy)) && !is_live(first(copy));
        let index = state.copies.iter().position(is_ready)?;
        let copy = &mut state.copies[index];
        let part = UrgentCopy { range: first(copy), waiter: Arc::clone(&copy.waiter) };
        copy.range = copy.range.skip(part.range.length());
        if copy.range.is_empty() {
            state.copies.remove(index);
        }
        Some(UrgentWork::Copy(part))
    }

    /// A forwarded write has ended at the target, or failed there: then the job fails.
    pub(crate) fn end_forwarded(&self, end: ForwardedEnd) {
        let state = &mut *self.state.lock();
        state.forwarded_bytes = state.forwarded_bytes.saturating_sub(end.range.length());
        if let Some(index) = state.live.iter().position(|write| write.id == end.id) {
            state.live[index].has_target_ended = true;
            state.remove_ended(index);
        }
    }

    /// The ranges that are not to be copied now.
    pub(crate) fn live_ranges(&self) -> Vec<ByteRange> {
        match self.is_blocking() {
            true => self.state.lock().live.iter().map(|write| write.range).collect(),
            false => Vec::new(),
        }
    }

    /// Whether no change waits, and no forwarded one is live.
    pub(crate) fn is_quiet(&self) -> bool {
        let state = self.state.lock();
        state.copies.is_empty() && state.live.is_empty()
    }

    /// Takes a write to be forwarded, if it can be: its name.
    fn forward(&self, range: ByteRange, bytes: &IoVector) -> Option<ChangeId> {
        let mut buffer = self.buffers.get(bytes.len()).ok()?;
        bytes.copy_to(buffer.bytes_mut());
        let (stored, receiver) = oneshot::channel();
        let state = &mut *self.state.lock();
        let is_admitted = state.is_blocking
            && state.live.len() < MAX_LIVE
            && state.forwarded_bytes + range.length() <= MAX_FORWARDED_BYTES
            && !state.live.iter().any(|write| write.range.overlaps(range));
        if !is_admitted {
            return None;
        }
        state.last_id += 1;
        state.forwarded_bytes += range.length();
        state.live.push(LiveWrite::new(state.last_id, range, receiver));
        let from = buffer.lend();
        state.forwarded.push_back(ForwardedWrite { id: state.last_id, range, from, stored });
        // Both disks are going to have these bytes, or the change is abandoned and marks them again.
        let granule = self.dirty.granularity();
        let (first, end) = (range.offset().next_multiple_of(granule), range.end() & !(granule - 1));
        if first < end {
            self.dirty.clear(ByteRange::between(first, end));
        }
        Some(state.last_id)
    }

    /// A forwarded change has ended at the source: what its request waits for, if it was not released meanwhile.
    fn end_at_source(&self, change: ChangeId) -> Option<Option<oneshot::Receiver<()>>> {
        let state = &mut *self.state.lock();
        let index = state.live.iter().position(|write| write.id == change)?;
        state.live[index].has_source_ended = true;
        let stored = state.live[index].stored.take();
        let is_over = state.remove_ended(index);
        if is_over {
            // A copy may have waited for it.
            self.work_added.notify_all();
        }
        Some(stored.filter(|_| !is_over))
    }

    /// The sender is dropped when the work is done. The request goes on then, or when all are let go.
    fn wait_for(&self, done: oneshot::Receiver<()>) -> ChangeWait {
        let release = Arc::clone(&self.release);
        Box::pin(async move {
            let is_released = || release.is_released.load(Ordering::SeqCst).then_some(());
            select(done, pin!(release.released.wait_until(is_released))).await;
        })
    }

    fn wait_for_copy(&self, range: ByteRange) -> Option<ChangeWait> {
        let (waiter, copied) = oneshot::channel();
        // Whole granules: the copier makes them clean.
        let aligned = range.align_outward(self.dirty.granularity());
        let range = ByteRange::between(aligned.offset(), aligned.end().min(self.dirty.size()));
        {
            let state = &mut *self.state.lock();
            if !state.is_blocking {
                return None;
            }
            state.copies.push_back(UrgentCopy { range, waiter: Arc::new(waiter) });
        }
        self.work_added.notify_all();
        Some(self.wait_for(copied))
    }
}

impl State {
    /// Removes a write that has ended at both disks. Whether it has.
    fn remove_ended(&mut self, index: usize) -> bool {
        let write = &self.live[index];
        let has_ended = write.has_source_ended && write.has_target_ended;
        if has_ended {
            self.live.swap_remove(index);
        }
        has_ended
    }
}

impl LiveWrite {
    fn new(id: ChangeId, range: ByteRange, stored: oneshot::Receiver<()>) -> Self {
        let (has_source_ended, has_target_ended) = (false, false);
        Self { id, range, has_source_ended, has_target_ended, stored: Some(stored) }
    }
}

impl ChangeObserver for Tracker {
    fn wants_bytes(&self) -> bool {
        self.is_blocking()
    }

    fn forbids_snapshots(&self) -> bool {
        true
    }

    fn begins(&self, range: ByteRange, bytes: Option<&IoVector>) -> ChangeId {
        // One past the end is going to be refused.
        let is_inside = !range.is_empty() && range.end() <= self.dirty.size();
        let Some(bytes) = bytes.filter(|_| is_inside && self.is_blocking()) else {
            return NOT_FORWARDED;
        };
        let Some(change) = self.forward(range, bytes) else { return NOT_FORWARDED };
        self.work_added.notify_all();
        change
    }

    fn completed(&self, change: ChangeId, range: ByteRange) -> Option<ChangeWait> {
        if range.is_empty() {
            return None;
        }
        if change != NOT_FORWARDED
            && let Some(stored) = self.end_at_source(change)
        {
            return stored.map(|stored| self.wait_for(stored));
        }
        self.dirty.mark(range);
        if self.is_blocking() { self.wait_for_copy(range) } else { None }
    }

    fn abandoned(&self, change: ChangeId, range: ByteRange) {
        self.dirty.mark(range);
        if change != NOT_FORWARDED {
            self.end_at_source(change);
        }
    }
}
