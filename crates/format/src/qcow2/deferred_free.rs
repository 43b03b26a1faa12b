//! Clusters on their way to be free again.
//!
//! The life of a cluster: free, allocated (counted, nothing refers to it), mapped, *pending free* (its
//! reference has left the tables in memory; tables on disk may still refer to it), *freeable* (a
//! writeback has made that durable), free (counted down, for the next owner).
//!
//! Nothing starts a writeback for its own sake, so what a guest trims could wait for ever while its
//! writes make the file longer. Two things do: whoever frees runs one when [`State::has_many_frees`], and
//! an allocation runs one where the host may give no more space (`make_room`).

use std::collections::VecDeque;
use std::ops::Range;

use blockhouse_core::{ReadAfterDiscard, Result, Storage};
use parking_lot::Mutex;

use super::round::Occasion;
use super::state::{Blocked, State};
use super::{Discard, Qcow2};

/// As many bytes may always wait to be freed: writing them takes a disk about as long as the flushes of a
/// writeback.
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

/// Clusters that are counted once too often.
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

    /// How many clusters come free by it.
    fn gain(&self) -> u64 {
        match self.users {
            Users::None => self.clusters.end - self.clusters.start,
            Users::Others => 0,
        }
    }
}

/// What waits to be counted down.
pub(crate) struct DeferredFrees {
    /// Pending free: no writeback has begun since.
    pending: Vec<DeferredFree>,
    /// Freeable.
    freeable: VecDeque<DeferredFree>,
    /// How many clusters come free by all of them, those of a running writeback included.
    waiting: u64,
    /// How many clusters come free by what is being counted down.
    freeing: u64,
    /// How many bytes may always wait.
    min_waiting: u64,
}

impl DeferredFrees {
    pub(crate) fn new(min_waiting: u64) -> Self {
        let (pending, freeable) = (Vec::new(), VecDeque::new());
        Self { pending, freeable, waiting: 0, freeing: 0, min_waiting }
    }

    /// References to these clusters have left the tables in memory.
    pub(crate) fn defer(&mut self, free: DeferredFree) {
        self.waiting += free.gain();
        free.join(&mut self.pending);
    }

    /// Makes runs of what is pending: tables lie among the data that they refer to, and the host is told of
    /// each run.
    pub(crate) fn join_pending(&mut self) {
        let mut all = std::mem::take(&mut self.pending);
        all.sort_by_key(|one| one.clusters.start);
        for one in all {
            one.join(&mut self.pending);
        }
    }

    /// These clusters are to be counted down, and no table on disk relies on them.
    pub(crate) fn defer_unlinked(&mut self, free: DeferredFree) {
        self.waiting += free.gain();
        self.freeable.push_back(free);
    }

    /// Starts a writeback. Returns the frees that become freeable when it has ended.
    pub(crate) fn begin_writeback(&mut self) -> Vec<DeferredFree> {
        std::mem::take(&mut self.pending)
    }

    /// That writeback is durable.
    pub(crate) fn finish_writeback(&mut self, frees: Vec<DeferredFree>) {
        self.freeable.extend(frees);
    }

    /// The writeback failed: its frees are pending again.
    pub(crate) fn abort_writeback(&mut self, frees: Vec<DeferredFree>) {
        let later = std::mem::replace(&mut self.pending, frees);
        self.pending.extend(later);
    }

    /// How many clusters become free by a [`Qcow2::reclaim`] or while it waits. None after it, unless more
    /// was deferred meanwhile: an allocation that sees any may wait for it.
    pub(crate) fn gain(&self) -> u64 {
        self.waiting + self.freeing
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.freeable.is_empty()
    }

    fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    fn freeable(&self) -> usize {
        self.freeable.len()
    }

    /// [`end_freeing`](Self::end_freeing) follows for each cluster of the answer.
    fn begin_freeing(&mut self) -> Option<DeferredFree> {
        let free = self.freeable.pop_front()?;
        self.waiting -= free.gain();
        self.freeing += free.gain();
        Some(free)
    }

    /// These are counted down, or not to be counted down by this owner any more.
    fn end_freeing(&mut self, free: &DeferredFree) {
        self.freeing -= free.gain();
    }
}

/// Clusters that are being counted down. What is left of them when it is dropped is freeable still, but
/// for those that are being punched: they stay counted, a leak, since their hole may come at any time.
struct FreeingGuard<'a> {
    state: &'a Mutex<State>,
    free: DeferredFree,
}

impl Drop for FreeingGuard<'_> {
    fn drop(&mut self) {
        if self.free.clusters.is_empty() {
            return;
        }
        let frees = &mut self.state.lock().frees;
        frees.end_freeing(&self.free);
        if self.free.punch == Punch::No {
            frees.defer_unlinked(self.free.clone());
        }
    }
}

impl State {
    /// References to these clusters left the tables in memory: once that is durable, each is counted
    /// once less.
    pub(crate) fn defer_free(&mut self, free: DeferredFree) {
        self.frees.defer(free);
    }

    /// Allocated for nothing: no table ever referred to these clusters, and nothing writes to them. They
    /// are free at once where their refcounts are at hand.
    pub(crate) fn free_unlinked(&mut self, clusters: Range<u64>) {
        let mut rest = clusters;
        // While the image is changed as a whole, refcounts stand still.
        while self.frozen.is_none()
            && !rest.is_empty()
            && self.decrement_refcount(rest.start).is_ok()
        {
            rest.start += 1;
        }
        if !rest.is_empty() {
            // An error is told to the next one that counts down.
            self.frees.defer_unlinked(DeferredFree::of(rest));
        }
    }

    /// Whether so much waits to be freed that a writeback is worth its flushes: an eighth of the file,
    /// which is what the file may be longer than needed anyway. So each writeback frees a constant
    /// share of the file, and a guest that trims and writes makes the file longer by no more than that.
    pub(crate) fn has_many_frees(&self) -> bool {
        let bits = self.geometry.cluster_bits;
        let share = (self.space.end() / 8).min(MAX_WAITING >> bits);
        self.frees.waiting > share.max(self.frees.min_waiting >> bits)
    }
}

impl<S: Storage> Qcow2<S> {
    /// Frees clusters whose references left the tables in memory. Space that the guest gave back goes to
    /// the host at once where that makes zeros of it: tables on disk may still refer to it, and after a
    /// crash the guest must find its own bytes there or zeros.
    pub(super) async fn free_clusters(&self, mut free: DeferredFree) {
        let is_zeroed = self.storage.capabilities().read_after_discard == ReadAfterDiscard::Zeros;
        if free.punch == Punch::Yes && self.discard == Discard::Punch && is_zeroed {
            // They have no other owner before. One that is dropped here stays counted: a leak, since its
            // hole may come at any time.
            self.punch(self.geometry.bytes_of(free.clusters.clone())).await;
            free.punch = Punch::No;
        }
        self.state.lock().defer_free(free);
    }

    /// Runs a writeback and counts down if so much waits for it that this is worth it. What fails is
    /// remembered where it has to be; the caller's change is made already.
    pub(super) async fn reclaim_if_much(&self) {
        if self.state.lock().has_many_frees() {
            // Boxed, so that the future of a commit stays small.
            let _ = Box::pin(self.reclaim()).await;
        }
    }

    /// Makes what is pending free or freeable now free: runs a writeback, or waits for one.
    ///
    /// Whoever calls it may have prepared changes and hold a claim, a copy's memory or the permit for a
    /// new L2 table: a writeback waits for none of these, only for writes of tables and, at its end, for
    /// reads of the image, which need none of them either.
    ///
    /// # Errors
    /// Why tables cannot be written.
    pub(super) async fn reclaim(&self) -> Result<()> {
        // One that runs may have begun before; then the second one takes what is pending. What it is
        // writing has to wait for it as well.
        for _ in 0..2 {
            self.check_failure()?;
            let is_due = {
                let state = self.state.lock();
                state.frees.has_pending() || state.round_is_running
            };
            if !is_due {
                break;
            }
            self.run_round(Occasion::Alone).await?;
        }
        let freed = self.process_frees().await;
        self.marking(freed).await
    }

    /// Counts down what no table refers to any more, and gives space back to the host.
    pub(super) async fn process_frees(&self) -> Result<()> {
        let _alone = self.freeing.acquire().await;
        let count = self.state.lock().frees.freeable();
        if count == 0 {
            return Ok(());
        }
        self.reads.synchronize().await;
        for _ in 0..count {
            let Some(free) = self.state.lock().frees.begin_freeing() else { break };
            let mut freeing = FreeingGuard { state: &self.state, free };
            let free = &mut freeing.free;
            if free.punch == Punch::Yes && self.discard == Discard::Punch {
                self.punch(self.geometry.bytes_of(free.clusters.clone())).await;
            }
            free.punch = Punch::No;
            self.step_if_roomy(|state: &mut State| {
                while let Some(cluster) = free.clusters.clone().next() {
                    state.decrement_refcount(cluster)?;
                    free.clusters.start = cluster + 1;
                    let clusters = cluster..cluster + 1;
                    state.frees.end_freeing(&DeferredFree { clusters, ..*free });
                }
                Ok::<(), Blocked>(())
            })
            .await?;
        }
        Ok(())
    }
}
