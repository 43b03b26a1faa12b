//! How many references a new snapshot adds to each cluster.
//!
//! Counters are kept in pages, one for each slice of refcounts, and only where something is counted: memory
//! goes by what is mapped, a byte for each cluster. A page knows whether it changed since its slice was encoded.

use std::collections::{BTreeSet, HashMap};

use crate::qcow2::layout::geometry::Geometry;

/// A counter that says that the count is in the list of large ones.
const LARGE: u8 = u8::MAX;

/// See the module's page.
pub(super) struct ReferenceCounts {
    in_page: u64,
    pages: Vec<Page>,
    /// Where the page of a slice is.
    index: HashMap<u64, usize>,
    /// The slice and the page that were used last: references come in runs.
    last: (u64, usize),
    large: HashMap<u64, u64>,
    /// Slices whose pages changed since they were encoded.
    stale: BTreeSet<u64>,
    /// Slices whose pages are new since this was asked for.
    new: Vec<u64>,
}

struct Page {
    counts: Box<[u8]>,
    is_stale: bool,
}

impl ReferenceCounts {
    pub(super) fn new(geometry: Geometry) -> Self {
        Self {
            in_page: geometry.slice_refcounts(),
            pages: Vec::new(),
            index: HashMap::new(),
            last: (u64::MAX, 0),
            large: HashMap::new(),
            stale: BTreeSet::new(),
            new: Vec::new(),
        }
    }

    /// One reference more.
    pub(super) fn add(&mut self, cluster: u64) {
        let (page, at) = self.slot(cluster);
        let count = &mut self.pages[page].counts[at];
        if *count < LARGE - 1 {
            *count += 1;
        } else {
            *count = LARGE;
            *self.large.entry(cluster).or_insert(u64::from(LARGE) - 1) += 1;
        }
    }

    /// One reference less; `None` for a cluster that has none.
    #[must_use]
    pub(super) fn remove(&mut self, cluster: u64) -> Option<()> {
        let (page, at) = self.slot(cluster);
        let count = &mut self.pages[page].counts[at];
        match self.large.get_mut(&cluster) {
            Some(large) if *large > u64::from(LARGE) => *large -= 1,
            Some(_) => {
                self.large.remove(&cluster);
                *count = LARGE - 1;
            }
            None => *count = count.checked_sub(1)?,
        }
        Some(())
    }

    /// The page of a cluster, which is stale now, and its counter there.
    fn slot(&mut self, cluster: u64) -> (usize, usize) {
        let slice = cluster / self.in_page;
        if self.last.0 != slice {
            let (pages, in_page) = (&mut self.pages, self.in_page as usize);
            let page = *self.index.entry(slice).or_insert_with(|| {
                self.new.push(slice);
                pages.push(Page { counts: vec![0; in_page].into(), is_stale: false });
                pages.len() - 1
            });
            self.last = (slice, page);
        }
        let page = self.last.1;
        if !std::mem::replace(&mut self.pages[page].is_stale, true) {
            self.stale.insert(slice);
        }
        (page, (cluster % self.in_page) as usize)
    }

    /// How many pages are new since this was asked for last.
    pub(super) fn new_pages(&self) -> usize {
        self.new.len()
    }

    /// The slices of refcounts whose pages are new.
    pub(super) fn take_new_pages(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.new)
    }

    /// The slices of refcounts that have to be encoded again.
    pub(super) fn stale(&self) -> &BTreeSet<u64> {
        &self.stale
    }

    /// The slice could not be encoded.
    pub(super) fn set_stale(&mut self, slice: u64) {
        self.slot(slice * self.in_page);
    }

    /// The slice was encoded with these counts.
    pub(super) fn set_encoded(&mut self, slice: u64) {
        if self.stale.remove(&slice) {
            self.pages[self.index[&slice]].is_stale = false;
        }
    }

    /// Whether any cluster of the slice has a reference.
    pub(super) fn has_any(&self, slice: u64) -> bool {
        self.of_slice(slice).next().is_some()
    }

    /// The clusters of a slice that have references, by their number in it, and how many.
    pub(super) fn of_slice(&self, slice: u64) -> impl Iterator<Item = (usize, u64)> {
        let page = self.index.get(&slice).map(|&page| &*self.pages[page].counts);
        let counts = page.unwrap_or_default().iter().enumerate();
        counts.filter(|&(_, &count)| count > 0).map(move |(at, &count)| match count {
            LARGE => (at, self.large[&(slice * self.in_page + at as u64)]),
            count => (at, u64::from(count)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        version: 3,
        cluster_bits: 16,
        refcount_order: 4,
        extended_l2: false,
        has_data_file: false,
    };

    #[test]
    fn counts_of_any_size_go_up_and_down() {
        let mut counts = ReferenceCounts::new(GEOMETRY);
        let in_page = GEOMETRY.slice_refcounts();
        for cluster in [5, 5, 7, in_page * 1000 + 1] {
            counts.add(cluster);
        }
        for target in [1000, 3, 254, 255, 256, 0] {
            let now = |counts: &ReferenceCounts| {
                counts.of_slice(0).find(|one| one.0 == 9).map_or(0, |one| one.1)
            };
            while now(&counts) < target {
                counts.add(9);
            }
            while now(&counts) > target {
                counts.remove(9).expect("a reference");
            }
            let others: Vec<_> = counts.of_slice(0).filter(|one| one.0 != 9).collect();
            assert_eq!(others, [(5, 2), (7, 1)]);
        }
        assert_eq!(counts.stale().iter().copied().collect::<Vec<_>>(), [0, 1000]);
        counts.set_encoded(0);
        assert_eq!(counts.stale().len(), 1);
        counts.remove(7).expect("a reference");
        assert!(counts.remove(7).is_none());
        assert!(counts.stale().contains(&0) && counts.has_any(0) && !counts.has_any(1));
    }
}
