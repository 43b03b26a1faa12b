//! Preallocated host clusters: their guest clusters read as zeros, or from the backing file.

use blockhouse_core::ByteRange;

use crate::qcow2::layout::entry::Entry;
use crate::qcow2::tables::{Step, Tables};

/// The host offset that is allocated for the first bytes of `range`, or `None`; and the number of
/// bytes for which this holds (contiguously). The guest's bytes are not read from this host offset.
pub(crate) fn preallocated_offset(
    tables: &mut Tables,
    range: ByteRange,
) -> Step<(Option<u64>, u64)> {
    let geometry = tables.geometry();
    let clusters = geometry.clusters_of(range);
    let Some(slice) = tables.l2_slice(clusters.start)? else {
        return Ok((None, range.length()));
    };
    let index = geometry.l2_index(clusters.start).index as u64;
    let limit = geometry.slice_l2_entries() - index;
    let mut host_of = |count: u64| -> Step<Option<u64>> {
        Ok(match tables.entry(slice, (index + count) as usize)? {
            Entry::Standard { host, .. } => host.map(|host| host.offset),
            Entry::Compressed(_) => None,
        })
    };
    let first = host_of(0)?;
    let mut count = 1;
    while count < limit.min(clusters.end - clusters.start)
        && host_of(count)? == first.map(|first| first + geometry.offset_of(count))
    {
        count += 1;
    }
    let length = geometry.offset_of(clusters.start + count) - range.offset();
    let within = range.offset() % geometry.cluster_size();
    Ok((first.map(|first| first + within), length.min(range.length())))
}
