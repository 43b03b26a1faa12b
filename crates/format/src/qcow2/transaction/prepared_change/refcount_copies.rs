//! The refcount blocks after a change of the snapshots: the active refcounts, plus the references
//! of a new snapshot, or minus the references of a deleted snapshot.
//!
//! Each block with a cluster that the snapshot refers to gets a copy in a new cluster; the other
//! blocks stay. A copy consists of slices. A slice is written again if its refcounts or references
//! change. A cluster that loses its last reference keeps a refcount of one: the cluster is freed
//! later, as usual.

use std::collections::{BTreeMap, BTreeSet};

use blockhouse_core::{Error, ErrorKind, Result, Storage, WorkBudget};
use futures_util::stream::{self, StreamExt};

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::layout::{entry, refcount};
use crate::qcow2::tables::SliceKind;
use crate::qcow2::writeback::Metadata;

use super::plan::Purpose;
use super::reference_counts::{Left, ReferenceCounts};
use super::space::{Halt, Space, check_wanted};
use super::table_parts::{MAX_IN_FLIGHT, MAX_SLICES_IN_FLIGHT, Part, look_at, write};

/// The refcount blocks after the change; see the module's documentation.
pub(super) struct RefcountCopies {
    geometry: Geometry,
    purpose: Purpose,
    /// The copies of refcount blocks, by number of the block.
    copies: BTreeMap<u64, u64>,
    budget: WorkBudget,
}

/// A slice of refcounts, or all of a block, to be encoded.
#[derive(Clone, Copy)]
struct Target {
    /// The first slice.
    slice: u64,
    /// Location and length of the active bytes.
    active: Part,
    /// Offset of the copy.
    copy: u64,
}

impl RefcountCopies {
    pub(super) fn new(geometry: Geometry, purpose: Purpose) -> Self {
        Self { geometry, purpose, copies: BTreeMap::new(), budget: WorkBudget::new() }
    }

    /// The refcount table that refers to the copies, given the active refcount table.
    pub(super) fn table(&self, mut active: Vec<u64>) -> Vec<u64> {
        self.copies.iter().for_each(|(&block, &copy)| active[block as usize] = copy);
        active
    }

    /// The numbers of the blocks that copies replace.
    pub(super) fn replaced(&self) -> impl Iterator<Item = u64> {
        self.copies.keys().copied()
    }

    fn slices_in_block(&self) -> u64 {
        self.geometry.cluster_size() / self.geometry.slice_size()
    }

    /// Encodes the slices that changed since they were encoded. Returns the error of the first
    /// slice that cannot be encoded in its present state. The next update retries such slices.
    pub(super) async fn update<S: Storage>(
        &mut self,
        metadata: &Metadata<S>,
        counts: &mut ReferenceCounts,
        space: &mut Space<'_, S>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Error>, Halt> {
        let table = metadata.lock().tables.refcount_table().to_vec();
        let mut slices = counts.stale().clone();
        slices.extend(self.changed_slices(metadata, &table, counts));
        self.drop_unneeded(&mut slices, counts);
        let blocks: BTreeSet<u64> =
            slices.iter().map(|slice| slice / self.slices_in_block()).collect();
        let is_new = |block: &&u64| !self.copies.contains_key(block);
        let new: BTreeSet<u64> = blocks.iter().filter(is_new).copied().collect();
        space.check_room(new.len())?;
        let mut refused = None;
        let mut targets = Vec::new();
        for block in blocks {
            let Some(active) = self.block(&table, block, metadata)? else {
                let what = "a cluster in use has no refcount block";
                let cluster = block * self.geometry.block_refcounts();
                refused = refused.or(Some(self.corrupt(metadata, what, cluster)));
                continue;
            };
            let first = block * self.slices_in_block();
            if new.contains(&block) {
                let copy = space.take().await?;
                self.copies.insert(block, copy);
                targets.push(self.target(first, active, copy, self.geometry.cluster_size()));
                continue;
            }
            let copy = self.copies[&block];
            for &slice in slices.range(first..first + self.slices_in_block()) {
                let delta = (slice - first) * self.geometry.slice_size();
                let length = self.geometry.slice_size();
                targets.push(self.target(slice, active + delta, copy + delta, length));
            }
        }
        let together = if new.is_empty() { MAX_SLICES_IN_FLIGHT } else { MAX_IN_FLIGHT };
        for some in targets.chunks(together) {
            check_wanted(is_cancelled)?;
            let error = self.encode_some(metadata, some, counts).await?;
            refused = refused.or(error);
        }
        Ok(refused)
    }

    /// Whether a slice must be encoded: its block has a copy, or references of its clusters are
    /// counted.
    fn is_needed(&self, slice: u64, counts: &ReferenceCounts) -> bool {
        self.copies.contains_key(&(slice / self.slices_in_block())) || counts.has_any(slice)
    }

    /// Removes slices that need not be encoded.
    fn drop_unneeded(&self, slices: &mut BTreeSet<u64>, counts: &mut ReferenceCounts) {
        slices.retain(|&slice| {
            let is_needed = self.is_needed(slice, counts);
            if !is_needed {
                counts.set_encoded(slice);
            }
            is_needed
        });
    }

    fn target(&self, slice: u64, offset: u64, copy: u64, length: u64) -> Target {
        Target { slice, active: Part { kind: SliceKind::Refcounts, offset, length }, copy }
    }

    /// The offset of a block.
    fn block<S: Storage>(
        &self,
        table: &[u64],
        block: u64,
        metadata: &Metadata<S>,
    ) -> Result<Option<u64>> {
        let word = table.get(block as usize).copied().unwrap_or(0);
        entry::refcount_block(word, self.geometry).map_err(|violation| {
            let what = format!("entry {block} of the refcount table {violation}");
            Error::new(ErrorKind::Corrupt, what).on(metadata.storage().name())
        })
    }

    /// The slices that guests changed and that must be encoded. Notes of other slices are dropped.
    fn changed_slices<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        table: &[u64],
        counts: &ReferenceCounts,
    ) -> Vec<u64> {
        let geometry = self.geometry;
        let changed = metadata.lock().tables.watch.changed(SliceKind::Refcounts);
        if changed.is_empty() {
            return Vec::new();
        }
        let blocks: BTreeMap<u64, u64> = (0..).zip(table).map(|(at, &word)| (word, at)).collect();
        let mut slices = Vec::new();
        for offset in changed {
            let block = offset & !(geometry.cluster_size() - 1);
            let slice = blocks.get(&block).map(|number| {
                number * self.slices_in_block() + (offset - block) / geometry.slice_size()
            });
            match slice.filter(|slice| self.is_needed(*slice, counts)) {
                Some(slice) => slices.push(slice),
                None => drop(metadata.lock().tables.look_at(offset, SliceKind::Refcounts)),
            }
        }
        slices
    }

    async fn encode_some<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        targets: &[Target],
        counts: &mut ReferenceCounts,
    ) -> Result<Option<Error>> {
        let looks = targets.iter().map(async |target| look_at(metadata, target.active).await);
        let looks: Vec<_> = stream::iter(looks).buffered(targets.len()).collect().await;
        let (mut writes, mut refused) = (Vec::new(), None);
        for (target, bytes) in targets.iter().zip(looks) {
            let mut bytes = bytes?;
            let step = self.geometry.slice_size() as usize;
            for (slice, bytes) in (target.slice..).zip(bytes.chunks_exact_mut(step)) {
                match self.encode(metadata, slice, bytes, counts) {
                    Ok(()) => counts.set_encoded(slice),
                    Err(error) => {
                        counts.set_stale(slice);
                        refused = refused.or(Some(error));
                    }
                }
                self.budget.spend(WorkBudget::QUANTUM / 2).await;
            }
            writes.push(TableWrite { offset: target.copy, bytes });
        }
        write(metadata, &writes).await?;
        Ok(refused)
    }

    /// Adds the references of a slice's clusters to their refcounts, or subtracts them.
    fn encode<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        slice: u64,
        bytes: &mut [u8],
        counts: &mut ReferenceCounts,
    ) -> Result<()> {
        let order = self.geometry.refcount_order;
        let mut all_left = Vec::new();
        for (index, references) in counts.of_slice(slice) {
            let count = refcount::get(bytes, order, index);
            let cluster = slice * self.geometry.slice_refcounts() + index as u64;
            let is_counted = count >= if self.purpose == Purpose::Delete { references } else { 1 };
            if !is_counted {
                let what = "the refcount of a cluster in use is 0";
                return Err(self.corrupt(metadata, what, cluster));
            }
            let new = match self.purpose {
                Purpose::Create => self.sum(metadata, count, references)?,
                Purpose::Delete => {
                    let left = [Left::None, Left::One].get((count - references) as usize);
                    all_left.push((cluster, left.copied().unwrap_or(Left::More)));
                    (count - references).max(1)
                }
            };
            refcount::set(bytes, order, index, new);
        }
        all_left.into_iter().for_each(|(cluster, left)| counts.set_left(cluster, left));
        Ok(())
    }

    fn sum<S: Storage>(&self, metadata: &Metadata<S>, count: u64, references: u64) -> Result<u64> {
        if references <= self.geometry.max_refcount() - count {
            return Ok(count + references);
        }
        let bits = 1 << self.geometry.refcount_order;
        let what = format!("refcounts of {bits} bits cannot count one more snapshot");
        Err(Error::new(ErrorKind::Unsupported, what)
            .on(metadata.storage().name())
            .hint("delete a snapshot, or copy the image into one with wider refcounts"))
    }

    fn corrupt<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        what: &'static str,
        cluster: u64,
    ) -> Error {
        Error::new(ErrorKind::Corrupt, what)
            .on(metadata.storage().name())
            .at(self.geometry.offset_of(cluster))
            .hint("check the image before using it")
    }
}
