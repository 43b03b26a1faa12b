//! Freeing clusters: writebacks that are run for it, lowering refcounts, and holes for the host.
//!
//! `allocator/deferred_free` describes the life of a cluster on its way.

use blockhouse_core::{ReadAfterDiscard, Result, Storage, rare};
use parking_lot::Mutex;

use crate::qcow2::allocator::{DeferredFree, Punch};
use crate::qcow2::layout::options::Discard;
use crate::qcow2::tables::{Blocked, WritebackReason};

use super::{Metadata, State};

/// Clusters that are being freed. What is left of them when it is dropped is freeable still, but
/// for those that are being punched: they stay allocated, a leak, since their hole may come at any
/// time.
struct FreeingGuard<'a> {
    state: &'a Mutex<State>,
    free: DeferredFree,
}

impl Drop for FreeingGuard<'_> {
    fn drop(&mut self) {
        if !self.free.clusters.is_empty() {
            self.state.lock().allocator.frees.stop_freeing(self.free.clone());
        }
    }
}

impl<S: Storage> Metadata<S> {
    /// Frees clusters whose references left the tables in memory. If discarded ranges read as
    /// zeros, the host range is punched at once: the L2 entry on disk may still refer to it, so
    /// after a crash the guest must read its old data or zeros. Not where the data is
    /// encrypted, because a hole would not read as zeros.
    pub(crate) async fn free_clusters(&self, dropped: Vec<DeferredFree>) {
        if dropped.is_empty() {
            return;
        }
        let read_after_discard = self.storage().capabilities().read_after_discard;
        let is_zeroed = read_after_discard == ReadAfterDiscard::Zeros && !self.is_encrypted;
        for mut free in dropped {
            if free.punch == Punch::Yes && self.discard == Discard::Unmap && is_zeroed {
                // They have no other owner before. One that is dropped here stays allocated: a
                // leak, since its hole may come at any time.
                self.writer.punch(self.geometry.bytes_of(free.clusters.clone())).await;
                free.punch = Punch::No;
            }
            self.state.lock().allocator.frees.defer(free);
        }
        self.reclaim_if_much().await;
    }

    /// Runs a writeback and frees if so much waits for it that this is worth it. A failure is
    /// recorded where it has to be; the caller's change is made already.
    async fn reclaim_if_much(&self) {
        let has_many = {
            let state = self.state.lock();
            state.allocator.frees.has_many(state.tables.file.end(), self.geometry.cluster_bits)
        };
        if has_many {
            // Boxed, so that the future of a link stays small.
            let _ = rare(self.reclaim()).await;
        }
    }

    /// Makes what is pending free or freeable now free: runs a writeback, or waits for one.
    ///
    /// The caller may have prepared changes and hold a claim, a copy's memory or the permit for a
    /// new L2 table: a writeback waits for none of these, only for writes of tables and, at its
    /// end, for reads of the image, which need none of them either.
    ///
    /// # Errors
    /// Why tables cannot be written.
    pub(crate) async fn reclaim(&self) -> Result<()> {
        // One that runs may have begun before; then the second one takes what is pending. What it
        // is writing has to wait for it as well.
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
        let freed = self.process_frees().await;
        self.marking(freed).await
    }

    /// Lowers the refcounts of what no table refers to, and gives space back to the host.
    pub(super) async fn process_frees(&self) -> Result<()> {
        let _alone = self.free_lock.acquire().await;
        let count = self.state.lock().allocator.frees.freeable();
        if count == 0 {
            return Ok(());
        }
        self.reads.synchronize().await;
        for _ in 0..count {
            let Some(free) = self.state.lock().allocator.frees.begin_freeing() else { break };
            let mut freeing = FreeingGuard { state: &self.state, free };
            let free = &mut freeing.free;
            if free.punch == Punch::Yes && self.discard == Discard::Unmap {
                self.writer.punch(self.geometry.bytes_of(free.clusters.clone())).await;
            }
            free.punch = Punch::No;
            self.try_step(|state| {
                while !free.clusters.is_empty() {
                    state.allocator.free_next(&mut state.tables, free)?;
                }
                Ok::<(), Blocked>(())
            })
            .await?;
        }
        Ok(())
    }

    /// Gives ranges of clusters that are free back to the host.
    pub(crate) async fn give_to_host(&self, freed: &[std::ops::Range<u64>]) {
        if self.discard == Discard::Unmap {
            for clusters in freed {
                self.writer.punch(self.geometry.bytes_of(clusters.clone())).await;
            }
        }
    }
}
