//! Tracks the guest's changes while its disk is copied.
//!
//! In background mode, a change makes its granules dirty after it was carried out. In
//! write-blocking mode, the bytes of a write are *forwarded*: the copier writes a copy of them from
//! memory to the target. The request does not wait for that write. But if the *backlog*, the
//! forwarded bytes that the target still lacks, reaches its limit, changes wait before they begin.
//! Zero writes, discards and long writes wait until the copier has copied their range. A write that
//! overlaps a forwarded write is not forwarded, and makes its granules dirty. So the dirty and
//! forwarded bytes grow at most by the limit of the backlog and by the bytes of such overlapping
//! writes.
//!
//! Guarantees: a forwarded write is *live* from before it begins at the source until it has ended
//! at both disks. While it is live, no copy of its range begins, and it is written to the target
//! after the end of earlier copies of its range. So the target gets the bytes of the write last, as
//! the source does. A guest's request uses only its own disk: the copier alone writes to the
//! target, and errors of the target fail no request of the guest. The bytes of forwarded writes
//! take at most `MAX_FORWARDED_BYTES`.

use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhouse_core::sync::Condvar;
use blockhouse_core::{BufferPool, ByteRange, IoVector};
use blockhouse_disk::{ChangeId, ChangeObserver, ChangeWait, DirtyMap};
use futures_channel::oneshot;
use futures_util::future::select;
use parking_lot::Mutex;

/// Maximum bytes of forwarded writes in flight to the target: more than the limit of a backlog,
/// because changes that have waited for the backlog begin together.
const MAX_FORWARDED_BYTES: u64 = 16 << 20;
/// A shorter forwarded write counts as this many bytes, because each write costs an operation.
const MIN_FORWARDED_BYTES: u64 = 4 << 10;
/// Changes that wait for the backlog continue when the backlog is this many bytes below its limit,
/// or half of the limit, whichever comes first.
const BACKLOG_STEP: u64 = 64 << 10;
/// The ID of a change that is not forwarded.
const NOT_FORWARDED: ChangeId = 0;
/// The ID of a write that is not forwarded because it overlaps a forwarded write.
const OVERLAPPING: ChangeId = ChangeId::MAX;

/// Observes the disk that is copied.
pub(crate) struct Tracker {
    dirty: DirtyMap,
    /// Notified when there is urgent work.
    work_added: Condvar,
    buffers: BufferPool,
    is_blocking: AtomicBool,
    backlog: Arc<Backlog>,
    release: Arc<Release>,
    state: Mutex<State>,
}

/// The forwarded bytes that the target still lacks, and their limit.
struct Backlog {
    /// Bytes of forwarded writes that have not ended at the target.
    bytes: AtomicU64,
    /// Changes wait while `bytes` is at least this limit.
    limit: AtomicU64,
    /// Notified when waiting changes may continue.
    shortened: Condvar,
}

/// Releases all waiting requests: those that wait for the backlog, and those that wait for a copy.
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
    /// The live writes, by their offsets. No two overlap.
    live: BTreeMap<u64, LiveWrite>,
    last_id: ChangeId,
}

/// A forwarded write that has not ended at both disks.
struct LiveWrite {
    id: ChangeId,
    range: ByteRange,
    has_source_ended: bool,
    has_target_ended: bool,
}

/// The work that begins before background copies.
pub(crate) enum UrgentWork {
    Copy(UrgentCopy),
    Write(ForwardedWrite),
}

/// Whole granules to be copied. The request continues when all parts of the copy are dropped.
pub(crate) struct UrgentCopy {
    pub(crate) range: ByteRange,
    waiter: Arc<oneshot::Sender<()>>,
}

/// Bytes to be written to the target.
pub(crate) struct ForwardedWrite {
    id: ChangeId,
    pub(crate) range: ByteRange,
    pub(crate) from: IoVector,
}

impl ForwardedWrite {
    /// The bytes, and the handle that [ends](Tracker::end_forwarded) the write.
    pub(crate) fn into_parts(self) -> (IoVector, ForwardedEnd) {
        (self.from, ForwardedEnd { id: self.id, range: self.range })
    }
}

/// A forwarded write in flight to the target.
pub(crate) struct ForwardedEnd {
    id: ChangeId,
    range: ByteRange,
}

impl Tracker {
    /// A tracker in background mode. `backlog` is the limit of the backlog, in bytes.
    pub(crate) fn new(dirty: DirtyMap, backlog: u64) -> Arc<Self> {
        let buffers = BufferPool::new(MAX_FORWARDED_BYTES as usize);
        let (is_blocking, work_added) = (AtomicBool::new(false), Condvar::new());
        let (release, state) = Default::default();
        let backlog = Arc::new(Backlog::new(backlog));
        Arc::new(Self { dirty, work_added, buffers, is_blocking, backlog, release, state })
    }

    /// The ranges to be copied.
    pub(crate) fn dirty(&self) -> &DirtyMap {
        &self.dirty
    }

    /// Notified when there is [urgent work](Self::next_urgent).
    pub(crate) fn work_added(&self) -> &Condvar {
        &self.work_added
    }

    /// Begins the write-blocking mode: makes changes wait for the target from now on.
    pub(crate) fn block_writes(&self) {
        self.state.lock().is_blocking = true;
        self.is_blocking.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_blocking(&self) -> bool {
        self.is_blocking.load(Ordering::SeqCst)
    }

    /// Bytes of forwarded writes that the target does not have.
    pub(crate) fn backlog(&self) -> u64 {
        self.backlog.bytes.load(Ordering::SeqCst)
    }

    /// Makes changes wait while the target lacks at least this many bytes.
    pub(crate) fn limit_backlog(&self, limit: u64) {
        self.backlog.limit.store(limit, Ordering::SeqCst);
        self.backlog.shortened.notify_all();
    }

    /// Lowers the limit of the backlog to `BACKLOG_STEP` less than the target lacks now, but not
    /// below `enough` bytes.
    pub(crate) fn shorten_backlog(&self, enough: u64) {
        let limit = self.backlog().saturating_sub(BACKLOG_STEP).max(enough);
        self.backlog.limit.fetch_min(limit, Ordering::SeqCst);
    }

    /// Ends all waits: waiting changes continue at once, even if the target hangs, and later
    /// changes do not wait. Ranges with queued copies or live writes become dirty.
    pub(crate) fn release_writes(&self) {
        self.is_blocking.store(false, Ordering::SeqCst);
        self.release.is_released.store(true, Ordering::SeqCst);
        self.release.released.notify_all();
        let (copies, live) = {
            let state = &mut *self.state.lock();
            state.is_blocking = false;
            let dropped = state.forwarded.drain(..).map(|write| counted(write.range)).sum();
            self.backlog.shorten(dropped);
            (std::mem::take(&mut state.copies), std::mem::take(&mut state.live))
        };
        copies.iter().for_each(|copy| _ = self.dirty.mark(copy.range));
        live.values().for_each(|write| _ = self.dirty.mark(write.range));
    }

    /// The next urgent work. Its range is free of other copies, as `is_free` says; a copy has at
    /// most `limit` bytes.
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
        let first = |copy: &UrgentCopy| copy.range.truncate(limit.min(copy.range.length()));
        let is_ready =
            |copy: &UrgentCopy| is_free(first(copy)) && state.first_live(first(copy)).is_none();
        let index = state.copies.iter().position(is_ready)?;
        let copy = &mut state.copies[index];
        let part = UrgentCopy { range: first(copy), waiter: Arc::clone(&copy.waiter) };
        copy.range = copy.range.skip(part.range.length());
        if copy.range.is_empty() {
            state.copies.remove(index);
        }
        Some(UrgentWork::Copy(part))
    }

    /// Records that a forwarded write has ended at the target, or failed there. A failure also
    /// fails the job.
    pub(crate) fn end_forwarded(&self, end: ForwardedEnd) {
        self.state.lock().end_live(end.id, end.range, |write| write.has_target_ended = true);
        self.backlog.shorten(counted(end.range));
    }

    /// The range of the first live write that overlaps `range`. It must not be copied now.
    pub(crate) fn first_live(&self, range: ByteRange) -> Option<ByteRange> {
        if self.is_blocking() { self.state.lock().first_live(range) } else { None }
    }

    /// Whether no copy is queued, and no forwarded write is live.
    pub(crate) fn is_quiet(&self) -> bool {
        let state = self.state.lock();
        state.copies.is_empty() && state.live.is_empty()
    }

    /// Queues a write to be forwarded, if possible; returns the ID of the change.
    fn forward(&self, range: ByteRange, bytes: &IoVector) -> ChangeId {
        let length = counted(range);
        let is_full = || self.backlog() + length > MAX_FORWARDED_BYTES;
        if is_full() {
            return NOT_FORWARDED;
        }
        let Ok(mut buffer) = self.buffers.get(bytes.len()) else { return NOT_FORWARDED };
        bytes.copy_to(buffer.bytes_mut());
        let from = buffer.lend();
        let mut state = self.state.lock();
        // The backlog grows only under this lock.
        if !state.is_blocking || is_full() {
            return NOT_FORWARDED;
        }
        if state.first_live(range).is_some() {
            return OVERLAPPING;
        }
        state.last_id += 1;
        let id = state.last_id;
        self.backlog.bytes.fetch_add(length, Ordering::SeqCst);
        state.live.insert(range.offset(), LiveWrite::new(id, range));
        state.forwarded.push_back(ForwardedWrite { id, range, from });
        // Both disks are going to have these bytes, or the change is abandoned and marks them
        // again.
        let granule = self.dirty.granularity();
        let (first, end) = (range.offset().next_multiple_of(granule), range.end() & !(granule - 1));
        if first < end {
            self.dirty.clear(ByteRange::between(first, end));
        }
        let is_first = state.forwarded.len() == 1;
        drop(state);
        // One notification is enough: the copier takes all queued writes, or makes them wait for
        // copies in flight.
        if is_first {
            self.work_added.notify_all();
        }
        id
    }

    /// Records that a forwarded change has ended at the source. Returns false if the change was
    /// released before.
    fn end_at_source(&self, change: ChangeId, range: ByteRange) -> bool {
        let ended =
            self.state.lock().end_live(change, range, |write| write.has_source_ended = true);
        if ended == Some(true) {
            // A copy may have waited for the end of this write.
            self.work_added.notify_all();
        }
        ended.is_some()
    }

    /// The wait of a request for its copy. The wait ends when the sender is dropped, because the
    /// copy has ended, or when all requests are released.
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
        let range = aligned.before(self.dirty.size());
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

/// The bytes that a forwarded write counts as in the backlog.
fn counted(range: ByteRange) -> u64 {
    range.length().max(MIN_FORWARDED_BYTES)
}

impl Backlog {
    fn new(limit: u64) -> Self {
        let (bytes, limit) = (AtomicU64::new(0), AtomicU64::new(limit));
        Self { bytes, limit, shortened: Condvar::new() }
    }

    fn is_full(&self) -> bool {
        self.bytes.load(Ordering::SeqCst) >= self.limit.load(Ordering::SeqCst)
    }

    /// Subtracts the bytes of a write that has ended at the target or was dropped from the queue.
    fn shorten(&self, bytes: u64) {
        let before = self.bytes.fetch_sub(bytes, Ordering::SeqCst);
        let enough = self.enough();
        if before > enough && before - bytes <= enough {
            self.shortened.notify_all();
        }
    }

    /// The length of the backlog at which waiting changes continue. It is below the limit, so that
    /// several changes continue together.
    fn enough(&self) -> u64 {
        let limit = self.limit.load(Ordering::SeqCst);
        limit.saturating_sub(BACKLOG_STEP).max(limit / 2).min(limit.saturating_sub(1))
    }
}

impl State {
    /// The first live write that overlaps `range`.
    fn first_live(&self, range: ByteRange) -> Option<ByteRange> {
        let before = self.live.range(..range.offset()).next_back();
        let before = before.filter(|(_, write)| write.range.overlaps(range));
        let first = before.or_else(|| self.live.range(range.offset()..range.end()).next());
        first.map(|(_, write)| write.range)
    }

    /// Records, by `ended`, that a live write has ended at one disk. Returns whether it has ended
    /// at both; `None` if it was released.
    fn end_live(
        &mut self,
        id: ChangeId,
        range: ByteRange,
        ended: impl FnOnce(&mut LiveWrite),
    ) -> Option<bool> {
        let write = self.live.get_mut(&range.offset()).filter(|write| write.id == id)?;
        ended(write);
        let has_ended = write.has_source_ended && write.has_target_ended;
        if has_ended {
            self.live.remove(&range.offset());
        }
        Some(has_ended)
    }
}

impl LiveWrite {
    fn new(id: ChangeId, range: ByteRange) -> Self {
        Self { id, range, has_source_ended: false, has_target_ended: false }
    }
}

impl ChangeObserver for Tracker {
    fn wants_bytes(&self) -> bool {
        self.is_blocking()
    }

    fn forbids_snapshots(&self) -> bool {
        true
    }

    fn hold_off(&self, _range: ByteRange) -> Option<ChangeWait> {
        if !self.is_blocking() || !self.backlog.is_full() {
            return None;
        }
        let (backlog, release) = (Arc::clone(&self.backlog), Arc::clone(&self.release));
        Some(Box::pin(async move {
            let is_short =
                || (backlog.bytes.load(Ordering::SeqCst) <= backlog.enough()).then_some(());
            let is_released = || release.is_released.load(Ordering::SeqCst).then_some(());
            let shortened = pin!(backlog.shortened.wait_until(is_short));
            select(shortened, pin!(release.released.wait_until(is_released))).await;
        }))
    }

    fn begins(&self, range: ByteRange, bytes: Option<&IoVector>) -> ChangeId {
        // A change past the end is not forwarded, because the disk refuses it.
        let is_inside = !range.is_empty() && range.end() <= self.dirty.size();
        let Some(bytes) = bytes.filter(|_| is_inside && self.is_blocking()) else {
            return NOT_FORWARDED;
        };
        self.forward(range, bytes)
    }

    fn completed(&self, change: ChangeId, range: ByteRange) -> Option<ChangeWait> {
        if range.is_empty() {
            return None;
        }
        if change != NOT_FORWARDED && change != OVERLAPPING && self.end_at_source(change, range) {
            return None;
        }
        self.dirty.mark(range);
        let waits = change == NOT_FORWARDED && self.is_blocking();
        if waits { self.wait_for_copy(range) } else { None }
    }

    fn abandoned(&self, change: ChangeId, range: ByteRange) {
        self.dirty.mark(range);
        if change != NOT_FORWARDED && change != OVERLAPPING {
            self.end_at_source(change, range);
        }
    }
}
