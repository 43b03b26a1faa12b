//! Refcounts in memory. Only these refcounts define which clusters are in use.

use std::ops::Range;

use blockhouse_core::Error;

use crate::qcow2::layout::{entry, refcount};

use super::slice_cache::{DataStability, Slice, SliceId, SliceKind};
use super::{Blocked, Step, Tables};

/// The use of the clusters from a given cluster on, within one slice of refcounts.
pub(crate) enum Scan {
    /// The clusters that are free.
    Free(Range<u64>),
    /// The number of clusters that are in use.
    Allocated(u64),
    /// The cluster has no refcount block. The cluster is free, but a block must be added before the
    /// cluster is allocated.
    NoRefcountBlock,
}

/// The last cluster in use up to a given cluster, within one slice of refcounts.
pub(crate) enum LastCounted {
    /// This cluster.
    Cluster(u64),
    /// No cluster from this one on is in use.
    NoneFrom(u64),
    /// The given cluster has no refcount block. The block would begin with this cluster.
    NoRefcountBlock(u64),
}

impl Tables {
    /// The refcount block that an entry of the refcount table refers to.
    pub(crate) fn refcount_block(&self, index: u64) -> Result<Option<u64>, Error> {
        let word = self.refcount_table.get(index as usize);
        entry::refcount_block(word, self.geometry).map_err(|error| {
            let what = format!("entry {index} of the refcount table {error}");
            self.corrupt(what, self.header().refcount_table_offset + index * 8)
        })
    }

    /// Refcounts, in memory.
    pub(crate) fn refcounts(&mut self) -> Refcounts<'_> {
        Refcounts { tables: self }
    }
}

/// Refcounts of the tables in memory.
pub(crate) struct Refcounts<'a> {
    tables: &'a mut Tables,
}

impl Refcounts<'_> {
    /// Whether a cluster has a refcount block. If so, the slice with its refcount is cached.
    pub(crate) fn has_block(&mut self, cluster: u64) -> Step<bool> {
        Ok(self.slice(cluster)?.is_some())
    }

    /// The slice with a cluster's refcount, cached; `None` if no refcount block exists.
    fn slice(&mut self, cluster: u64) -> Step<Option<(SliceId, usize)>> {
        let at = self.tables.geometry.refcount_index(cluster);
        let Some(block) = self.tables.refcount_block(at.table_index)? else { return Ok(None) };
        let id = SliceId { offset: block + at.slice_offset, kind: SliceKind::Refcounts };
        self.tables.ensure(id)?;
        Ok(Some((id, at.index)))
    }

    fn cached(&mut self, id: SliceId) -> Step<&Slice> {
        self.tables.cache.get(id.offset).ok_or(Blocked::CacheMiss(id))
    }

    /// A cluster's refcount.
    pub(crate) fn get(&mut self, cluster: u64) -> Step<u64> {
        let order = self.tables.geometry.refcount_order;
        let Some((id, index)) = self.slice(cluster)? else { return Ok(0) };
        Ok(refcount::get(&self.cached(id)?.bytes, order, index))
    }

    /// Changes the refcount of a cluster that has a refcount block.
    pub(crate) fn set(&mut self, cluster: u64, value: u64) -> Step<()> {
        let order = self.tables.geometry.refcount_order;
        let Some((id, index)) = self.slice(cluster)? else {
            let what = "a cluster in use has no refcount block";
            return Err(self.tables.corrupt(what, self.tables.geometry.offset_of(cluster)).into());
        };
        self.tables.watch.note(id.offset, SliceKind::Refcounts);
        let bytes = self.tables.cache.change(id.offset, index, DataStability::Stable);
        refcount::set(bytes, order, index, value);
        self.tables.has_counted = true;
        Ok(())
    }

    /// Up to `limit` free clusters from `cluster` on, or the number of clusters in use from
    /// `cluster` on, within one slice.
    pub(crate) fn scan(&mut self, cluster: u64, limit: u64) -> Step<Scan> {
        self.tables.check_within_limits(cluster)?;
        let Some((id, first)) = self.slice(cluster)? else {
            return Ok(Scan::NoRefcountBlock);
        };
        let order = self.tables.geometry.refcount_order;
        let last = self.tables.geometry.slice_refcounts() as usize;
        let slice = self.cached(id)?;
        let mut used = refcount::used_from(&slice.bytes, order, first).peekable();
        let next = used.peek().copied().unwrap_or(last);
        Ok(if next > first {
            Scan::Free(cluster..cluster + limit.min((next - first) as u64))
        } else {
            let in_use = used.zip(first..).take_while(|(used, index)| used == index);
            Scan::Allocated(in_use.count() as u64)
        })
    }

    /// The last cluster in use up to `cluster`, within one slice.
    pub(crate) fn last_counted(&mut self, cluster: u64) -> Step<LastCounted> {
        let geometry = self.tables.geometry;
        let Some((id, index)) = self.slice(cluster)? else {
            let first = cluster / geometry.block_refcounts() * geometry.block_refcounts();
            return Ok(LastCounted::NoRefcountBlock(first));
        };
        let slice = self.cached(id)?;
        let is_used = |&at: &usize| refcount::get(&slice.bytes, geometry.refcount_order, at) != 0;
        Ok(match (0..=index).rev().find(is_used) {
            Some(last) => LastCounted::Cluster(cluster - (index - last) as u64),
            None => LastCounted::NoneFrom(cluster - index as u64),
        })
    }

    /// Whether the slice of refcounts that begins with cluster `start` has a refcount above 0 for
    /// any cluster other than `except`; `None` if no refcount block exists.
    pub(crate) fn counts_other(&mut self, start: u64, except: u64) -> Step<Option<bool>> {
        let geometry = self.tables.geometry;
        let Some((id, _)) = self.slice(start)? else { return Ok(None) };
        let slice = self.cached(id)?;
        let mut used = refcount::used_from(&slice.bytes, geometry.refcount_order, 0);
        Ok(Some(used.any(|at| start + at as u64 != except)))
    }

    /// Creates a refcount block, which nothing on disk refers to yet.
    ///
    /// # Errors
    /// `Corrupt` if the refcount table is too short for the block.
    pub(crate) fn add_block(&mut self, index: u64, offset: u64) -> Result<(), Error> {
        if !self.tables.refcount_table.set(index as usize, offset) {
            let table = self.tables.header().refcount_table_offset;
            return Err(self.tables.past_table("refcount table", table));
        }
        self.tables.init_table(offset, SliceKind::Refcounts);
        Ok(())
    }

    /// Removes a refcount block from the refcount table.
    pub(crate) fn remove_block(&mut self, index: usize) {
        self.tables.watch.end();
        let geometry = self.tables.geometry;
        let offset = self.tables.refcount_table.get(index);
        // An index past the end of the refcount table has no entry.
        let _ = self.tables.refcount_table.set(index, 0);
        self.tables.cache.invalidate(
            offset,
            offset + geometry.cluster_size(),
            geometry.slice_size(),
        );
        self.tables.new_tables.remove(&offset);
        self.tables.active.remove(&geometry.cluster_of(offset));
        self.tables.version += 1;
    }

    /// Moves the refcount table to these clusters, which have space for more entries. Returns the
    /// old clusters.
    pub(crate) fn move_table(&mut self, clusters: Range<u64>) -> Range<u64> {
        let geometry = self.tables.geometry;
        let count = clusters.end - clusters.start;
        let header = self.tables.headers.wanted_mut();
        let old = geometry.cluster_of(header.refcount_table_offset);
        let old = old..old + u64::from(header.refcount_table_clusters);
        header.refcount_table_offset = geometry.offset_of(clusters.start);
        header.refcount_table_clusters = count as u32;
        self.tables.refcount_table.resize((count << geometry.cluster_bits) as usize / 8);
        self.tables.active.extend(clusters);
        old
    }
}
