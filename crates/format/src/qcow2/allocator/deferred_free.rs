//! Clusters that wait to be freed, and their states.
//!
//! 1. *Pending free*: the tables in memory no longer refer to the clusters; entries on disk may
//!    still do.
//! 2. *In writeback*: a writeback that began after the references were removed is running. If it
//!    fails, the clusters are pending again.
//! 3. *Freeable*: that writeback is durable. Clusters that no table ever referred to begin in this
//!    state.
//! 4. *Being freed*: reads that may have looked up the clusters have ended; the refcounts are
//!    decremented one by one.
//!
//! A writeback does not start by itself, so trimmed clusters might never become free while the
//! guest's writes extend the file. Two things start a writeback: a task that frees clusters when
//! many wait ([`DeferredFrees::has_many`]), and an allocation if the host may have no more space
//! (`writeback/fill_reserve`).

use std::collections::VecDeque;
use std::ops::Range;

use crate::qcow2::tables::{Scan, Step, Tables};

/// Bytes that may wait to be freed, whatever the length of the file. A disk writes that many bytes
/// in about the time that the flushes of a writeback take.
pub(crate) const MIN_WAITING: u64 = 4 << 20;
/// Maximum bytes that may wait to be freed, whatever the length of the file.
const MAX_WAITING: u64 = 1 << 30;

/// Whether the space of freed clusters is returned to the host by punching a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Punch {
    /// The space remains allocated in the host's file system, for the next allocation.
    No,
    /// The space becomes a hole.
    Yes,
}

/// The remaining users of a cluster after its refcount has been decremented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Users {
    /// No table refers to the cluster, so it becomes free.
    None,
    /// A snapshot refers, or may refer, to the cluster, so it is not expected to become free.
    Others,
}

/// Clusters whose refcounts are one higher than the number of references in the tables in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeferredFree {
    pub(crate) clusters: Range<u64>,
    pub(crate) punch: Punch,
    pub(crate) users: Users,
}

impl DeferredFree {
    /// Clusters that become free and whose host space is not punched.
    pub(crate) fn of(clusters: Range<u64>) -> Self {
        Self { clusters, punch: Punch::No, users: Users::None }
    }

    /// Appends the clusters to a list, merged with the last entry if the clusters are adjacent and
    /// the other fields are equal.
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

/// All clusters of an image that wait to be freed, in a list for each state; see the module's
/// documentation.
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
    /// Bytes that may wait to be freed, whatever the length of the file.
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

    /// Defers freeing clusters to which no table refers and no write is in flight; no writeback is
    /// needed first.
    pub(crate) fn defer_unlinked(&mut self, clusters: Range<u64>) {
        self.defer_freeable(DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) });
    }

    /// Allocates the free clusters at the start of a range, and frees them again, so that they are
    /// punched. Returns the first cluster that remains, after at most one slice of refcounts.
    pub(crate) fn free_again(&mut self, tables: &mut Tables, clusters: Range<u64>) -> Step<u64> {
        let count = clusters.end - clusters.start;
        Ok(match tables.refcounts().scan(clusters.start, count)? {
            Scan::Free(free) => {
                free.clone().try_for_each(|cluster| tables.check_not_active(cluster))?;
                free.clone().try_for_each(|cluster| tables.refcounts().set(cluster, 1))?;
                self.defer_unlinked(free.clone());
                free.end
            }
            Scan::Allocated(used) => clusters.start + used.min(count),
            Scan::NoRefcountBlock => clusters.end,
        })
    }

    /// Defers freeing these clusters, to which no entry on disk refers.
    pub(super) fn defer_freeable(&mut self, free: DeferredFree) {
        self.waiting += free.gain();
        self.freeable.push_back(free);
    }

    /// Frees clusters that no table ever referred to, but only after the table writes in flight
    /// have completed. Reason: these writes may change the clusters.
    pub(crate) fn abandon(&mut self, clusters: Range<u64>) {
        let free = DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) };
        self.waiting += free.gain();
        self.abandoned.push(free);
    }

    /// Takes the clusters abandoned up to now. The caller calls
    /// [`defer_unlinked`](Self::defer_unlinked) after the writes in flight have completed, or
    /// [`abandon`](Self::abandon) if its future fails or is dropped before that.
    pub(crate) fn take_abandoned(&mut self) -> Vec<Range<u64>> {
        let abandoned = std::mem::take(&mut self.abandoned);
        abandoned.iter().for_each(|free| self.waiting -= free.gain());
        abandoned.into_iter().map(|free| free.clusters).collect()
    }

    /// Defers freeing clusters that the tables in memory no longer refer to. When those tables are
    /// durable, the refcount of each cluster is decremented.
    pub(crate) fn defer(&mut self, free: DeferredFree) {
        self.waiting += free.gain();
        free.join(&mut self.pending);
    }

    /// Sorts pending clusters and merges them into runs, because tables lie among the data that
    /// they refer to, and each run costs one request to the host.
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

    /// Whether any clusters wait to be freed, except clusters in a writeback.
    pub(crate) fn has_any(&self) -> bool {
        self.has_pending() || !self.freeable.is_empty()
    }

    /// Whether any clusters wait for a writeback to begin.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty() || !self.abandoned.is_empty()
    }

    /// The number of entries in the freeable list.
    pub(crate) fn freeable(&self) -> usize {
        self.freeable.len()
    }

    /// Whether enough clusters wait, in a file of `end` clusters, to make a writeback worth its
    /// flushes. The threshold is an eighth of the file, at most [`MAX_WAITING`] and at least
    /// `min_waiting`. So each writeback frees a constant share of the file, and a guest that trims
    /// and writes extends the file by at most that share.
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

    /// Makes clusters that were being freed freeable again.
    pub(crate) fn stop_freeing(&mut self, free: DeferredFree) {
        self.end_freeing(&free);
        self.defer_freeable(free);
    }

    /// Removes these clusters from the count of clusters being freed, after they became free or
    /// freeing has stopped.
    pub(crate) fn end_freeing(&mut self, free: &DeferredFree) {
        self.freeing -= free.gain();
    }

    /// The number of clusters that become free by a reclaim or while the reclaim waits. After a
    /// reclaim the number is 0, unless more clusters were deferred meanwhile. If the number is not
    /// 0, an allocation may wait for a reclaim.
    pub(super) fn gain(&self) -> u64 {
        self.waiting + self.freeing
    }
}
