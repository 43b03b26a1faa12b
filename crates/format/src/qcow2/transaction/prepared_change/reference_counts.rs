//! The number of references that a change of the snapshots adds to each cluster, or removes from
//! it.
//!
//! Counters are in pages, one page for each slice of refcounts with a counted cluster. So the
//! memory depends on the amount of mapped data: a byte for each cluster, two bytes if references
//! are removed. A page records whether it changed since its slice was encoded, and how many
//! references its clusters had left then.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use crate::qcow2::layout::geometry::Geometry;

/// The value of a counter whose count is in the list of large counts.
const LARGE: u8 = u8::MAX;

/// The number of references that a cluster has left after some are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    None,
    One,
    /// Two or more, or not known yet.
    More,
}

/// The counters; see the module's documentation.
pub(super) struct ReferenceCounts {
    in_page: u64,
    pages: Vec<Page>,
    /// Index of the page of a slice.
    index: HashMap<u64, usize>,
    /// The last used slice and page: consecutive references are often in the same slice.
    last: Cell<(u64, usize)>,
    large: HashMap<u64, u64>,
    /// Slices whose pages have changed since they were encoded.
    stale: BTreeSet<u64>,
    /// Slices whose pages are new since the last call of `take_new_pages`.
    new: Vec<u64>,
}

struct Page {
    counts: Box<[u8]>,
    /// By cluster, as `counts`; empty if no references were removed.
    left: Box<[Left]>,
    is_stale: bool,
}

impl ReferenceCounts {
    pub(super) fn new(geometry: Geometry) -> Self {
        Self {
            in_page: geometry.slice_refcounts(),
            pages: Vec::new(),
            index: HashMap::new(),
            last: Cell::new((u64::MAX, 0)),
            large: HashMap::new(),
            stale: BTreeSet::new(),
            new: Vec::new(),
        }
    }

    /// Counts one reference more.
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

    /// Counts one reference less; `None` for a cluster without a counted reference.
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

    /// The page of a cluster, and the index of the cluster's counter in the page. Makes the page
    /// stale.
    fn slot(&mut self, cluster: u64) -> (usize, usize) {
        let slice = cluster / self.in_page;
        let page = self.find(slice).unwrap_or_else(|| {
            let counts = vec![0; self.in_page as usize].into();
            self.new.push(slice);
            self.index.insert(slice, self.pages.len());
            self.pages.push(Page { counts, left: [].into(), is_stale: false });
            self.pages.len() - 1
        });
        if !std::mem::replace(&mut self.pages[page].is_stale, true) {
            self.stale.insert(slice);
        }
        (page, (cluster % self.in_page) as usize)
    }

    fn find(&self, slice: u64) -> Option<usize> {
        if self.last.get().0 != slice {
            self.last.set((slice, *self.index.get(&slice)?));
        }
        Some(self.last.get().1)
    }

    /// Sets the number of references left of a cluster that loses some. For other clusters the
    /// number is not known.
    pub(super) fn set_left(&mut self, cluster: u64, left: Left) {
        let Some(page) = self.find(cluster / self.in_page) else { return };
        let all = &mut self.pages[page].left;
        if all.is_empty() {
            *all = vec![Left::More; self.in_page as usize].into();
        }
        all[(cluster % self.in_page) as usize] = left;
    }

    /// The number of references left; `More` for a cluster that loses none.
    pub(super) fn left(&self, cluster: u64) -> Left {
        let page = self.find(cluster / self.in_page).map(|page| &*self.pages[page].left);
        let left = page.and_then(|left| left.get((cluster % self.in_page) as usize));
        left.copied().unwrap_or(Left::More)
    }

    /// All slices in which references are counted, in order.
    pub(super) fn slices(&self) -> BTreeSet<u64> {
        self.index.keys().copied().collect()
    }

    /// Runs of a slice's clusters that have lost all of their references.
    pub(super) fn without_any_left(&self, slice: u64) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        let first = slice * self.in_page;
        for cluster in first..first + self.in_page {
            match runs.last_mut() {
                _ if self.left(cluster) != Left::None => {}
                Some(run) if run.end == cluster => run.end += 1,
                _ => runs.push(cluster..cluster + 1),
            }
        }
        runs
    }

    /// The number of new pages since the last call of [`take_new_pages`](Self::take_new_pages).
    pub(super) fn new_pages(&self) -> usize {
        self.new.len()
    }

    /// The slices of refcounts whose pages are new.
    pub(super) fn take_new_pages(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.new)
    }

    /// The slices of refcounts that must be encoded again.
    pub(super) fn stale(&self) -> &BTreeSet<u64> {
        &self.stale
    }

    /// Records that the slice could not be encoded.
    pub(super) fn set_stale(&mut self, slice: u64) {
        self.slot(slice * self.in_page);
    }

    /// Records that the slice was encoded with the present counts.
    pub(super) fn set_encoded(&mut self, slice: u64) {
        if self.stale.remove(&slice)
            && let Some(page) = self.find(slice)
        {
            self.pages[page].is_stale = false;
        }
    }

    /// Whether any cluster of the slice has a reference.
    pub(super) fn has_any(&self, slice: u64) -> bool {
        self.of_slice(slice).next().is_some()
    }

    /// The clusters of a slice that have references: the index in the slice, and the number of
    /// references.
    pub(super) fn of_slice(&self, slice: u64) -> impl Iterator<Item = (usize, u64)> {
        let page = self.index.get(&slice).map(|&page| &*self.pages[page].counts);
        let counts = page.unwrap_or_default().iter().enumerate();
        counts.filter(|&(_, &count)| count > 0).map(move |(at, &count)| match count {
            LARGE => {
                let large = self.large.get(&(slice * self.in_page + at as u64));
                (at, large.copied().unwrap_or(u64::from(LARGE)))
            }
            count => (at, u64::from(count)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry::COMMON;

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

    #[test]
    fn clusters_without_references_are_told_in_runs() {
        let mut counts = ReferenceCounts::new(GEOMETRY);
        let in_page = GEOMETRY.slice_refcounts();
        let first = 3 * in_page;
        (first..first + 6).for_each(|cluster| counts.add(cluster));
        counts.set_encoded(3);
        for (at, left) in [(0, Left::None), (1, Left::None), (2, Left::One), (5, Left::None)] {
            counts.set_left(first + at, left);
        }
        assert_eq!(counts.without_any_left(3), [first..first + 2, first + 5..first + 6]);
        assert_eq!((counts.left(first + 2), counts.left(first + 3)), (Left::One, Left::More));
        assert_eq!((counts.left(7), counts.slices().len()), (Left::More, 1));
        assert!(counts.stale().is_empty() && counts.without_any_left(4).is_empty());
    }
}
