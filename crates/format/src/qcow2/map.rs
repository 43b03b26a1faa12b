//! Looking up guest ranges: which bytes are where.

use blockhouse_core::{ByteRange, Extent, ExtentFlags, ExtentState};

use super::entry::{Entry, UnitState, Units};
use super::state::{State, Step};

/// What one unit of the guest reads as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Data { host: u64 },
    Zero,
    Unallocated,
    Compressed { host: u64, length: u64 },
}

impl State {
    /// The extent of the first bytes of `range`, for reading.
    pub(crate) fn map_read(&mut self, range: ByteRange) -> Step<Extent> {
        let geometry = self.geometry;
        let start = range.offset();
        let cluster = geometry.cluster_of(start);
        let Some(slice) = self.l2_slice(cluster)? else {
            let span = geometry.l1_entry_span();
            let guest = range.truncate(span - start % span);
            return Ok(self.extent(guest, Content::Unallocated));
        };
        let place = geometry.l2_place(cluster);
        let unit_size = geometry.unit_size();
        let in_cluster = start % geometry.cluster_size();
        let first = self.entry(slice, place.index)?;
        self.check_data_place(cluster, first)?;
        let first_unit = (in_cluster / unit_size) as u32;
        let content = self.content(first, first_unit);
        if let Content::Compressed { .. } = content {
            let guest = range.truncate(geometry.cluster_size() - in_cluster);
            return self.within_file(self.extent(guest, content));
        }
        let mut end = start - start % unit_size + unit_size;
        let (mut index, mut entry, mut unit) = (place.index, first, first_unit);
        let units = (geometry.cluster_size() / unit_size) as u32;
        while end < range.end() {
            unit += 1;
            if unit == units {
                (index, unit) = (index + 1, 0);
                if index as u64 == geometry.slice_l2_entries() {
                    break;
                }
                entry = self.entry(slice, index)?;
                self.check_data_place(cluster + (index - place.index) as u64, entry)?;
            }
            if !content.goes_on(self.content(entry, unit), end - (start - start % unit_size)) {
                break;
            }
            end += unit_size;
        }
        self.within_file(self.extent(range.truncate(end - start), content))
    }

    /// What a unit of an entry reads as; the host offset is that of the unit.
    fn content(&self, entry: Entry, unit: u32) -> Content {
        match entry {
            Entry::Compressed(place) => {
                Content::Compressed { host: place.offset, length: place.length }
            }
            Entry::Standard { place, units } => match (units.state(unit), place) {
                (UnitState::Data, Some(place)) => {
                    let within = u64::from(unit) * self.geometry.unit_size();
                    Content::Data { host: place.offset + within }
                }
                (UnitState::Zero, _) => Content::Zero,
                (UnitState::Unallocated | UnitState::Data, _) => Content::Unallocated,
            },
        }
    }

    fn extent(&self, guest: ByteRange, content: Content) -> Extent {
        let cluster_size = self.geometry.cluster_size();
        let mut whole = guest;
        let state = match content {
            Content::Data { host } => {
                let within = guest.offset() % self.geometry.unit_size();
                ExtentState::Mapped { host: host + within }
            }
            Content::Zero => ExtentState::Zero,
            Content::Unallocated if self.header.backing.is_some() => ExtentState::Backing,
            Content::Unallocated => ExtentState::Hole,
            Content::Compressed { host, length } => {
                whole = guest.align_outward(cluster_size);
                ExtentState::Compressed { host, length }
            }
        };
        Extent { guest, alloc_range: whole, state, flags: ExtentFlags::empty() }
    }
}

impl Content {
    /// Whether `next`, which follows `distance` bytes after the unit of `self`, belongs to the same
    /// extent.
    fn goes_on(self, next: Self, distance: u64) -> bool {
        match (self, next) {
            (Self::Data { host }, Self::Data { host: next }) => host + distance == next,
            (Self::Zero, Self::Zero) | (Self::Unallocated, Self::Unallocated) => true,
            _ => false,
        }
    }
}

/// The units of a cluster that the bytes `[start, end)` of it touch.
pub(crate) fn unit_mask(start: u64, end: u64, unit_size: u64) -> u32 {
    let first = (start / unit_size) as u32;
    let count = (end.div_ceil(unit_size) as u32 - first).min(32);
    (Units::DATA.data >> (32 - count)) << first
}
