//! Clusters on their way to be free again.
//!
//! 1. *Pending free*: their reference has left the tables in memory; entries on disk may still
//!    refer to them.
//! 2. *In writeback*: a writeback that began after that is running. Where it fails they are pending
//!    again.
//! 3. *Freeable*: that writeback is durable. Clusters that no table ever referred to begin here.
//! 4. *Being freed*: reads that may have looked them up have ended; one refcount after the other is
//!    lowered.
//!
//! No writeback starts for its own sake, so trimmed clusters could never become free while the
//! guest's writes make the file longer. Two things start one: a task that frees clusters when many
//! wait ([`DeferredFrees::has_many`]), and an allocation where the host may have no more space
//! (`writeback/fill_reserve`).

use std::collections::VecDeque;
use std::ops::Range;

/// As many bytes may always wait to be freed: writing them takes a disk about as long as the
/// flushes of a writeback.
pub(crate) const MIN_WAITING: u64 = 4 << 20;
/// As many bytes never wait, however long the file is.
const MAX_WAITING: u64 = 1 << 30;

/// Whether the host file gets the space back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Punch {
    /// It stays for the next allocation.
    No,
    /// It becomes a hole.
    Yes,
}

/// Whether a cluster loses its last reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Users {
    /// It becomes free.
    None,
    /// It does not, or maybe not: a snapshot refers to it.
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

    /// Puts them at the end of a list.
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

    /// How many clusters become free by it.
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
    /// No table ever referred to them, but writes to them may be in flight.
    abandoned: Vec<DeferredFree>,
    /// How many clusters become free by all of these.
    waiting: u64,
    /// How many clusters become free by what is being freed.
    freeing: u64,
    /// How many bytes may always wait.
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

    /// Clusters that no table refers to, and to which no write is in flight, are free soon.
    pub(crate) fn defer_unlinked(&mut self, clusters: Range<u64>) {
        self.defer_freeable(DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) });
    }

    /// Defers freeing these clusters, to which no entry on disk refers.
    pub(super) fn defer_freeable(&mut self, free: DeferredFree) {
        self.waiting += free.gain();
        self.freeable.push_back(free);
    }

    /// Frees clusters that no table ever referred to, once the writes of tables that are in flight
    /// now have completed: these may be writes to them.
    pub(crate) fn abandon(&mut self, clusters: Range<u64>) {
        let free = DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) };
        self.waiting += free.gain();
        self.abandoned.push(free);
    }

    /// The clusters that were abandoned up to now. After the writes in flight have completed,
    /// [`defer_unlinked`](Self::defer_unlinked) follows, or before that
    /// [`abandon`](Self::abandon).
    pub(crate) fn take_abandoned(&mut self) -> Vec<Range<u64>> {
        let abandoned = std::mem::take(&mut self.abandoned);
        abandoned.iter().for_each(|free| self.waiting -= free.gain());
        abandoned.into_iter().map(|free| free.clusters).collect()
    }

    /// References to these clusters left the tables in memory: once that is durable, the refcount
    /// of each is lowered by one.
    pub(crate) fn defer(&mut self, free: DeferredFree) {
        self.waiting += free.gain();
        free.join(&mut self.pending);
    }

    /// Makes runs of what is pending: tables lie among the data that they refer to, and the host is
    /// told of each run.
    pub(crate) fn join_pending(&mut self) {
        let mut all = std::mem::take(&mut self.pending);
        all.sort_by_key(|one| one.clusters.start);
        for one in all {
            one.join(&mut self.pending);
        }
    }

    /// A writeback begins: what is pending free becomes freeable when it has ended.
    pub(crate) fn begin_writeback(&mut self) {
        self.in_writeback = std::mem::take(&mut self.pending);
    }

    /// The writeback is durable.
    pub(crate) fn finish_writeback(&mut self) {
        self.freeable.extend(self.in_writeback.drain(..));
    }

    /// The writeback failed: what it was to make freeable is pending again.
    pub(crate) fn abort_writeback(&mut self) {
        let later = std::mem::take(&mut self.pending);
        self.pending = std::mem::take(&mut self.in_writeback);
        self.pending.extend(later);
    }

    /// Whether anything waits to be freed.
    pub(crate) fn has_any(&self) -> bool {
        self.has_pending() || !self.freeable.is_empty()
    }

    /// Whether anything waits for a writeback to begin.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty() || !self.abandoned.is_empty()
    }

    /// How many entries of the list are freeable.
    pub(crate) fn freeable(&self) -> usize {
        self.freeable.len()
    }

    /// Whether so much waits, in a file of `end` clusters, that a writeback is worth its flushes:
    /// an eighth of the file, which is what the file may be longer than needed anyway. So each
    /// writeback frees a constant share of the file, and a guest that trims and writes makes
    /// the file longer by no more than that.
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

    /// Clusters that were being freed are freeable still, but for those that are being punched:
    /// their hole may come at any time, so they stay allocated, a leak.
    pub(crate) fn stop_freeing(&mut self, free: DeferredFree) {
        self.end_freeing(&free);
        if free.punch == Punch::No {
            self.defer_freeable(free);
        }
    }

    /// These clusters are free, or no longer being freed.
    pub(super) fn end_freeing(&mut self, free: &DeferredFree) {
        self.freeing -= free.gain();
    }

    /// How many clusters become free by a reclaim or while it waits. None after it, unless more was
    /// deferred meanwhile: an allocation that sees any may wait for it.
    pub(super) fn gain(&self) -> u64 {
        self.waiting + self.freeing
    }
}
