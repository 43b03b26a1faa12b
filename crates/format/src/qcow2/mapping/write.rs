//! Maps writes, either in place or to new host clusters.

use std::ops::Range;

use blockhouse_core::{ByteRange, Extent, ExtentFlags, ExtentState};

use crate::qcow2::layout::entry::{Entry, SubclusterBitmap, subclusters_in};
use crate::qcow2::tables::{Blocked, SliceId, Step, Tables};

use super::Mapper;
use super::pending_changes::Change;

/// How a guest cluster can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteMethod {
    /// In place, byte for byte.
    InPlace { host: u64 },
    /// In its allocated host cluster. The entry does not yet make the range read from this host
    /// cluster.
    Preallocated { host: u64 },
    /// In a new host cluster; no old data has to be copied.
    Allocate,
    /// In a new host cluster, to which the rest of the old content is copied.
    Cow(CowReason),
}

/// Why a cluster is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CowReason {
    /// A snapshot may refer to the cluster, too.
    Shared,
    /// The cluster is compressed.
    Compressed,
    /// A write with a dropped future may still write its COW padding to the cluster.
    Quarantined,
}

/// The host space for the data of a prepared write.
pub(super) struct Target {
    pub(super) host: u64,
    /// Whether the host space was allocated for this write.
    pub(super) allocated: bool,
    /// Whether both the host space and the replaced guest clusters read as zeros.
    pub(super) zeroed: bool,
    /// Whether the zeros in the host space are written and durable.
    pub(super) prepared: bool,
}

/// How a guest cluster can be written, according to its entry.
pub(super) fn write_method(
    tables: &mut Tables,
    slice: SliceId,
    cluster: u64,
    range: ByteRange,
) -> Step<WriteMethod> {
    let geometry = tables.geometry();
    let entry = tables.entry(slice, geometry.l2_index(cluster).index)?;
    tables.check_host(cluster, entry)?;
    Ok(match entry {
        Entry::Compressed(_) => WriteMethod::Cow(CowReason::Compressed),
        Entry::Standard { host: None, .. } => WriteMethod::Allocate,
        Entry::Standard { host: Some(host), subclusters } if host.is_copied() => {
            let mask = subclusters_in(geometry, cluster, range);
            if subclusters.data & mask == mask {
                WriteMethod::InPlace { host: host.offset }
            } else {
                WriteMethod::Preallocated { host: host.offset }
            }
        }
        // A cluster that reads as zeros needs no copy.
        Entry::Standard { subclusters, .. } if subclusters == SubclusterBitmap::ZERO => {
            WriteMethod::Allocate
        }
        Entry::Standard { .. } => WriteMethod::Cow(CowReason::Shared),
    })
}

impl Mapper<'_> {
    /// Maps the first bytes of `range` for a write. `range` must lie before the end of the disk's
    /// last cluster, or of the part for which a growth has added L1 entries.
    pub(crate) fn map_write(&mut self, range: ByteRange) -> Step<Extent> {
        self.tables.check_dirty_limit()?;
        let geometry = self.tables.geometry();
        let clusters = geometry.clusters_of(range);
        let first = clusters.start;
        let end =
            self.mapping.changes.unlocked_until(first, clusters.end).map_err(Blocked::Wait)?;
        let slice = self.writable_l2_slice(first)?;
        let index = geometry.l2_index(first).index;
        let end = end.min(first + geometry.slice_l2_entries() - index as u64);
        let method = self.write_method(slice, first, range)?;
        let mut count = 1;
        while first + count < end {
            let next = self.write_method(slice, first + count, range)?;
            if !self.is_contiguous(method, count, next) {
                break;
            }
            count += 1;
        }
        let clusters = first..first + count;
        match method {
            WriteMethod::InPlace { host } => Ok(self.overwrite(range, clusters, host)),
            WriteMethod::Preallocated { host } => {
                self.check_room()?;
                self.wait_for_overwrites(&clusters)?;
                self.mapping.data.wait_for_cow_writes(&clusters)?;
                let target = Target { host, allocated: false, zeroed: false, prepared: false };
                self.prepare_write(slice, range, clusters, target, method)
            }
            WriteMethod::Allocate | WriteMethod::Cow(_) => {
                self.check_room()?;
                if method == WriteMethod::Cow(CowReason::Quarantined) {
                    // The copy must have the data of overwrites in flight, too.
                    self.wait_for_overwrites(&(first..first + 1))?;
                }
                let (clusters, target) = self.allocate_target(slice, clusters)?;
                self.prepare_write(slice, range, clusters, target, method)
            }
        }
    }

    /// As the function [`write_method`], but a preallocated cluster that is quarantined is not
    /// written again.
    fn write_method(
        &mut self,
        slice: SliceId,
        cluster: u64,
        range: ByteRange,
    ) -> Step<WriteMethod> {
        Ok(match write_method(self.tables, slice, cluster, range)? {
            WriteMethod::Preallocated { host }
                if self.allocator.is_quarantined(self.tables.geometry().cluster_of(host)) =>
            {
                WriteMethod::Cow(CowReason::Quarantined)
            }
            method => method,
        })
    }

    /// Whether a cluster can be in one extent with the cluster that is `count` clusters before it.
    /// `method` is the method of that earlier cluster, `next` the method of this cluster.
    fn is_contiguous(&self, method: WriteMethod, count: u64, next: WriteMethod) -> bool {
        use WriteMethod::{Allocate, Cow, InPlace, Preallocated};
        let geometry = self.tables.geometry();
        let distance = geometry.offset_of(count);
        match (method, next) {
            (InPlace { host }, InPlace { host: next })
            | (Preallocated { host }, Preallocated { host: next }) => host + distance == next,
            (Allocate, Allocate) => true,
            // Without subclusters the replaced content does not matter.
            (Allocate | Cow(_), Allocate | Cow(_)) => !geometry.extended_l2,
            _ => false,
        }
    }

    /// The extent of an overwrite in place.
    pub(super) fn overwrite(
        &mut self,
        range: ByteRange,
        clusters: Range<u64>,
        host: u64,
    ) -> Extent {
        let geometry = self.tables.geometry();
        let guest = range.truncate(geometry.offset_of(clusters.end) - range.offset());
        let mut flags = ExtentFlags::empty();
        if clusters.clone().any(|cluster| self.tables.is_entry_dirty(cluster)) {
            flags |= ExtentFlags::DIRTY;
        }
        self.mapping.runs.note_overwrite(&clusters);
        self.mapping.changes.begin_overwrite(clusters);
        let host = host + guest.offset() % geometry.cluster_size();
        Extent { guest, alloc_range: guest, state: ExtentState::Mapped { host }, flags }
    }

    /// Allocates host clusters for the first of these guest clusters. Returns the guest clusters
    /// that have a host cluster now, and their target.
    pub(super) fn allocate_in_image(
        &mut self,
        slice: SliceId,
        clusters: Range<u64>,
    ) -> Step<(Range<u64>, Target)> {
        // Space past the end of the file has never been written, unless the file was longer before.
        let unused = self.tables.file.end();
        let count = clusters.end - clusters.start;
        let ahead = self.clusters_ahead(slice, &clusters)?;
        let allocated = self.allocator.allocate_for_data(self.tables, count, ahead)?;
        let (all, prepared) = (allocated.clusters, allocated.is_prepared);
        let hosts = all.start..all.end.min(all.start + count);
        let clusters = clusters.start..clusters.start + (hosts.end - hosts.start);
        let is_unwritten = hosts.start >= unused && self.tables.file.is_unwritten(hosts.start);
        let zeroed = (is_unwritten || prepared) && self.reads_as_zeros(slice, clusters.clone())?;
        let host = self.tables.geometry().offset_of(hosts.start);
        if prepared {
            self.map_ahead(slice, clusters.clone(), hosts.end..all.end);
        }
        Ok((clusters, Target { host, allocated: true, zeroed, prepared }))
    }

    fn prepare_write(
        &mut self,
        slice: SliceId,
        range: ByteRange,
        clusters: Range<u64>,
        target: Target,
        method: WriteMethod,
    ) -> Step<Extent> {
        let geometry = self.tables.geometry();
        let bytes = geometry.bytes_of(clusters.clone());
        let guest = range.truncate(bytes.end() - range.offset());
        let whole = match method {
            WriteMethod::Cow(_) => bytes,
            _ if !geometry.extended_l2 => bytes,
            WriteMethod::Allocate => guest.align_outward(geometry.subcluster_size()),
            WriteMethod::InPlace { .. } | WriteMethod::Preallocated { .. } => {
                self.whole_subclusters(slice, guest)?
            }
        };
        let whole = self.mapping.data.within_disk(whole, guest, self.tables.header().size);
        let mut flags = ExtentFlags::NEW;
        flags.set(ExtentFlags::SHARED, method == WriteMethod::Cow(CowReason::Shared));
        flags.set(ExtentFlags::ZEROED, target.zeroed);
        flags.set(ExtentFlags::PREPARED, target.zeroed && target.prepared);
        let Target { host, allocated, .. } = target;
        self.mapping.changes.begin(clusters, Change::Write { host, allocated })?;
        let host = host + (guest.offset() - bytes.offset());
        Ok(Extent { guest, alloc_range: whole, state: ExtentState::Mapped { host }, flags })
    }

    /// Whether these clusters, whose entries are all in one slice, read as zeros, independent of
    /// the backing file.
    fn reads_as_zeros(&mut self, slice: SliceId, clusters: Range<u64>) -> Step<bool> {
        for cluster in clusters {
            let index = self.tables.geometry().l2_index(cluster).index;
            let is_zero = match self.tables.entry(slice, index)? {
                Entry::Standard { subclusters, .. } if subclusters == SubclusterBitmap::ZERO => {
                    true
                }
                Entry::Standard { host: None, .. } => !self.has_backing(),
                _ => false,
            };
            if !is_zero {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// `guest`, extended to whole subclusters at its start and end, except for a subcluster that
    /// has data already.
    fn whole_subclusters(&mut self, slice: SliceId, guest: ByteRange) -> Step<ByteRange> {
        let outer = guest.align_outward(self.tables.geometry().subcluster_size());
        let start = if self.holds_data(slice, guest.offset())? { guest } else { outer }.offset();
        let end = if self.holds_data(slice, guest.end() - 1)? { guest } else { outer }.end();
        Ok(ByteRange::between(start, end))
    }

    fn holds_data(&mut self, slice: SliceId, offset: u64) -> Step<bool> {
        let geometry = self.tables.geometry();
        let index = geometry.l2_index(geometry.cluster_of(offset)).index;
        let subcluster = offset % geometry.cluster_size() / geometry.subcluster_size();
        Ok(match self.tables.entry(slice, index)? {
            Entry::Standard { subclusters, .. } => subclusters.data >> subcluster & 1 == 1,
            Entry::Compressed(_) => true,
        })
    }

    /// Returns `Blocked` while these clusters are being written in place.
    pub(super) fn wait_for_overwrites(&mut self, clusters: &Range<u64>) -> Step<()> {
        match self.mapping.changes.overwrites_of(clusters) {
            Some(event) => Err(Blocked::Wait(event)),
            None => Ok(()),
        }
    }

    /// Returns `Blocked` while this cluster is being changed.
    pub(super) fn wait_for_change(&mut self, cluster: u64) -> Step<()> {
        let unlocked = self.mapping.changes.unlocked_until(cluster, cluster + 1);
        unlocked.map(drop).map_err(Blocked::Wait)
    }
}
