//! Mapping for a change: what can be done in place, what needs space, what only tables have to say.

use std::ops::Range;

use blockhouse_core::{ByteRange, Extent, ExtentFlags, ExtentState, Unmap};

use super::deferred_free::{DeferredFree, Punch, Users};
use super::entry::{Entry, Ownership, Reference, UnitState, Units, l1_word};
use super::map::unit_mask;
use super::pending::Change;
use super::room::Need;
use super::slice_cache::{DataStability, SliceId, SliceKind};
use super::state::{Blocked, State, Step};

/// How a guest cluster can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// At its place, byte for byte.
    InPlace { host: u64 },
    /// At its place, which the tables do not show as data yet.
    Reuse { host: u64 },
    /// In a new cluster; nothing of an old place is left to copy by hand.
    Fresh,
    /// In a new cluster that holds all the old one held.
    Copy(Copied),
}

/// What is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copied {
    /// A cluster that somebody else refers to, too.
    Shared,
    /// Compressed data.
    Unpacked,
    /// A cluster that a write nobody waits for may still fill around its own bytes.
    Haunted,
}

/// Where prepared data goes.
struct Place {
    host: u64,
    /// Taken for it.
    taken: bool,
    /// Reads as zeros, as does what is replaced.
    blank: bool,
}

impl State {
    /// The extent of the first bytes of `range` for writing. All of it lies before the last
    /// cluster's end.
    pub(crate) fn map_write(&mut self, range: ByteRange) -> Step<Extent> {
        self.check_room()?;
        let geometry = self.geometry;
        let clusters = geometry.clusters_of(range);
        let first = clusters.start;
        let end = self.pending.free_from(first, clusters.end).map_err(Blocked::Wait)?;
        let slice = self.own_l2_slice(first)?;
        let index = geometry.l2_place(first).index;
        let end = end.min(first + geometry.slice_l2_entries() - index as u64);
        let way = self.way(slice, first, range)?;
        let mut count = 1;
        while first + count < end {
            let next = self.way(slice, first + count, range)?;
            if !self.goes_on(way, count, next) {
                break;
            }
            count += 1;
        }
        match way {
            Way::InPlace { host } => Ok(self.overwrite(range, first..first + count, host)),
            Way::Reuse { host } => {
                let clusters = first..first + count;
                if let Some(event) = self.pending.overwrites_of(&clusters) {
                    return Err(Blocked::Wait(event));
                }
                if geometry.has_data_file {
                    self.wait_for_fills(&clusters)?;
                }
                let place = Place { host, taken: false, blank: false };
                self.prepare_write(slice, range, clusters, place, way)
            }
            Way::Fresh | Way::Copy(_) => {
                if way == Way::Copy(Copied::Haunted)
                    && let Some(event) = self.pending.overwrites_of(&(first..first + 1))
                {
                    // What is written in place now has to be copied, too.
                    return Err(Blocked::Wait(event));
                }
                if geometry.has_data_file {
                    let clusters = first..first + count;
                    self.wait_for_fills(&clusters)?;
                    let host = geometry.offset_of(first);
                    let place = Place { host, taken: false, blank: false };
                    return self.prepare_write(slice, range, clusters, place, way);
                }
                // Nothing was ever written behind the end, where the file did not reach further before.
                let unused = self.space.end();
                let taken = self.allocate(count)?;
                let host = geometry.offset_of(taken.start);
                let clusters = first..first + (taken.end - taken.start);
                let unwritten = taken.start >= unused && self.space.reads_as_zeros(taken.start);
                let blank = unwritten && self.all_zeros(slice, clusters.clone())?;
                self.prepare_write(slice, range, clusters, Place { host, taken: true, blank }, way)
            }
        }
    }

    /// Waits for a round where too much is changed already.
    pub(crate) fn check_room(&self) -> Step<()> {
        if self.cache.is_crowded() { Err(Blocked::Crowded) } else { Ok(()) }
    }

    pub(crate) fn way(&mut self, slice: SliceId, cluster: u64, range: ByteRange) -> Step<Way> {
        let entry = self.entry(slice, self.geometry.l2_place(cluster).index)?;
        self.check_place(cluster, entry)?;
        Ok(match entry {
            Entry::Compressed(_) => Way::Copy(Copied::Unpacked),
            Entry::Standard { place: None, .. } => Way::Fresh,
            Entry::Standard { place: Some(place), units } if place.is_sole() => {
                let mask = self.mask_of(cluster, range);
                if units.data & mask == mask {
                    Way::InPlace { host: place.offset }
                } else if !self.geometry.has_data_file
                    && self.pending.haunted.contains(&self.geometry.cluster_of(place.offset))
                {
                    Way::Copy(Copied::Haunted)
                } else {
                    Way::Reuse { host: place.offset }
                }
            }
            // Nothing is worth copying where all reads as zeros.
            Entry::Standard { units, .. } if units == Units::ZERO => Way::Fresh,
            Entry::Standard { .. } => Way::Copy(Copied::Shared),
        })
    }

    /// Data that is overwritten or given back must lie in the file, and in no table.
    fn check_place(&self, cluster: u64, entry: Entry) -> Step<()> {
        if self.geometry.has_data_file {
            return self.check_data_place(cluster, entry);
        }
        let (offset, clusters) = match entry {
            Entry::Standard { place: None, .. } => return Ok(()),
            Entry::Standard { place: Some(place), .. } => {
                let host = self.geometry.cluster_of(place.offset);
                (place.offset, host..host + 1)
            }
            Entry::Compressed(place) => (place.offset, place.host_clusters(self.geometry)),
        };
        let is_possible = |host: u64| host < self.space.bound() && !self.metadata.contains(&host);
        if clusters.clone().all(is_possible) {
            return Ok(());
        }
        let guest = self.geometry.offset_of(cluster);
        let what = format!("the data of the guest's offset {guest} cannot be");
        Err(self.corrupt(what, offset).into())
    }

    /// Whether the cluster `count` after one that is written one way can go with it.
    fn goes_on(&self, way: Way, count: u64, next: Way) -> bool {
        let distance = self.geometry.offset_of(count);
        match (way, next) {
            (Way::InPlace { host }, Way::InPlace { host: next })
            | (Way::Reuse { host }, Way::Reuse { host: next }) => host + distance == next,
            (Way::Fresh, Way::Fresh) => true,
            // Without subclusters it makes no difference what is replaced.
            (Way::Fresh | Way::Copy(_), Way::Fresh | Way::Copy(_)) => !self.geometry.extended_l2,
            _ => false,
        }
    }

    /// The units of a cluster that `range` touches.
    fn mask_of(&self, cluster: u64, range: ByteRange) -> u32 {
        let geometry = self.geometry;
        if !geometry.extended_l2 {
            return Units::DATA.data;
        }
        let bytes = geometry.bytes_of(cluster..cluster + 1);
        let start = range.offset().max(bytes.offset()) - bytes.offset();
        let end = range.end().min(bytes.end()) - bytes.offset();
        unit_mask(start, end, geometry.unit_size())
    }

    fn overwrite(&mut self, range: ByteRange, clusters: Range<u64>, host: u64) -> Extent {
        let geometry = self.geometry;
        let guest = range.truncate(geometry.offset_of(clusters.end) - range.offset());
        let mut flags = ExtentFlags::empty();
        if clusters.clone().any(|cluster| self.is_dirty(cluster)) {
            flags |= ExtentFlags::DIRTY;
        }
        self.pending.begin_overwrite(clusters);
        let host = host + guest.offset() % geometry.cluster_size();
        Extent { guest, alloc_range: guest, state: ExtentState::Mapped { host }, flags }
    }

    /// Whether a cluster's entry on disk may be another one than in memory. The slice is cached.
    fn is_dirty(&mut self, cluster: u64) -> bool {
        let index = self.geometry.l2_place(cluster).index;
        let Ok(Some(slice)) = self.l2_slice(cluster) else { return false };
        self.cache.get(slice.offset).is_some_and(|slice| slice.is_dirty(index))
    }

    fn prepare_write(
        &mut self,
        slice: SliceId,
        range: ByteRange,
        clusters: Range<u64>,
        place: Place,
        way: Way,
    ) -> Step<Extent> {
        let geometry = self.geometry;
        let bytes = geometry.bytes_of(clusters.clone());
        let guest = range.truncate(bytes.end() - range.offset());
        let whole = match way {
            Way::Copy(_) => bytes,
            _ if !geometry.extended_l2 => bytes,
            Way::Fresh => guest.align_outward(geometry.unit_size()),
            Way::InPlace { .. } | Way::Reuse { .. } => self.whole_units(slice, guest)?,
        };
        let whole = self.without_what_is_past_the_end(whole, guest);
        let mut flags = ExtentFlags::NEW;
        flags.set(ExtentFlags::SHARED, way == Way::Copy(Copied::Shared));
        flags.set(ExtentFlags::ZEROED, place.blank);
        let Place { host, taken, .. } = place;
        self.pending.begin(clusters, Change::Write { host, taken });
        let host = host + (guest.offset() - bytes.offset());
        Ok(Extent { guest, alloc_range: whole, state: ExtentState::Mapped { host }, flags })
    }

    /// Whether these clusters, all in one slice, read as zeros whatever lies behind the image.
    fn all_zeros(&mut self, slice: SliceId, clusters: Range<u64>) -> Step<bool> {
        for cluster in clusters {
            let entry = self.entry(slice, self.geometry.l2_place(cluster).index)?;
            let is_zero = match entry {
                Entry::Standard { units, .. } if units == Units::ZERO => true,
                Entry::Standard { place: None, .. } => self.header.backing.is_none(),
                _ => false,
            };
            if !is_zero {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// `guest` and the rest of its first and last unit, unless that holds data already.
    fn whole_units(&mut self, slice: SliceId, guest: ByteRange) -> Step<ByteRange> {
        let unit = self.geometry.unit_size();
        let outer = guest.align_outward(unit);
        let start = if self.holds_data(slice, guest.offset())? { guest } else { outer }.offset();
        let end = if self.holds_data(slice, guest.end() - 1)? { guest } else { outer }.end();
        Ok(ByteRange::between(start, end))
    }

    fn holds_data(&mut self, slice: SliceId, offset: u64) -> Step<bool> {
        let geometry = self.geometry;
        let index = geometry.l2_place(geometry.cluster_of(offset)).index;
        let unit = offset % geometry.cluster_size() / geometry.unit_size();
        Ok(match self.entry(slice, index)? {
            Entry::Standard { units, .. } => units.data >> unit & 1 == 1,
            Entry::Compressed(_) => true,
        })
    }

    /// The extent of the first bytes of `range` for making them zeros.
    pub(crate) fn map_zero(&mut self, range: ByteRange, unmap: Unmap) -> Step<Extent> {
        if self.geometry.has_data_file {
            return self.map_zero_in_data_file(range);
        }
        self.map_zero_by_tables(range, unmap)
    }

    /// As [`map_zero`](Self::map_zero), wherever tables can say it.
    pub(crate) fn map_zero_by_tables(&mut self, range: ByteRange, unmap: Unmap) -> Step<Extent> {
        let Some(clusters) = self.whole_clusters(range) else {
            let keep = unmap == Unmap::Forbidden;
            let first = self.first_units(range);
            if let Some(units) = self.prepare_units(first, UnitState::Zero, keep)? {
                return Ok(units);
            }
            let read = self.map_read(first)?;
            // Subclusters can be smaller than the storage's blocks: all of the part or nothing.
            return match read.state {
                ExtentState::Zero | ExtentState::Hole if read.guest == first => Ok(read),
                _ => self.map_write(first),
            };
        };
        let can_say_zero = self.geometry.version >= 3;
        let is_backed = self.is_backed(clusters.start);
        let clusters = self.backed_alike(clusters);
        let range = range.truncate(self.geometry.offset_of(clusters.end) - range.offset());
        let change = match unmap {
            _ if can_say_zero => Change::Zero { keep: unmap == Unmap::Forbidden },
            Unmap::Allowed if !is_backed => Change::Discard,
            _ => return self.map_write(range),
        };
        let needs = |entry: Entry| match entry {
            Entry::Standard { place: None, units } => units != Units::ZERO && is_backed,
            Entry::Standard { units, .. } => units != Units::ZERO || unmap == Unmap::Allowed,
            Entry::Compressed(_) => true,
        };
        self.prepare_unmapping(range, clusters, change, needs)
    }

    /// The extent of the first bytes of `range` for giving their space back.
    pub(crate) fn map_discard(&mut self, range: ByteRange) -> Step<Extent> {
        if self.geometry.has_data_file {
            return self.map_discard_in_data_file(range);
        }
        let is_backed = self.is_backed(self.geometry.cluster_of(range.offset()));
        // Such an image cannot say zero: what the guest has written stays, lest the backing file's bytes
        // come back.
        if is_backed && self.geometry.version < 3 {
            return Ok(nothing_to_do(range.truncate(self.rest_of_cluster(range.offset()))));
        }
        let Some(clusters) = self.whole_clusters(range) else {
            let first = self.first_units(range);
            let state = if is_backed { UnitState::Zero } else { UnitState::Unallocated };
            if let Some(units) = self.prepare_units(first, state, false)? {
                return Ok(units);
            }
            return self.discard_part(first);
        };
        let clusters = self.backed_alike(clusters);
        let range = range.truncate(self.geometry.offset_of(clusters.end) - range.offset());
        let needs = |entry: Entry| match entry {
            Entry::Standard { place: None, units } => units != Units::ZERO && is_backed,
            Entry::Standard { .. } | Entry::Compressed(_) => true,
        };
        self.prepare_unmapping(range, clusters, Change::Discard, needs)
    }

    /// Whether a cluster would show bytes of the backing file if it had no entry. An image that can say
    /// zero does so up to its end, also where the backing file is shorter now.
    fn is_backed(&self, cluster: u64) -> bool {
        let is_before_end = self.geometry.offset_of(cluster) < self.backing_end;
        self.header.backing.is_some() && (is_before_end || self.geometry.version >= 3)
    }

    /// The first of `clusters` for which [`is_backed`](Self::is_backed) answers the same.
    fn backed_alike(&self, clusters: Range<u64>) -> Range<u64> {
        let border = self.geometry.clusters_for(self.backing_end);
        match self.geometry.version < 3 && clusters.contains(&border) && clusters.start < border {
            true => clusters.start..border,
            false => clusters,
        }
    }

    /// The first bytes of `range` that lie in one cluster and are whole units, or a part of one unit.
    fn first_units(&self, range: ByteRange) -> ByteRange {
        let first = range.truncate(self.rest_of_cluster(range.offset()));
        let unit = self.geometry.unit_size();
        let to_border = first.offset().next_multiple_of(unit) - first.offset();
        if to_border > 0 {
            return first.truncate(to_border);
        }
        // What lies beyond the disk's end counts as covered.
        match first.length() / unit * unit {
            _ if first.end() >= self.header.size => first,
            0 => first,
            whole => first.truncate(whole),
        }
    }

    /// Prepares a change of whole units of one cluster that is made by tables alone; `None` where that
    /// cannot be.
    fn prepare_units(
        &mut self,
        part: ByteRange,
        state: UnitState,
        keep: bool,
    ) -> Step<Option<Extent>> {
        let geometry = self.geometry;
        let is_end = part.end() >= self.header.size;
        let is_whole = part.offset().is_multiple_of(geometry.unit_size())
            && (is_end || part.length().is_multiple_of(geometry.unit_size()));
        if !geometry.extended_l2 || !is_whole {
            return Ok(None);
        }
        self.check_room()?;
        let cluster = geometry.cluster_of(part.offset());
        self.pending.free_from(cluster, cluster + 1).map_err(Blocked::Wait)?;
        let index = geometry.l2_place(cluster).index;
        let old = match self.l2_slice(cluster)? {
            Some(slice) => self.entry(slice, index)?,
            None => Entry::UNALLOCATED,
        };
        let Entry::Standard { units, .. } = old else { return Ok(None) };
        let mask = self.mask_of(cluster, part);
        let is_backed = self.header.backing.is_some();
        let shown = if is_backed { units.zero } else { !units.data };
        if shown & mask == mask {
            return Ok(Some(nothing_to_do(part)));
        }
        self.own_l2_slice(cluster)?;
        self.check_place(cluster, old)?;
        if let Some(event) = self.pending.overwrites_of(&(cluster..cluster + 1)) {
            return Err(Blocked::Wait(event));
        }
        self.pending.begin(cluster..cluster + 1, Change::Units { mask, state, keep });
        let flags = ExtentFlags::NEW;
        Ok(Some(Extent { guest: part, alloc_range: part, state: ExtentState::Zero, flags }))
    }

    /// A part of a cluster: the host's file can have a hole there where it is this cluster's alone.
    fn discard_part(&mut self, part: ByteRange) -> Step<Extent> {
        let cluster = self.geometry.cluster_of(part.offset());
        self.pending.free_from(cluster, cluster + 1).map_err(Blocked::Wait)?;
        if let Some(slice) = self.l2_slice(cluster)?
            && let Way::InPlace { host } = self.way(slice, cluster, part)?
        {
            return Ok(self.overwrite(part, cluster..cluster + 1, host));
        }
        Ok(nothing_to_do(part))
    }

    pub(crate) fn rest_of_cluster(&self, offset: u64) -> u64 {
        let cluster_size = self.geometry.cluster_size();
        cluster_size - offset % cluster_size
    }

    /// The clusters from the start of `range` on that it covers, if that is at least one. What lies
    /// beyond the disk's end counts as covered.
    fn whole_clusters(&self, range: ByteRange) -> Option<Range<u64>> {
        let geometry = self.geometry;
        if !geometry.is_cluster_aligned(range.offset()) {
            return None;
        }
        let end = if range.end() >= self.header.size {
            geometry.clusters_for(range.end())
        } else {
            geometry.cluster_of(range.end())
        };
        let clusters = geometry.cluster_of(range.offset())..end;
        (!clusters.is_empty()).then_some(clusters)
    }

    /// Prepares a change that is made by tables alone, for the first of `clusters` as far as they
    /// `need` it or do not.
    fn prepare_unmapping(
        &mut self,
        range: ByteRange,
        clusters: Range<u64>,
        change: Change,
        needs: impl Fn(Entry) -> bool,
    ) -> Step<Extent> {
        self.check_room()?;
        let geometry = self.geometry;
        let first = clusters.start;
        let end = self.pending.free_from(first, clusters.end).map_err(Blocked::Wait)?;
        let place = geometry.l2_place(first);
        if self.l2_table(place.l1_index)?.is_none() && !needs(Entry::UNALLOCATED) {
            let next = (place.l1_index as u64 + 1) * geometry.l2_entries();
            return Ok(nothing_to_do(
                range.truncate(geometry.offset_of(end.min(next)) - range.offset()),
            ));
        }
        let end = end.min(first + geometry.slice_l2_entries() - place.index as u64);
        let looked_up = self.l2_slice(first)?;
        let needed = match looked_up {
            Some(slice) => needs(self.entry(slice, place.index)?),
            None => true,
        };
        let slice = if needed { self.own_l2_slice(first)? } else { looked_up.expect("an entry") };
        let mut count = 0;
        while first + count < end {
            let entry = self.entry(slice, place.index + count as usize)?;
            if count > 0 && needs(entry) != needed {
                break;
            }
            if needed {
                self.check_place(first + count, entry)?;
            }
            count += 1;
        }
        let clusters = first..first + count;
        let guest = range.truncate(geometry.offset_of(clusters.end) - range.offset());
        if !needed {
            return Ok(nothing_to_do(guest));
        }
        if let Some(event) = self.pending.overwrites_of(&clusters) {
            return Err(Blocked::Wait(event));
        }
        self.pending.begin(clusters, change);
        let flags = ExtentFlags::NEW;
        Ok(Extent { guest, alloc_range: guest, state: ExtentState::Zero, flags })
    }

    /// The slice with a cluster's L2 entry, in an L2 table that is only this image's active one:
    /// made or copied if it must be.
    pub(crate) fn own_l2_slice(&mut self, cluster: u64) -> Step<SliceId> {
        let place = self.geometry.l2_place(cluster);
        let table = match self.l2_table(place.l1_index)? {
            Some(table) if table.is_sole() => table.offset,
            other => self.new_l2_table(place.l1_index, other)?,
        };
        let slice = SliceId { offset: table + place.slice_offset, kind: SliceKind::L2 };
        self.ensure(slice)?;
        Ok(slice)
    }

    fn new_l2_table(&mut self, l1_index: usize, old: Option<Reference>) -> Step<u64> {
        let geometry = self.geometry;
        let slices = (0..geometry.cluster_size()).step_by(geometry.slice_size() as usize);
        let mut content = Vec::new();
        if let Some(old) = old {
            for slice in slices.clone() {
                let id = SliceId { offset: old.offset + slice, kind: SliceKind::L2 };
                self.ensure(id)?;
                let slice = self.cache.get(id.offset).expect("a slice that was ensured");
                content.push(slice.bytes.clone());
            }
        }
        if l1_index >= self.l1.len() {
            let what = "the L1 table does not reach this far";
            return Err(self.corrupt(what, self.header.l1_offset).into());
        }
        let Some(cluster) = self.room.take_table() else {
            return Err(Blocked::NoRoom(Need::L2Table(l1_index)));
        };
        let table = geometry.offset_of(cluster);
        self.begin_table(table, SliceKind::L2);
        for (slice, bytes) in slices.zip(content) {
            let id = SliceId { offset: table + slice, kind: SliceKind::L2 };
            self.ensure(id)?;
            self.cache.change(id.offset, 0, DataStability::Stable).copy_from_slice(&bytes);
        }
        self.l1[l1_index] = l1_word(Reference { offset: table, ownership: Ownership::Sole });
        self.l1_changed.insert(l1_index);
        self.version += 1;
        if let Some(old) = old {
            let old = geometry.cluster_of(old.offset);
            let users = Users::Others;
            self.defer_free(DeferredFree { clusters: old..old + 1, punch: Punch::No, users });
        }
        Ok(table)
    }
}

/// An extent that is as it should be.
pub(crate) fn nothing_to_do(guest: ByteRange) -> Extent {
    Extent { guest, alloc_range: guest, state: ExtentState::Hole, flags: ExtentFlags::empty() }
}
