//! Frees clusters: runs the necessary writebacks, lowers refcounts, and punches holes.
//!
//! `allocator/deferred_free` describes the states of a cluster that is being freed.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::vec::IntoIter;

use blockhouse_core::{ReadAfterDiscard, Result, Storage, rare};
use parking_lot::Mutex;

use crate::qcow2::allocator::{DeferredFree, Punch};
use crate::qcow2::layout::options::Discard;
use crate::qcow2::tables::{Blocked, WritebackReason};

use super::{Metadata, State};

/// Clusters that are being freed. If the guard is dropped, the remaining clusters are freeable
/// again. Clusters whose punch is in flight remain allocated and leak, because the late punch may
/// still zero them, even after a reallocation.
struct FreeingGuard<'a> {
    state: &'a Mutex<State>,
    free: DeferredFree,
    is_punching: bool,
}

impl Drop for FreeingGuard<'_> {
    fn drop(&mut self) {
        if !self.free.clusters.is_empty() {
            let frees = &mut self.state.lock().allocator.frees;
            if self.is_punching {
                frees.end_freeing(&self.free);
            } else {
                frees.stop_freeing(self.free.clone());
            }
        }
    }
}

/// Whether freeable clusters remain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frees {
    /// All clusters that were freeable are free.
    Done,
    /// The limit of dirty slices is reached.
    Remain,
}

/// Clusters whose punch has not begun. If the guard is dropped, they are punched and freed later.
struct UnpunchedGuard<'a> {
    state: &'a Mutex<State>,
    rest: IntoIter<DeferredFree>,
}

impl Drop for UnpunchedGuard<'_> {
    fn drop(&mut self) {
        for free in self.rest.by_ref() {
            self.state.lock().allocator.frees.defer(free);
        }
    }
}

impl<S: Storage> Metadata<S> {
    /// Frees clusters to which the tables in memory no longer refer. If discarded ranges read as
    /// zeros, the host range is punched at once: the L2 entry on disk may still refer to this
    /// range, so after a crash the guest must read its old data or zeros. Encrypted data is not
    /// punched before the writeback, because a hole would not read as zeros.
    pub(crate) async fn free_clusters(&self, dropped: Vec<DeferredFree>) {
        if dropped.is_empty() {
            return;
        }
        let read_after_discard = self.storage().capabilities().read_after_discard;
        let is_zeroed = read_after_discard == ReadAfterDiscard::Zeros && !self.is_encrypted;
        let mut rest = UnpunchedGuard { state: &self.state, rest: dropped.into_iter() };
        for mut free in rest.rest.by_ref() {
            if free.punch == Punch::Yes && self.discard == Discard::Unmap && is_zeroed {
                // The clusters are not reallocated during the punch. If this future is dropped the
                // clusters leak, because the late punch may still zero them.
                self.writer.punch(self.geometry.bytes_of(free.clusters.clone())).await;
                free.punch = Punch::No;
            }
            self.state.lock().allocator.frees.defer(free);
        }
        self.reclaim_if_much().await;
    }

    /// Runs a writeback and frees clusters if enough are pending. A failure is only recorded,
    /// because the caller's change is made already.
    async fn reclaim_if_much(&self) {
        let has_many = {
            let state = self.state.lock();
            state.allocator.frees.has_many(state.tables.file.end(), self.geometry.cluster_bits)
        };
        if has_many {
            // The future is boxed, so that the future of a link stays small.
            let _ = rare(self.reclaim()).await;
        }
    }

    /// Frees all clusters that are pending or freeable now: runs a writeback, or waits for the
    /// running writeback.
    ///
    /// The caller may have prepared changes and hold a claim, the memory of a copy or the permit
    /// for a new L2 table. A writeback does not wait for any of these, so there is no deadlock. A
    /// writeback waits only for table writes, data writes that hold a guard, and, at its end, reads
    /// of the image. None of these waits for the caller.
    ///
    /// # Errors
    /// The reason why tables cannot be written.
    pub(crate) async fn reclaim(&self) -> Result<()> {
        // A running writeback may have begun before these frees; then the second writeback includes
        // them. The end of the running writeback makes the clusters that it took freeable.
        for _ in 0..2 {
            self.writer.check_failure()?;
            let is_due = {
                let state = self.state.lock();
                state.allocator.frees.has_pending() || state.is_running
            };
            if !is_due {
                break;
            }
            rare(self.write_back(WritebackReason::StableData)).await?;
        }
        free_all(self).await
    }

    /// Lowers the refcounts of clusters without references, and deallocates their space on the
    /// host, until the limit of dirty slices is reached. The next writeback continues: one cannot
    /// run here, because its end waits for the lock that this holds.
    pub(super) async fn process_frees(&self) -> Result<Frees> {
        let freed = self.free_freeable().await;
        let freed = self.marking(freed).await;
        if let Err(error) = &freed
            && !self.has_warned_of_frees.swap(true, Ordering::Relaxed)
        {
            // Most callers ignore the error, because later writebacks try again.
            let name = self.storage().name();
            let hint = "if no later attempt succeeds, 'blockhouse check -r leaks' frees them";
            tracing::warn!("{name}: cannot free clusters: {error}; {hint}");
        }
        freed
    }

    async fn free_freeable(&self) -> Result<Frees> {
        let _alone = self.free_lock.acquire().await;
        let count = self.state.lock().allocator.frees.freeable();
        if count == 0 {
            return Ok(Frees::Done);
        }
        self.reads.synchronize().await;
        for _ in 0..count {
            let Some(free) = self.state.lock().allocator.frees.begin_freeing() else { break };
            let mut freeing = FreeingGuard { state: &self.state, free, is_punching: false };
            let FreeingGuard { free, is_punching, .. } = &mut freeing;
            if free.punch == Punch::Yes
                && self.discard == Discard::Unmap
                && self.are_unshared(free.clusters.clone()).await?
            {
                *is_punching = true;
                self.writer.punch(self.geometry.bytes_of(free.clusters.clone())).await;
                *is_punching = false;
            }
            free.punch = Punch::No;
            let lowered = self.try_step(|state| {
                while !free.clusters.is_empty() {
                    state.tables.check_dirty_limit()?;
                    state.allocator.free_next(&mut state.tables, free)?;
                }
                Ok::<(), Blocked>(())
            });
            if lowered.await?.is_none() {
                return Ok(Frees::Remain);
            }
        }
        Ok(Frees::Done)
    }

    /// Whether each refcount is 1. In a damaged image, a cluster that is being freed may have other
    /// users.
    async fn are_unshared(&self, mut clusters: Range<u64>) -> Result<bool> {
        let unshared = self.try_step(|state| {
            while !clusters.is_empty() && state.tables.refcounts().get(clusters.start)? == 1 {
                clusters.start += 1;
            }
            Ok::<bool, Blocked>(clusters.is_empty())
        });
        Ok(unshared.await?.unwrap_or(false))
    }

    /// Deallocates ranges of free clusters on the host, if discards unmap. The clusters are
    /// allocated during the punch: if this future is dropped, a late punch must not zero data of a
    /// new owner. Failures are ignored, because the host then only keeps the space.
    pub(crate) async fn give_to_host(&self, freed: &[Range<u64>]) {
        if self.discard != Discard::Unmap {
            return;
        }
        for clusters in freed {
            let mut rest = clusters.clone();
            let taken = self.step(|state| {
                while !rest.is_empty() {
                    let State { allocator, tables, .. } = state;
                    tables.check_dirty_limit()?;
                    rest.start = allocator.frees.free_again(tables, rest.clone())?;
                }
                Ok(())
            });
            if self.marking(taken.await).await.is_err() {
                return;
            }
        }
        let _ = free_all(self).await;
    }
}

/// Frees all freeable clusters, with writebacks where the limit of dirty slices is reached.
async fn free_all<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    while metadata.process_frees().await? == Frees::Remain {
        rare(metadata.write_back_all()).await?;
    }
    Ok(())
}
