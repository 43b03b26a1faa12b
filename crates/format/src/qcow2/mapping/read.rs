//! Looks up the host locations of guest ranges. Uses only the tables.

use blockhouse_core::{ByteRange, Extent, ExtentFlags, ExtentState};

use crate::qcow2::layout::entry::{Entry, SubclusterState};
use crate::qcow2::tables::{Step, Tables};

/// The content of one subcluster of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SubclusterContent {
    Data { host: u64 },
    Zero,
    Unallocated,
    Compressed { host: u64, length: u64 },
}

/// The extent of the first bytes of `range`, for reading.
pub(crate) fn map_read(tables: &mut Tables, range: ByteRange) -> Step<Extent> {
    let geometry = tables.geometry();
    let start = range.offset();
    let cluster = geometry.cluster_of(start);
    let Some(slice) = tables.l2_slice(cluster)? else {
        let span = geometry.l1_entry_span();
        let guest = range.truncate(span - start % span);
        return Ok(extent(tables, guest, SubclusterContent::Unallocated));
    };
    let at = geometry.l2_index(cluster);
    let size = geometry.subcluster_size();
    let in_cluster = start % geometry.cluster_size();
    let first = tables.entry(slice, at.index)?;
    tables.check_data_file_host(cluster, first)?;
    let first_subcluster = (in_cluster / size) as u32;
    let content = content(tables, first, first_subcluster);
    if let SubclusterContent::Compressed { .. } = content {
        let guest = range.truncate(geometry.cluster_size() - in_cluster);
        let found = extent(tables, guest, content);
        return within_file(tables, found);
    }
    let mut end = start - start % size + size;
    let (mut index, mut entry, mut subcluster) = (at.index, first, first_subcluster);
    let in_each = (geometry.cluster_size() / size) as u32;
    while end < range.end() {
        subcluster += 1;
        if subcluster == in_each {
            (index, subcluster) = (index + 1, 0);
            if index as u64 == geometry.slice_l2_entries() {
                break;
            }
            entry = tables.entry(slice, index)?;
            tables.check_data_file_host(cluster + (index - at.index) as u64, entry)?;
        }
        let next = self::content(tables, entry, subcluster);
        if !content.is_contiguous(next, end - (start - start % size)) {
            break;
        }
        end += size;
    }
    let found = extent(tables, range.truncate(end - start), content);
    within_file(tables, found)
}

/// The content of a subcluster of an entry, with the subcluster's host offset.
fn content(tables: &Tables, entry: Entry, subcluster: u32) -> SubclusterContent {
    match entry {
        Entry::Compressed(data) => {
            SubclusterContent::Compressed { host: data.offset, length: data.length }
        }
        Entry::Standard { host, subclusters } => match (subclusters.state(subcluster), host) {
            (SubclusterState::Data, Some(host)) => {
                let within = u64::from(subcluster) * tables.geometry().subcluster_size();
                SubclusterContent::Data { host: host.offset + within }
            }
            (SubclusterState::Zero, _) => SubclusterContent::Zero,
            (SubclusterState::Unallocated | SubclusterState::Data, _) => {
                SubclusterContent::Unallocated
            }
        },
    }
}

fn extent(tables: &Tables, guest: ByteRange, content: SubclusterContent) -> Extent {
    let geometry = tables.geometry();
    let mut whole = guest;
    let state = match content {
        SubclusterContent::Data { host } => {
            let within = guest.offset() % geometry.subcluster_size();
            ExtentState::Mapped { host: host + within }
        }
        SubclusterContent::Zero => ExtentState::Zero,
        SubclusterContent::Unallocated if tables.header().backing.is_some() => ExtentState::Backing,
        SubclusterContent::Unallocated => ExtentState::Hole,
        SubclusterContent::Compressed { host, length } => {
            whole = guest.align_outward(geometry.cluster_size());
            ExtentState::Compressed { host, length }
        }
    };
    Extent { guest, alloc_range: whole, state, flags: ExtentFlags::empty() }
}

/// Truncates an extent at the end of the file. An extent that begins past the end is an error: its
/// data is lost, and must not read as zeros.
fn within_file(tables: &Tables, extent: Extent) -> Step<Extent> {
    let geometry = tables.geometry();
    let host = match extent.state {
        ExtentState::Mapped { host } if !geometry.has_data_file => host,
        ExtentState::Compressed { host, .. } => host,
        _ => return Ok(extent),
    };
    let end = geometry.offset_of(tables.file.end());
    if host >= end {
        let guest = extent.guest.offset();
        let what = format!("the data of the guest's offset {guest} lies past the end of the file");
        return Err(tables.corrupt(what, host).into());
    }
    if let ExtentState::Compressed { .. } = extent.state {
        return Ok(extent);
    }
    let guest = extent.guest.truncate(end - host);
    let whole = if extent.alloc_range == extent.guest { guest } else { extent.alloc_range };
    Ok(Extent { guest, alloc_range: whole, ..extent })
}

impl SubclusterContent {
    /// Whether `next`, which follows `distance` bytes after the subcluster of `self`, belongs to
    /// the same extent.
    fn is_contiguous(self, next: Self, distance: u64) -> bool {
        match (self, next) {
            (Self::Data { host }, Self::Data { host: next }) => host + distance == next,
            (Self::Zero, Self::Zero) | (Self::Unallocated, Self::Unallocated) => true,
            _ => false,
        }
    }
}
