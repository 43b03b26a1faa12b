//! The parts of mapping that depend on whether the data is in a data file (`data_placement`).

use std::ops::Range;

use blockhouse_core::{ByteRange, Extent, Unmap};

use crate::qcow2::tables::{SliceId, Step};

use super::data_placement::DataPlacement;
use super::write::{Target, WriteMethod, write_method};
use super::{Mapper, noop_extent};

impl Mapper<'_> {
    /// Allocates host clusters for the first of these guest clusters. Returns the guest clusters
    /// that have a host cluster now, and their target.
    pub(super) fn allocate_target(
        &mut self,
        slice: SliceId,
        clusters: Range<u64>,
    ) -> Step<(Range<u64>, Target)> {
        match &self.mapping.data {
            DataPlacement::Image => self.allocate_in_image(slice, clusters),
            DataPlacement::DataFile(_) => {
                self.mapping.data.wait_for_cow_writes(&clusters)?;
                let host = self.tables.geometry().offset_of(clusters.start);
                Ok((clusters, Target { host, allocated: false, zeroed: false, prepared: false }))
            }
        }
    }

    /// Records host clusters that a write with a dropped future may still modify.
    pub(super) fn quarantine(&mut self, hosts: Range<u64>) {
        match &mut self.mapping.data {
            DataPlacement::Image => self.allocator.quarantine(hosts),
            DataPlacement::DataFile(file) => file.note_dropped(hosts),
        }
    }

    /// Maps the first bytes of `range` for a zero write.
    pub(crate) fn map_zero(&mut self, range: ByteRange, unmap: Unmap) -> Step<Extent> {
        let DataPlacement::DataFile(file) = &self.mapping.data else {
            return self.map_zero_by_entries(range, unmap);
        };
        // Zeros are written over data, and everywhere in a raw disk; other entries get the zero
        // flag.
        if file.is_raw_disk() || self.starts_with_data(range)? {
            return self.map_write(range);
        }
        // Only one cluster, because the next cluster may have data.
        let first = range.truncate(self.tables.geometry().rest_of_cluster(range.offset()));
        self.map_zero_by_entries(first, Unmap::Forbidden)
    }

    /// Maps the first bytes of `range` for a discard.
    pub(crate) fn map_discard(&mut self, range: ByteRange) -> Step<Extent> {
        match &self.mapping.data {
            DataPlacement::Image => self.map_discard_in_image(range),
            DataPlacement::DataFile(_) => self.map_discard_in_data_file(range),
        }
    }

    /// Maps a discard in a data file: the data is discarded in the file, and the L2 entries stay.
    fn map_discard_in_data_file(&mut self, range: ByteRange) -> Step<Extent> {
        if self.starts_with_data(range)? {
            return self.map_write(range);
        }
        let geometry = self.tables.geometry();
        let span = match self.tables.l2_slice(geometry.cluster_of(range.offset()))? {
            Some(_) => geometry.cluster_size(),
            None => geometry.l1_entry_span(),
        };
        Ok(noop_extent(range.truncate(span - range.offset() % span)))
    }

    /// Whether the first bytes of `range`, up to the end of their cluster, are all data.
    fn starts_with_data(&mut self, range: ByteRange) -> Step<bool> {
        let cluster = self.tables.geometry().cluster_of(range.offset());
        self.wait_for_change(cluster)?;
        let Some(slice) = self.tables.l2_slice(cluster)? else { return Ok(false) };
        let method = write_method(self.tables, slice, cluster, range)?;
        Ok(matches!(method, WriteMethod::InPlace { .. }))
    }
}
