//! Space that nothing is read from: clusters that read as zeros, or from the backing file, and have a
//! place all the same.

use blockhouse_core::{ByteRange, Result, Storage};

use super::Qcow2;
use super::entry::Entry;
use super::state::{State, Step};

impl<S: Storage> Qcow2<S> {
    /// Where the first bytes of `range` have their place although their content does not come from
    /// there, `None` for nowhere; and for how many bytes that holds, in one piece. `range` is one
    /// that [`map`](Self::map) answered for reading as zeros, a hole or the backing file's.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn preallocated_offset(&self, range: ByteRange) -> Result<(Option<u64>, u64)> {
        self.step(|state| state.kept_place(range)).await
    }
}

impl State {
    fn kept_place(&mut self, range: ByteRange) -> Step<(Option<u64>, u64)> {
        let geometry = self.geometry;
        let clusters = geometry.clusters_of(range);
        let Some(slice) = self.l2_slice(clusters.start)? else {
            return Ok((None, range.length()));
        };
        let index = geometry.l2_place(clusters.start).index as u64;
        let most = geometry.slice_l2_entries() - index;
        let mut kept = |count: u64| -> Step<Option<u64>> {
            Ok(match self.entry(slice, (index + count) as usize)? {
                Entry::Standard { place, .. } => place.map(|place| place.offset),
                Entry::Compressed(_) => None,
            })
        };
        let first = kept(0)?;
        let mut count = 1;
        while count < most.min(clusters.end - clusters.start)
            && kept(count)? == first.map(|first| first + geometry.offset_of(count))
        {
            count += 1;
        }
        let length = geometry.offset_of(clusters.start + count) - range.offset();
        let within = range.offset() % geometry.cluster_size();
        Ok((first.map(|first| first + within), length.min(range.length())))
    }
}
