//! Host clusters: who is counted how often, which are free, taking and giving back.
//!
//! Refcounts in memory are the truth about what is taken; they reach the disk with rounds. Free space
//! is looked for in three places: clusters that were given back; a cursor that passes once over the
//! space that was there when the image was opened, a few slices at a time; the end of the file. So no
//! allocation ever looks at more than a few refcount blocks.

use std::collections::HashSet;
use std::ops::Range;

use blockhouse_core::{Error, ErrorKind};

use super::deferred_free::DeferredFree;
use super::geometry::MAX_OFFSET;
use super::refcount;
use super::room::Need;
use super::slice_cache::{DataStability, SliceId, SliceKind};
use super::state::{Blocked, State, Step};

/// How many refcount slices one allocation looks at before it takes from the end.
const SLICES_A_TIME: u32 = 4;
/// The largest refcount table, in bytes.
const MAX_TABLE: u64 = 8 << 20;

/// What was found at a place.
enum Found {
    /// Free clusters.
    Free(Range<u64>),
    /// So many clusters are taken.
    Taken(u64),
    /// Nobody counts the cluster: it is free, but needs a refcount block.
    Uncounted,
}

impl State {
    /// Notes where the active tables are. Two at one place are refused.
    pub(crate) fn note_metadata(&mut self) -> Result<(), Error> {
        let geometry = self.geometry;
        let table = geometry.cluster_of(self.header.refcount_table_offset);
        let table_clusters = u64::from(self.header.refcount_table_clusters);
        self.note_table("the header", 0..1)?;
        self.note_table("the refcount table", table..table + table_clusters)?;
        if !self.l1.is_empty() {
            let l1 = geometry.cluster_of(self.header.l1_offset);
            let l1_clusters = geometry.clusters_for(self.l1.len() as u64 * 8);
            self.note_table("the L1 table", l1..l1 + l1_clusters)?;
        }
        for index in 0..self.refcount_table.len() as u64 {
            if let Some(block) = self.refcount_block(index)? {
                let cluster = geometry.cluster_of(block);
                self.note_table("a refcount block", cluster..cluster + 1)?;
            }
        }
        // L1 entries may share a table that none of them changes in place.
        let mut shared = HashSet::new();
        for index in 0..self.l1.len() {
            if let Some(table) = self.l2_table(index)? {
                let cluster = geometry.cluster_of(table.offset);
                if table.is_sole() || shared.insert(cluster) {
                    self.note_table("an L2 table", cluster..cluster + 1)?;
                }
            }
        }
        Ok(())
    }

    fn note_table(&mut self, what: &str, clusters: Range<u64>) -> Result<(), Error> {
        for cluster in clusters {
            let offset = self.geometry.offset_of(cluster);
            if !self.metadata.insert(cluster) {
                return Err(self.corrupt(format!("{what} shares its place"), offset));
            }
            if cluster >= self.space.bound() {
                let what = format!("{what} lies beyond the end of the file");
                return Err(self.corrupt(what, offset));
            }
        }
        Ok(())
    }

    /// The slice with a cluster's refcount, cached; `None` where no refcount block exists.
    pub(crate) fn refcount_slice(&mut self, cluster: u64) -> Step<Option<(SliceId, usize)>> {
        let place = self.geometry.refcount_place(cluster);
        let Some(block) = self.refcount_block(place.table_index)? else { return Ok(None) };
        let id = SliceId { offset: block + place.slice_offset, kind: SliceKind::Refcounts };
        self.ensure(id)?;
        Ok(Some((id, place.index)))
    }

    /// A cluster's refcount.
    pub(crate) fn refcount(&mut self, cluster: u64) -> Step<u64> {
        let order = self.geometry.refcount_order;
        let Some((id, index)) = self.refcount_slice(cluster)? else { return Ok(0) };
        let slice = self.cache.get(id.offset).expect("a slice that was ensured");
        Ok(refcount::get(&slice.bytes, order, index))
    }

    /// Changes the refcount of a cluster that has a refcount block.
    pub(crate) fn set_refcount(&mut self, cluster: u64, value: u64) -> Step<()> {
        let order = self.geometry.refcount_order;
        let Some((id, index)) = self.refcount_slice(cluster)? else {
            let what = "a cluster in use has no refcount block";
            return Err(self.corrupt(what, self.geometry.offset_of(cluster)).into());
        };
        let bytes = self.cache.change(id.offset, index, DataStability::Stable);
        refcount::set(bytes, order, index, value);
        self.space.note_change();
        Ok(())
    }

    /// One reference to a cluster is gone, durably. At none, the cluster can be taken again.
    pub(crate) fn decrement_refcount(&mut self, cluster: u64) -> Step<()> {
        let count = self.refcount(cluster)?;
        if count == 0 {
            let what = "the refcount of a cluster in use is 0";
            return Err(self.corrupt(what, self.geometry.offset_of(cluster)).into());
        }
        self.set_refcount(cluster, count - 1)?;
        if count == 1 {
            self.metadata.remove(&cluster);
            self.close_packed(cluster);
            self.space.give_back(cluster);
        }
        Ok(())
    }

    /// Sets a refcount to what was counted, with a refcount block if there must be one.
    pub(crate) fn correct_refcount(&mut self, cluster: u64, value: u64) -> Step<()> {
        if self.refcount(cluster)? == value {
            return Ok(());
        }
        if value > self.geometry.most_refcount() {
            let what = format!("{value} references to a cluster are more than can be counted");
            return Err(self.corrupt(what, self.geometry.offset_of(cluster)).into());
        }
        while self.refcount_slice(cluster)?.is_none() {
            self.space.reach(cluster + 1);
            let index = self.geometry.refcount_place(cluster).table_index;
            let new = self.carve(1)?;
            let block = self.geometry.offset_of(new.start);
            if self.refcount_block(index)?.is_none() {
                self.add_refcount_block(index, block);
            } else {
                self.free_unlinked(new);
            }
        }
        self.set_refcount(cluster, value)
    }

    /// Takes one to `most` clusters in a row, each with a refcount of one.
    pub(crate) fn allocate(&mut self, most: u64) -> Step<Range<u64>> {
        let mut slices = SLICES_A_TIME;
        loop {
            let unseen = self.space.unseen();
            // Behind the limit is only what a request could not write to: anything else comes first.
            let limit = self.limit();
            let given_back = self.space.given_back();
            let given_back = given_back.filter(|run| run.0 < limit || unseen.is_empty());
            if let Some((start, count)) = given_back {
                if start >= limit && self.frees.gain() > 0 {
                    return Err(Blocked::NoRoom(Need::Frees));
                }
                let count = if start < limit { count.min(limit - start) } else { count };
                match self.look_at(start, count.min(most))? {
                    Found::Free(clusters) => {
                        self.space.take_from_run(start, clusters.end - clusters.start);
                        return self.take(clusters);
                    }
                    Found::Taken(_) | Found::Uncounted => self.space.take_from_run(start, 1),
                }
            } else if !unseen.is_empty() && (slices > 0 || self.space.limit().is_some()) {
                slices = slices.saturating_sub(1);
                let cursor = unseen.start;
                match self.look_at(cursor, most.min(unseen.end - cursor))? {
                    Found::Free(clusters) => {
                        self.space.see_to(clusters.end);
                        return self.take(clusters);
                    }
                    Found::Taken(count) => self.space.see_to(cursor + count),
                    // A gap in the middle is not worth a refcount block of its own.
                    Found::Uncounted => self.pass_uncounted(cursor),
                }
            } else {
                let end = self.space.end();
                match self.look_at(end, most)? {
                    Found::Free(clusters) if clusters.end > self.space.length() => {
                        return Err(Blocked::NoRoom(Need::Length(clusters.end)));
                    }
                    Found::Free(_) if self.space.limit().is_some() && self.frees.gain() > 0 => {
                        return Err(Blocked::NoRoom(Need::Frees));
                    }
                    Found::Free(clusters) => {
                        self.space.reach(clusters.end);
                        return self.take(clusters);
                    }
                    Found::Taken(count) => self.space.reach(end + count),
                    Found::Uncounted => {
                        self.carve(0)?;
                    }
                }
            }
        }
    }

    /// The first cluster that the storage has not all of by itself, if it could not be made longer.
    fn limit(&self) -> u64 {
        self.space.limit().map_or(u64::MAX, |bytes| bytes >> self.geometry.cluster_bits)
    }

    /// Moves the cursor from `cluster`, which no refcount block is for, to where the next block's clusters
    /// begin. All steps together read the refcount table once.
    fn pass_uncounted(&mut self, cluster: u64) {
        let index = self.geometry.refcount_place(cluster).table_index;
        let blocks = self.refcount_table.get(index as usize..).unwrap_or_default();
        if let Some(gap) = blocks.iter().position(|&word| word != 0) {
            self.space.see_to((index + gap as u64) * self.geometry.block_refcounts());
            return;
        }
        // Nothing is counted from here on: a block device behind its last cluster in use. A table that lies
        // there is passed.
        let tables = self.metadata.iter().filter(|&&table| table >= cluster);
        let start = tables.max().map_or(cluster, |&table| self.next_block_start(table));
        if self.space.unseen().contains(&start) {
            self.space.end_scan_at(start);
        } else {
            self.space.see_to(start);
        }
    }

    fn next_block_start(&self, cluster: u64) -> u64 {
        (cluster / self.geometry.block_refcounts() + 1) * self.geometry.block_refcounts()
    }

    /// What is at `cluster`: up to `most` free ones, or how many taken ones; of one slice only.
    fn look_at(&mut self, cluster: u64, most: u64) -> Step<Found> {
        self.check_within_limits(cluster)?;
        let Some((id, first)) = self.refcount_slice(cluster)? else { return Ok(Found::Uncounted) };
        let order = self.geometry.refcount_order;
        let last = self.geometry.slice_refcounts() as usize;
        let slice = self.cache.get(id.offset).expect("a slice that was ensured");
        let is_free = |index: usize| refcount::get(&slice.bytes, order, index) == 0;
        let wanted = is_free(first);
        let count = (first..last).take_while(|&index| is_free(index) == wanted).count() as u64;
        Ok(if wanted {
            Found::Free(cluster..cluster + count.min(most))
        } else {
            Found::Taken(count)
        })
    }

    fn check_within_limits(&self, cluster: u64) -> Result<(), Error> {
        if cluster < MAX_OFFSET >> self.geometry.cluster_bits {
            return Ok(());
        }
        let what = "the image is as large as its format allows";
        Err(Error::new(ErrorKind::NoSpace, what).on(&self.name))
    }

    /// Raises the refcounts of free clusters, all in one slice.
    fn take(&mut self, clusters: Range<u64>) -> Step<Range<u64>> {
        for cluster in clusters.clone() {
            self.check_not_metadata(cluster)?;
        }
        for cluster in clusters.clone() {
            self.set_refcount(cluster, 1)?;
        }
        Ok(clusters)
    }

    /// Tables that count as free would be overwritten: the image is damaged.
    fn check_not_metadata(&self, cluster: u64) -> Result<(), Error> {
        if !self.metadata.contains(&cluster) {
            return Ok(());
        }
        let what = "a table in use counts as free";
        Err(self.corrupt(what, self.geometry.offset_of(cluster)))
    }

    /// Takes exactly `count` clusters in a row at the end, after the refcount blocks (and the larger
    /// refcount table) that counting them takes. The host has space for all of them.
    pub(crate) fn carve(&mut self, count: u64) -> Step<Range<u64>> {
        if let Some(room) = self.room.at_end() {
            let plan = self.plan(room.start, count)?;
            let is_useful = count > 0 || !plan.blocks.is_empty();
            let clusters = room.start..room.start + plan.total;
            let fits = clusters.end <= room.end;
            if is_useful && fits && self.first_taken(clusters)?.is_none() {
                return self.lay_out(room, &plan, count);
            }
            self.room.take_at_end();
        }
        loop {
            let start = self.space.end();
            let plan = self.plan(start, count)?;
            let clusters = start..start + plan.total;
            self.check_within_limits(clusters.end)?;
            match self.first_taken(clusters)? {
                Some(taken) => self.space.reach(taken + 1),
                None => return Err(Blocked::NoRoom(Need::AtEnd(plan.total))),
            }
        }
    }

    fn first_taken(&mut self, clusters: Range<u64>) -> Step<Option<u64>> {
        for cluster in clusters {
            if self.refcount(cluster)? != 0 {
                return Ok(Some(cluster));
            }
        }
        Ok(None)
    }

    fn plan(&self, start: u64, count: u64) -> Result<Plan, Error> {
        let geometry = self.geometry;
        let blocks_of = geometry.block_refcounts();
        let mut plan = Plan { blocks: Vec::new(), table: 0, total: count.max(1) };
        loop {
            let last = (start + plan.total - 1) / blocks_of;
            plan.blocks.clear();
            for index in start / blocks_of..=last {
                if self.refcount_block(index)?.is_none() {
                    plan.blocks.push(index);
                }
            }
            let entries = last + 1;
            plan.table = if entries > self.refcount_table.len() as u64 {
                // Half as much again, so that growing stays rare.
                let wanted = geometry.clusters_for((entries + entries / 2) * 8);
                wanted.min(MAX_TABLE >> geometry.cluster_bits)
            } else {
                0
            };
            if plan.table > 0 && plan.table << geometry.cluster_bits < entries * 8 {
                let what = "the refcount table is as large as its format allows";
                return Err(Error::new(ErrorKind::NoSpace, what).on(&self.name));
            }
            let total = (plan.blocks.len() as u64 + plan.table + count).max(1);
            if total <= plan.total {
                return Ok(plan);
            }
            plan.total = total;
        }
    }

    /// Carries the plan out: refcount blocks, refcount table, then what was asked for.
    fn lay_out(&mut self, room: Range<u64>, plan: &Plan, count: u64) -> Step<Range<u64>> {
        let geometry = self.geometry;
        let start = room.start;
        let table_start = start + plan.blocks.len() as u64;
        let wanted = table_start + plan.table..table_start + plan.table + count;
        for cluster in start..wanted.end {
            self.check_not_metadata(cluster)?;
        }
        if plan.table > 0 {
            self.move_refcount_table(table_start, plan.table);
        }
        for (&index, cluster) in plan.blocks.iter().zip(start..) {
            self.add_refcount_block(index, geometry.offset_of(cluster));
        }
        self.room.take_at_end();
        self.space.unclaim(room.end, wanted.end);
        for cluster in start..wanted.end {
            self.set_refcount(cluster, 1)?;
        }
        Ok(wanted)
    }

    fn add_refcount_block(&mut self, index: u64, offset: u64) {
        self.begin_table(offset, SliceKind::Refcounts);
        self.refcount_table[index as usize] = offset;
        self.refcount_table_changed.insert(index as usize);
    }

    fn move_refcount_table(&mut self, cluster: u64, clusters: u64) {
        let geometry = self.geometry;
        let old = geometry.cluster_of(self.header.refcount_table_offset);
        let old = old..old + u64::from(self.header.refcount_table_clusters);
        self.defer_free(DeferredFree::of(old));
        self.header.refcount_table_offset = geometry.offset_of(cluster);
        self.header.refcount_table_clusters = clusters as u32;
        self.refcount_table.resize((clusters << geometry.cluster_bits) as usize / 8, 0);
        self.metadata.extend(cluster..cluster + clusters);
    }

    /// A cluster becomes a table of zeros in memory; what was cached of it before is forgotten.
    pub(crate) fn begin_table(&mut self, offset: u64, kind: SliceKind) {
        let geometry = self.geometry;
        let end = offset + geometry.cluster_size();
        self.cache.forget(offset, end, geometry.slice_size());
        self.new_tables.insert(offset, kind);
        self.metadata.insert(geometry.cluster_of(offset));
    }

    /// As [`Blocked::Missing`] if the slice is not cached; slices of tables that are not on disk yet
    /// are made.
    pub(crate) fn ensure(&mut self, id: SliceId) -> Step<()> {
        if let Some(slice) = self.cache.get(id.offset) {
            if slice.kind == id.kind {
                return Ok(());
            }
            let what = "an L2 table and a refcount block share a place";
            return Err(self.corrupt(what, id.offset).into());
        }
        let table = id.offset & !(self.geometry.cluster_size() - 1);
        if self.geometry.cluster_of(id.offset) >= self.space.bound() {
            let what = "a table lies beyond the end of the file";
            return Err(self.corrupt(what, id.offset).into());
        }
        if !self.new_tables.contains_key(&table) {
            return Err(Blocked::Missing(id));
        }
        self.cache.insert(id, vec![0; self.geometry.slice_size() as usize].into());
        Ok(())
    }
}

/// What has to be taken together.
struct Plan {
    /// Which entries of the refcount table get a block.
    blocks: Vec<u64>,
    /// Clusters of a new refcount table, 0 for none.
    table: u64,
    total: u64,
}
