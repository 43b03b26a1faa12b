//! Maps zero writes and discards, by changes of entries if these suffice, otherwise by writes.

use std::ops::Range;

use blockhouse_core::{ByteRange, Extent, ExtentFlags, ExtentState, Unmap};

use crate::qcow2::layout::entry::{CompressedDescriptor, Entry, SubclusterBitmap, subclusters_in};
use crate::qcow2::tables::{Blocked, Step, Tables};

use super::pending_changes::Change;
use super::read::map_read;
use super::write::WriteMethod;
use super::{Mapper, noop_extent};

impl Mapper<'_> {
    /// Maps the first bytes of `range` for a zero write, by a change of entries if possible.
    pub(super) fn map_zero_by_entries(&mut self, range: ByteRange, unmap: Unmap) -> Step<Extent> {
        let has_zero_flag = self.tables.geometry().version >= 3;
        let Some(clusters) = self.whole_clusters(range) else {
            let keep = unmap == Unmap::Forbidden;
            let first = first_subclusters(self.tables, range);
            let prepared = self.prepare_subclusters(first, keep, true)?;
            if let Some(extent) = prepared {
                return Ok(extent);
            }
            let read = map_read(self.tables, first)?;
            // Subclusters can be smaller than the storage's blocks, so the extent must be all of
            // `first`.
            return match read.state {
                ExtentState::Hole
                    if read.guest == first && has_zero_flag && !self.has_backing() =>
                {
                    self.mark_around(first, keep)
                }
                ExtentState::Zero | ExtentState::Hole if read.guest == first => Ok(read),
                _ => self.map_write(first),
            };
        };
        let is_backed = self.is_backed(clusters.start);
        let clusters = self.backed_alike(clusters);
        let range = self.tables.geometry().up_to_cluster(range, clusters.end);
        let change = match unmap {
            _ if has_zero_flag => Change::Zero { keep: unmap == Unmap::Forbidden },
            Unmap::Allowed if !is_backed => Change::Discard,
            _ => return self.map_write(range),
        };
        // A zero write marks unallocated clusters also without a backing file, because the image
        // may get one later. A discard, which promises no zeros, does so only with a backing file.
        let needs = |entry: Entry| match entry {
            Entry::Standard { host: None, subclusters } => {
                subclusters != SubclusterBitmap::ZERO && has_zero_flag
            }
            Entry::Standard { subclusters, .. } => {
                subclusters != SubclusterBitmap::ZERO || unmap == Unmap::Allowed
            }
            Entry::Compressed(_) => true,
        };
        self.prepare_unmapping(range, clusters, change, needs)
    }

    /// Maps the first bytes of `range` for a discard, which frees their host clusters.
    pub(super) fn map_discard_in_image(&mut self, range: ByteRange) -> Step<Extent> {
        let geometry = self.tables.geometry();
        let is_backed = self.is_backed(geometry.cluster_of(range.offset()));
        // The discard does nothing: images of version 2 have no zero flag, and unallocated clusters
        // would expose the backing file's bytes.
        if is_backed && geometry.version < 3 {
            return Ok(noop_extent(
                range.truncate(self.tables.geometry().rest_of_cluster(range.offset())),
            ));
        }
        let Some(clusters) = self.whole_clusters(range) else {
            let first = first_subclusters(self.tables, range);
            if let Some(extent) = self.prepare_subclusters(first, false, is_backed)? {
                return Ok(extent);
            }
            return self.discard_part(first);
        };
        let clusters = self.backed_alike(clusters);
        let range = self.tables.geometry().up_to_cluster(range, clusters.end);
        let needs = |entry: Entry| match entry {
            Entry::Standard { host: None, subclusters } => {
                subclusters != SubclusterBitmap::ZERO && is_backed
            }
            Entry::Standard { .. } | Entry::Compressed(_) => true,
        };
        self.prepare_unmapping(range, clusters, Change::Discard, needs)
    }

    /// Whether a cluster without an entry may read from the backing file. In an image with zero
    /// flags, all clusters up to the disk's end count as backed, even if the backing file is
    /// shorter now.
    fn is_backed(&self, cluster: u64) -> bool {
        let geometry = self.tables.geometry();
        let is_before_end = geometry.offset_of(cluster) < self.mapping.backing_end;
        self.has_backing() && (is_before_end || geometry.version >= 3)
    }

    /// The clusters at the start of `clusters` for which [`is_backed`](Self::is_backed) has the
    /// same result.
    fn backed_alike(&self, clusters: Range<u64>) -> Range<u64> {
        let geometry = self.tables.geometry();
        let border = geometry.clusters_for(self.mapping.backing_end);
        if geometry.version < 3 && clusters.contains(&border) && clusters.start < border {
            clusters.start..border
        } else {
            clusters
        }
    }

    /// Marks the unallocated cluster or subcluster around `part` as zeros. All of it reads as zeros
    /// already, because there is no backing file.
    fn mark_around(&mut self, part: ByteRange, keep: bool) -> Step<Extent> {
        let unit = part.align_outward(self.tables.geometry().subcluster_size());
        let marked = match self.prepare_subclusters(unit, keep, true)? {
            Some(marked) => marked,
            None => {
                let cluster = self.tables.geometry().cluster_of(part.offset());
                let clusters = cluster..cluster + 1;
                let needs = |old| old == Entry::UNALLOCATED;
                self.prepare_unmapping(part, clusters, Change::Zero { keep }, needs)?
            }
        };
        Ok(Extent { guest: part, alloc_range: part, ..marked })
    }

    /// Prepares zeros in whole subclusters of one cluster by a change of the cluster's entry alone;
    /// `None` if that is not sufficient. With `marks_holes`, unallocated subclusters are marked,
    /// too.
    fn prepare_subclusters(
        &mut self,
        part: ByteRange,
        keep: bool,
        marks_holes: bool,
    ) -> Step<Option<Extent>> {
        let geometry = self.tables.geometry();
        let size = geometry.subcluster_size();
        let is_end = part.end() >= self.tables.header().size;
        let is_whole =
            part.offset().is_multiple_of(size) && (is_end || part.length().is_multiple_of(size));
        if !geometry.extended_l2 || !is_whole {
            return Ok(None);
        }
        self.check_room()?;
        let cluster = geometry.cluster_of(part.offset());
        self.wait_for_change(cluster)?;
        let index = geometry.l2_index(cluster).index;
        let old = match self.tables.l2_slice(cluster)? {
            Some(slice) => self.tables.entry(slice, index)?,
            None => Entry::UNALLOCATED,
        };
        let Entry::Standard { subclusters, .. } = old else { return Ok(None) };
        let mask = subclusters_in(geometry, cluster, part);
        let shown = if marks_holes { subclusters.zero } else { !subclusters.data };
        if shown & mask == mask {
            return Ok(Some(noop_extent(part)));
        }
        self.writable_l2_slice(cluster)?;
        self.tables.check_host(cluster, old)?;
        let clusters = cluster..cluster + 1;
        self.wait_for_overwrites(&clusters)?;
        self.mapping.changes.begin(clusters, Change::ZeroSubclusters { mask, keep })?;
        let flags = ExtentFlags::NEW;
        Ok(Some(Extent { guest: part, alloc_range: part, state: ExtentState::Zero, flags }))
    }

    /// Maps a discard of a part of a cluster. If the cluster can be written in place, the part can
    /// become a hole in the host's file.
    fn discard_part(&mut self, part: ByteRange) -> Step<Extent> {
        let cluster = self.tables.geometry().cluster_of(part.offset());
        self.wait_for_change(cluster)?;
        if let Some(slice) = self.tables.l2_slice(cluster)?
            && let WriteMethod::InPlace { host } =
                super::write::write_method(self.tables, slice, cluster, part)?
        {
            return Ok(self.overwrite(part, cluster..cluster + 1, host));
        }
        Ok(noop_extent(part))
    }

    /// The whole clusters that `range` covers from its start on; `None` if there are none. Bytes
    /// beyond the disk's end are treated as covered.
    fn whole_clusters(&self, range: ByteRange) -> Option<Range<u64>> {
        let geometry = self.tables.geometry();
        if !geometry.is_cluster_aligned(range.offset()) {
            return None;
        }
        let end = if range.end() >= self.tables.header().size {
            geometry.clusters_for(range.end())
        } else {
            geometry.cluster_of(range.end())
        };
        let clusters = geometry.cluster_of(range.offset())..end;
        (!clusters.is_empty()).then_some(clusters)
    }

    /// Prepares a change of entries alone, for the longest run at the start of `clusters` whose
    /// entries need the change according to `needs`. If the first cluster does not need the change,
    /// returns an extent without work for the longest run that does not need the change.
    fn prepare_unmapping(
        &mut self,
        range: ByteRange,
        clusters: Range<u64>,
        change: Change,
        needs: impl Fn(Entry) -> bool,
    ) -> Step<Extent> {
        self.check_room()?;
        let geometry = self.tables.geometry();
        let first = clusters.start;
        let end =
            self.mapping.changes.unlocked_until(first, clusters.end).map_err(Blocked::Wait)?;
        let at = geometry.l2_index(first);
        if self.tables.l2_table(at.l1_index)?.is_none() && !needs(Entry::UNALLOCATED) {
            let next = (at.l1_index as u64 + 1) * geometry.l2_entries();
            return Ok(noop_extent(self.tables.geometry().up_to_cluster(range, end.min(next))));
        }
        let end = end.min(first + geometry.slice_l2_entries() - at.index as u64);
        let looked_up = self.tables.l2_slice(first)?;
        let needed = match looked_up {
            Some(slice) => needs(self.tables.entry(slice, at.index)?),
            None => true,
        };
        let slice = match looked_up {
            Some(slice) if !needed => slice,
            _ => self.writable_l2_slice(first)?,
        };
        let mut count = 0;
        while first + count < end {
            let entry = self.tables.entry(slice, at.index + count as usize)?;
            if count > 0 && needs(entry) != needed {
                break;
            }
            if needed {
                self.tables.check_host(first + count, entry)?;
            }
            count += 1;
        }
        let clusters = first..first + count;
        let guest = self.tables.geometry().up_to_cluster(range, clusters.end);
        if !needed {
            return Ok(noop_extent(guest));
        }
        self.wait_for_overwrites(&clusters)?;
        self.mapping.changes.begin(clusters, change)?;
        let flags = ExtentFlags::NEW;
        Ok(Extent { guest, alloc_range: guest, state: ExtentState::Zero, flags })
    }

    /// Allocates space for the compressed form of the cluster `guest`, `length` bytes. The space
    /// starts at a multiple of `block` and has whole blocks, so that a write to the space never
    /// touches a block of another compressed cluster.
    pub(crate) fn map_compressed(
        &mut self,
        guest: ByteRange,
        length: u64,
        block: u64,
    ) -> Step<Extent> {
        self.check_room()?;
        let cluster = self.tables.geometry().cluster_of(guest.offset());
        let clusters = cluster..cluster + 1;
        self.wait_for_change(cluster)?;
        self.wait_for_overwrites(&clusters)?;
        self.writable_l2_slice(cluster)?;
        let length = length.next_multiple_of(block);
        let host = self.allocator.alloc_bytes(self.tables, length, block)?;
        let data = CompressedDescriptor { offset: host, length };
        self.mapping.changes.begin(clusters, Change::Compressed(data))?;
        let state = ExtentState::Compressed { host, length };
        Ok(Extent { guest, alloc_range: guest, state, flags: ExtentFlags::NEW })
    }
}

/// The first bytes of `range`, in one cluster, that are either whole subclusters or a part of
/// one subcluster.
fn first_subclusters(tables: &Tables, range: ByteRange) -> ByteRange {
    let first = range.truncate(tables.geometry().rest_of_cluster(range.offset()));
    let size = tables.geometry().subcluster_size();
    let to_border = first.offset().next_multiple_of(size) - first.offset();
    if to_border > 0 {
        return first.truncate(to_border);
    }
    // The part beyond the disk's end is treated as covered.
    match first.length() / size * size {
        _ if first.end() >= tables.header().size => first,
        0 => first,
        whole => first.truncate(whole),
    }
}
