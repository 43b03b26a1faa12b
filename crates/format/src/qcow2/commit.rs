//! The end of a prepared change: its entries in memory, or its space given back.

use std::ops::Range;

use blockhouse_core::{ByteRange, Durability, Extent, ExtentFlags, ExtentState};

use super::deferred_free::{DeferredFree, Punch, Users};
use super::entry::{Entry, Reference, UnitState, Units};
use super::map::unit_mask;
use super::pending::Change;
use super::slice_cache::{DataStability, SliceId};
use super::state::{State, Step};
use crate::Abort;

impl State {
    /// The data of the extent arrived: all entries change, or none if something is missing. The answer
    /// is which references left the tables, for the caller to free.
    pub(crate) fn commit(&mut self, extent: Extent, data: Durability) -> Step<Vec<DeferredFree>> {
        let mut dropped = Vec::new();
        if !extent.flags.contains(ExtentFlags::NEW) {
            self.end_overwrite(extent);
            return Ok(dropped);
        }
        let first = self.geometry.cluster_of(extent.alloc_range.offset());
        let Some(prepared) = self.pending.get(first) else { return Ok(dropped) };
        let (clusters, change) = (prepared.clusters.clone(), prepared.change.clone());
        let stability = match data {
            Durability::None => DataStability::Unstable,
            Durability::Data | Durability::Full => DataStability::Stable,
        };
        let slice = self.own_l2_slice(first)?;
        for cluster in clusters.clone() {
            self.entry(slice, self.geometry.l2_place(cluster).index)?;
        }
        for cluster in clusters.clone() {
            let old =
                self.change_entry(slice, cluster, first, &change, extent.alloc_range, stability)?;
            if let Some(old) = old {
                old.join(&mut dropped);
            }
        }
        if let Change::Write { host, .. } = change {
            self.space.fill_to(self.geometry.cluster_of(host) + (clusters.end - clusters.start));
        }
        self.version += 1;
        self.pending.end(first);
        Ok(dropped)
    }

    fn change_entry(
        &mut self,
        slice: SliceId,
        cluster: u64,
        first: u64,
        change: &Change,
        whole: ByteRange,
        stability: DataStability,
    ) -> Step<Option<DeferredFree>> {
        let geometry = self.geometry;
        let index = geometry.l2_place(cluster).index;
        let old = self.entry(slice, index)?;
        let new = match *change {
            Change::Write { host, .. } => {
                let place = Reference::sole(host + geometry.offset_of(cluster - first));
                let units = self.written_units(old, cluster, whole);
                Entry::Standard { place: Some(place), units }
            }
            Change::Pack(place) => Entry::Compressed(place),
            Change::Zero { keep } => match old {
                Entry::Standard { place: Some(place), .. } if keep && place.is_sole() => {
                    Entry::Standard { place: Some(place), units: Units::ZERO }
                }
                _ => Entry::ZERO,
            },
            Change::Discard if geometry.version >= 3 && self.header.backing.is_some() => {
                Entry::ZERO
            }
            Change::Discard => Entry::UNALLOCATED,
            Change::Units { mask, state, keep } => match old {
                Entry::Standard { place, units } => {
                    let units = units.with(mask, state);
                    let place = place.filter(|_| keep || units.data != 0);
                    Entry::Standard { place, units }
                }
                Entry::Compressed(_) => old,
            },
        };
        let punch = match change {
            Change::Write { .. } | Change::Pack(_) => Punch::No,
            Change::Zero { .. } | Change::Discard | Change::Units { .. } => Punch::Yes,
        };
        let dropped = self.dropped_clusters(old, new, punch);
        let bytes = self.cache.change(slice.offset, index, stability);
        new.write(bytes, index, geometry);
        Ok(dropped)
    }

    /// What the units of a cluster are once `whole` is written.
    fn written_units(&self, old: Entry, cluster: u64, whole: ByteRange) -> Units {
        let geometry = self.geometry;
        let Entry::Standard { units, .. } = old else { return Units::DATA };
        if !geometry.extended_l2 {
            return Units::DATA;
        }
        let bytes = geometry.bytes_of(cluster..cluster + 1);
        let start = whole.offset().max(bytes.offset()) - bytes.offset();
        let end = whole.end().min(bytes.end()) - bytes.offset();
        units.with(unit_mask(start, end, geometry.unit_size()), UnitState::Data)
    }

    /// Counts down what the old entry referred to and the new one does not.
    pub(crate) fn defer_free_of(&mut self, old: Entry, new: Entry, punch: Punch) {
        if let Some(dropped) = self.dropped_clusters(old, new, punch) {
            self.defer_free(dropped);
        }
    }

    /// What the old entry refers to and the new one does not.
    fn dropped_clusters(&self, old: Entry, new: Entry, punch: Punch) -> Option<DeferredFree> {
        let geometry = self.geometry;
        // In a data file each cluster has one place, which nobody else can have.
        if geometry.has_data_file {
            return None;
        }
        match old {
            // Others may have data in the same clusters, so they are never punched.
            Entry::Compressed(place) => Some(DeferredFree::of(place.host_clusters(geometry))),
            Entry::Standard { place: Some(place), .. } => {
                let kept = matches!(new, Entry::Standard { place: Some(new), .. }
                    if new.offset == place.offset);
                let cluster = geometry.cluster_of(place.offset);
                if kept || self.pending.haunted.contains(&cluster) {
                    return None;
                }
                let (punch, users) = match place.is_sole() {
                    true => (punch, Users::None),
                    false => (Punch::No, Users::Others),
                };
                Some(DeferredFree { clusters: cluster..cluster + 1, punch, users })
            }
            Entry::Standard { place: None, .. } => None,
        }
    }

    /// The data of the extent did not arrive.
    pub(crate) fn abort(&mut self, extent: Extent, why: Abort) {
        let geometry = self.geometry;
        if why == Abort::InFlight
            && let ExtentState::Mapped { host } = extent.state
        {
            let place = ByteRange::between(host, host + extent.guest.length());
            self.pending.haunted.extend(geometry.clusters_of(place));
        }
        if !extent.flags.contains(ExtentFlags::NEW) {
            self.end_overwrite(extent);
            return;
        }
        let first = geometry.cluster_of(extent.alloc_range.offset());
        let Some(prepared) = self.pending.end(first) else { return };
        match prepared.change {
            // What may still be written to is never counted down.
            _ if why == Abort::InFlight => {}
            Change::Write { host, taken: true } => {
                let host = geometry.cluster_of(host);
                self.free_unlinked(host..host + clusters_in(&prepared.clusters));
            }
            Change::Pack(place) => self.free_unlinked(place.host_clusters(geometry)),
            Change::Write { taken: false, .. }
            | Change::Zero { .. }
            | Change::Discard
            | Change::Units { .. } => {}
        }
    }

    fn end_overwrite(&mut self, extent: Extent) {
        if matches!(extent.state, ExtentState::Mapped { .. }) {
            self.pending.end_overwrite(self.geometry.clusters_of(extent.guest));
        }
    }
}

fn clusters_in(clusters: &Range<u64>) -> u64 {
    clusters.end - clusters.start
}
