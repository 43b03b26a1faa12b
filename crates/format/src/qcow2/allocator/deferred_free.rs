//! Clusters that wait to be freed, and their states.
//!
//! 1. *Pending free*: their reference has left the tables in memory; entries on disk may still
//!    refer to them.
//! 2. *In writeback*: a writeback that began after that is running. If it fails, they are pending
//!    again.
//! 3. *Freeable*: that writeback is durable. Clusters that no table ever referred to begin here.
//! 4. *Being freed*: reads that may have looked them up have ended; their refcounts are decremented
//!    one by one.
//!
//! A writeback does not start by itself, so trimmed clusters might never become free while the
//! guest's writes extend the file. Two things start one: a task that frees clusters when many wait
//! ([`DeferredFrees::has_many`]), and an allocation if the host may have no more space
//! (`writeback/fill_reserve`).

use std::collections::VecDeque;
use std::ops::Range;

/// Bytes that may always wait to be freed. A disk writes them in about the time of the flushes of a
/// writeback.
pub(crate) const MIN_WAITING: u64 = 4 << 20;
/// Maximum bytes that may wait, for files of any length.
const MAX_WAITING: u64 = 1 << 30;

/// Whether the space is returned to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Punch {
    /// The space stays for the next allocation.
    No,
    /// The space becomes a hole.
    Yes,
}

/// Whether a cluster loses its last reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Users {
    /// The cluster becomes free.
    None,
    /// The cluster does not, or may not, become free: a snapshot refers to it.
    Others,
}

/// Clusters whose refcounts are one too high.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeferredFree {
    pub(crate) clusters: Range<u64>,
    pub(crate) punch: Punch,
    pub(crate) users: Users,
}

impl DeferredFree {
    /// Clusters that become free, with their space kept.
    pub(crate) fn of(clusters: Range<u64>) -> Self {
        Self { clusters, punch: Punch::No, users: Users::None }
    }

    /// Appends the clusters to a list.
    pub(crate) fn join(self, list: &mut Vec<Self>) {
        match list.last_mut() {
            Some(last)
                if last.punch == self.punch
                    && last.users == self.users
                    && last.clusters.end == self.clusters.start =>
            {
                last.clusters.end = self.clusters.end;
            }
            _ => list.push(self),
        }
    }

    /// The number of clusters that become free.
    fn gain(&self) -> u64 {
        match self.users {
            Users::None => self.clusters.end - self.clusters.start,
            Users::Others => 0,
        }
    }
}

/// See the module's page.
pub(crate) struct DeferredFrees {
    pending: Vec<DeferredFree>,
    in_writeback: Vec<DeferredFree>,
    freeable: VecDeque<DeferredFree>,
    /// Clusters that no table ever referred to, but to which writes may be in flight.
    abandoned: Vec<DeferredFree>,
    /// The number of clusters in these lists that become free.
    waiting: u64,
    /// The number of clusters being freed that become free.
    freeing: u64,
    /// Bytes that may always wait.
    min_waiting: u64,
}

impl DeferredFrees {
    pub(super) fn new(min_waiting: u64) -> Self {
        Self {
            pending: Vec::new(),
            in_writeback: Vec::new(),
            freeable: VecDeque::new(),
            abandoned: Vec::new(),
            waiting: 0,
            freeing: 0,
            min_waiting,
        }
    }

    /// Frees clusters soon to which no table refers and no write is in flight.
    pub(crate) fn defer_unlinked(&mut self, clusters: Range<u64>) {
        self.defer_freeable(DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) });
    }

    /// Defers freeing these clusters, to which no entry on disk refers.
    pub(super) fn defer_freeable(&mut self, free: DeferredFree) {
        self.waiting += free.gain();
        self.freeable.push_back(free);
    }

    /// Frees clusters that no table ever referred to, after the table writes in flight now have
    /// completed: these may write to the clusters.
    pub(crate) fn abandon(&mut self, clusters: Range<u64>) {
        let free = DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) };
        self.waiting += free.gain();
        self.abandoned.push(free);
    }

    /// Takes the clusters abandoned up to now. The caller calls
    /// [`defer_unlinked`](Self::defer_unlinked) after the writes in flight have completed, or
    /// [`abandon`](Self::abandon) before that.
    pub(crate) fn take_abandoned(&mut self) -> Vec<Range<u64>> {
        let abandoned = std::mem::take(&mut self.abandoned);
        abandoned.iter().for_each(|free| self.waiting -= free.gain());
        abandoned.into_iter().map(|free| free.clusters).collect()
    }

    /// Frees clusters whose references have left the tables in memory. When that is durable, the
    /// refcount of each is decremented.
    pub(crate) fn defer(&mut self, free: DeferredFree) {
        self.waiting += free.gain();
        free.join(&mut self.pending);
    }

    /// Merges pending clusters into runs: tables lie among the data that they refer to, and each
    /// run is a request to the host.
    pub(crate) fn join_pending(&mut self) {
        let mut all = std::mem::take(&mut self.pending);
        all.sort_by_key(|one| one.clusters.start);
        for one in all {
            one.join(&mut self.pending);
        }
    }

    /// Begins a writeback: pending clusters become freeable when it has ended.
    pub(crate) fn begin_writeback(&mut self) {
        self.in_writeback = std::mem::take(&mut self.pending);
    }

    /// Makes the clusters in writeback freeable: the writeback is durable.
    pub(crate) fn finish_writeback(&mut self) {
        self.freeable.extend(self.in_writeback.drain(..));
    }

    /// Makes the clusters in writeback pending again: the writeback failed.
    pub(crate) fn abort_writeback(&mut self) {
        let later = std::mem::take(&mut self.pending);
        self.pending = std::mem::take(&mut self.in_writeback);
        self.pending.extend(later);
    }

    /// Whether any clusters wait to be freed.
    pub(crate) fn has_any(&self) -> bool {
        self.has_pending() || !self.freeable.is_empty()
    }

    /// Whether any clusters wait for a writeback to begin.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty() || !self.abandoned.is_empty()
    }

    /// How many entries of the list are freeable.
    pub(crate) fn freeable(&self) -> usize {
        self.freeable.len()
    }

    /// Whether enough clusters wait, in a file of `end` clusters, to make a writeback worth its
    /// flushes: an eighth of the file, by which it may be longer than needed anyway. So each
    /// writeback frees a constant share of the file, and a guest that trims and writes extends the
    /// file by no more than that.
    pub(crate) fn has_many(&self, end: u64, cluster_bits: u32) -> bool {
        let share = (end / 8).min(MAX_WAITING >> cluster_bits);
        self.waiting > share.max(self.min_waiting >> cluster_bits)
    }

    /// Takes the first freeable clusters; [`Allocator::free_next`](super::Allocator::free_next) or
    /// [`stop_freeing`](Self::stop_freeing) follows for each of them.
    pub(crate) fn begin_freeing(&mut self) -> Option<DeferredFree> {
        let free = self.freeable.pop_front()?;
        self.waiting -= free.gain();
        self.freeing += free.gain();
        Some(free)
    }

    /// Makes clusters that were being freed freeable again. Those being punched stay allocated, a
    /// leak: their hole may be punched at any time.
    pub(crate) fn stop_freeing(&mut self, free: DeferredFree) {
        self.end_freeing(&free);
        if free.punch == Punch::No {
            self.defer_freeable(free);
        }
    }

    /// Ends the freeing of these clusters: they are free, or freeing has stopped.
    pub(super) fn end_freeing(&mut self, free: &DeferredFree) {
        self.freeing -= free.gain();
    }

    /// The number of clusters that become free by a reclaim or while it waits. It is 0 after a
    /// reclaim, unless more was deferred meanwhile. If it is not 0, an allocation may wait for a
    /// reclaim.
    pub(super) fn gain(&self) -> u64 {
        self.waiting + self.freeing
    }
}
