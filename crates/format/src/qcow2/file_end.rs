//! The end of the file: behind the last cluster in use, when the image is closed.
//!
//! Only then, because a storage that is being made shorter must not be written behind its new end: at
//! closing nothing is in flight and nothing follows. A cluster is cut off when its refcount is 0 in memory
//! and on disk and no active table lies in it; nothing durable refers to it then (`deferred_free`). Refcounts
//! of what was there when the image was opened may be wrong, and a repair could still mend them: such clusters
//! are cut off only if no table, of the active disk or of a snapshot, refers to any of them.
//! Refcount blocks that count nothing but themselves would keep a file long whose data is gone: they
//! leave the refcount table first, durably. A crash before the cut leaves a longer file.

use blockhouse_core::{Result, Storage};

use super::Qcow2;
use super::deferred_free::DeferredFree;
use super::refcount;

use super::state::{State, Step};

/// How many slices of refcounts are looked at, from the end on: 2 TiB of free space at clusters of 64 KiB.
/// What lies before that stays.
const MAX_SLICES: u64 = 1 << 14;
/// How often refcount blocks are dropped: one that is counted by another block may make that one empty.
const MAX_PASSES: u32 = 8;

/// A search for the last cluster in use, from the end of the file backwards.
struct Backwards {
    /// All clusters from here on are free.
    below: u64,
    slices_left: u64,
    /// Refcount blocks that were dropped.
    dropped: u64,
    /// Of the refcount block that is being looked through: where it is, and up to which cluster it counts
    /// nothing but itself. A slice that has to be read first ends a step, and the next one goes on there.
    looked: Option<(u64, u64)>,
}

impl<S: Storage> Qcow2<S> {
    /// Cuts off what lies behind the last cluster in use. All changes are durable and nothing is in
    /// flight.
    ///
    /// # Errors
    /// Only of writing tables and reading refcounts. A storage that cannot be made shorter stays as it is.
    pub(super) async fn truncate(&self) -> Result<()> {
        self.check_failure()?;
        if !self.state.lock().space.has_changed() {
            return Ok(());
        }
        let mut end = self.find_end(MAX_SLICES).await?;
        for _ in 0..MAX_PASSES {
            if end.dropped == 0 {
                break;
            }
            self.write_everything().await?;
            end = self.find_end(end.slices_left).await?;
        }
        if end.dropped > 0 {
            self.write_everything().await?;
        }
        let (clusters, is_sure) = {
            let state = self.state.lock();
            let clusters = state.clusters_in_use(end.below);
            (clusters, state.space.reads_as_zeros(clusters))
        };
        let length = self.geometry.offset_of(clusters);
        if self.storage.size() <= length || (!is_sure && self.refers_behind(length).await?) {
            return Ok(());
        }
        if self.storage.resize(length).await.is_ok() {
            self.state.lock().space.cut(clusters);
        }
        Ok(())
    }

    async fn find_end(&self, slices_left: u64) -> Result<Backwards> {
        let in_file = self.geometry.clusters_for(self.storage.size());
        let below = self.state.lock().space.bound().max(in_file);
        let mut end = Backwards { below, slices_left, dropped: 0, looked: None };
        let found = self.step(|state| state.look_backwards(&mut end)).await;
        self.marking(found).await?;
        Ok(end)
    }
}

impl State {
    /// Where the file ends at least: behind the header and the active tables, whatever refcounts say.
    fn clusters_in_use(&self, counted: u64) -> u64 {
        self.metadata.iter().max().map_or(counted, |&last| counted.max(last + 1))
    }

    /// Goes on with the search; drops refcount blocks that count nothing but themselves, each of which is
    /// a change of its own.
    fn look_backwards(&mut self, end: &mut Backwards) -> Step<()> {
        let geometry = self.geometry;
        // What no refcount block can be for is not counted.
        let countable = self.refcount_table.len() as u64 * geometry.block_refcounts();
        end.below = end.below.min(countable.max(1));
        while end.below > 0 && end.slices_left > 0 {
            let cluster = end.below - 1;
            let Some((id, index)) = self.refcount_slice(cluster)? else {
                end.below = cluster / geometry.block_refcounts() * geometry.block_refcounts();
                continue;
            };
            let slice = self.cache.get(id.offset).expect("a slice that was ensured");
            let is_used =
                |&at: &usize| refcount::get(&slice.bytes, geometry.refcount_order, at) != 0;
            let Some(last) = (0..=index).rev().find(is_used) else {
                end.below = cluster - index as u64;
                end.slices_left -= 1;
                continue;
            };
            end.below = cluster - (index - last) as u64 + 1;
            if !self.drop_empty_block(end.below - 1, &mut end.looked)? {
                return Ok(());
            }
            end.below -= 1;
            end.dropped += 1;
            // All of the block's were looked at, and there may be hundreds of thousands of blocks.
            let slices = geometry.block_refcounts() / geometry.slice_refcounts();
            end.slices_left = end.slices_left.saturating_sub(slices);
        }
        Ok(())
    }

    /// Takes the refcount block in this cluster out of the refcount table if it counts nothing else.
    fn drop_empty_block(&mut self, cluster: u64, looked: &mut Option<(u64, u64)>) -> Step<bool> {
        let geometry = self.geometry;
        let offset = geometry.offset_of(cluster);
        let of_block = |&word: &u64| word == offset;
        if !self.metadata.contains(&cluster) {
            return Ok(false);
        }
        let Some(index) = self.refcount_table.iter().rposition(of_block) else { return Ok(false) };
        let first = index as u64 * geometry.block_refcounts();
        let counted = first..first + geometry.block_refcounts();
        let seen = looked.filter(|&(block, _)| block == cluster).map_or(first, |(_, seen)| seen);
        for start in (seen..counted.end).step_by(geometry.slice_refcounts() as usize) {
            *looked = Some((cluster, start));
            let Some((id, _)) = self.refcount_slice(start)? else { return Ok(false) };
            let slice = self.cache.get(id.offset).expect("a slice that was ensured");
            let has_other = (0..geometry.slice_refcounts()).any(|at| {
                let count = refcount::get(&slice.bytes, geometry.refcount_order, at as usize);
                count != 0 && start + at != cluster
            });
            if has_other {
                return Ok(false);
            }
        }
        self.refcount_table[index] = 0;
        self.refcount_table_changed.insert(index);
        self.cache.forget(offset, offset + geometry.cluster_size(), geometry.slice_size());
        self.new_tables.remove(&offset);
        self.metadata.remove(&cluster);
        self.version += 1;
        if !counted.contains(&cluster) {
            self.defer_free(DeferredFree::of(cluster..cluster + 1));
        }
        Ok(true)
    }
}
