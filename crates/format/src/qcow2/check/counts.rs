//! The number of references to each cluster of a file.
//!
//! A hostile file may be exabytes long and almost empty, so memory depends on the counted
//! references, not on the number of clusters. A page of counters is allocated when its first
//! counter is set. The page is a list of the counters that are not 0, up to [`MAX_LISTED`] of them;
//! with more, the page has a counter for each cluster. Running out of memory for a page's counters
//! is an error, and does not end the process.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use blockhouse_core::{Error, Result, errno};

/// Number of counters of a page.
const PAGE: u64 = 4096;
/// Maximum length of a list of counters.
const MAX_LISTED: usize = 512;

/// Counters of the clusters below a limit.
pub(crate) struct Counts {
    clusters: u64,
    pages: BTreeMap<u64, Page>,
}

/// Counters of `PAGE` clusters.
enum Page {
    /// All counters have this value.
    Uniform(u32),
    /// The counters that are not 0, in order.
    Listed(Vec<(u16, u32)>),
    Full(Vec<u32>),
}

impl Counts {
    /// Counters for this many clusters, all 0.
    pub(crate) fn new(clusters: u64) -> Self {
        Self { clusters, pages: BTreeMap::new() }
    }

    /// The number of clusters that can be counted.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Extends the counters to `clusters` clusters.
    pub(crate) fn extend_to(&mut self, clusters: u64) {
        self.clusters = self.clusters.max(clusters);
    }

    /// The count of a cluster; 0 beyond the last one.
    pub(crate) fn get(&self, cluster: u64) -> u32 {
        self.pages.get(&(cluster / PAGE)).map_or(0, |page| page.get((cluster % PAGE) as u16))
    }

    /// Sets the count of a cluster below the limit.
    ///
    /// # Errors
    /// ENOMEM.
    pub(crate) fn set(&mut self, cluster: u64, count: u32) -> Result<()> {
        let page = self.pages.entry(cluster / PAGE).or_insert(Page::Uniform(0));
        page.set((cluster % PAGE) as u16, count)
    }

    /// Adds `times` to the counts of these clusters, all below the limit.
    ///
    /// # Errors
    /// ENOMEM.
    pub(crate) fn add(&mut self, clusters: Range<u64>, times: u32) -> Result<()> {
        let mut at = clusters.start;
        while at < clusters.end {
            let end = (at / PAGE + 1).saturating_mul(PAGE).min(clusters.end);
            let page = self.pages.entry(at / PAGE).or_insert(Page::Uniform(0));
            match page {
                Page::Uniform(count) if end - at == PAGE => *count = count.saturating_add(times),
                page => {
                    for index in at..end {
                        let index = (index % PAGE) as u16;
                        page.set(index, page.get(index).saturating_add(times))?;
                    }
                }
            }
            at = end;
        }
        Ok(())
    }

    /// The clusters whose count is not 0, in order, with their counts.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        self.pages.iter().flat_map(|(&number, page)| page.iter_from(number * PAGE))
    }

    /// The clusters in the range `clusters` whose count is not 0, in order, with their counts.
    pub(crate) fn range(&self, clusters: Range<u64>) -> impl Iterator<Item = (u64, u32)> {
        let pages = self.pages.range(clusters.start / PAGE..clusters.end.div_ceil(PAGE));
        let all = pages.flat_map(|(&number, page)| page.iter_from(number * PAGE));
        all.filter(move |(cluster, _)| clusters.contains(cluster))
    }

    /// Whether the count of any of these clusters is not 0.
    pub(crate) fn has_any(&self, clusters: Range<u64>) -> bool {
        self.range(clusters).next().is_some()
    }

    /// The end of the last cluster whose count is not 0.
    pub(crate) fn end(&self) -> u64 {
        let last = |(&number, page): (&u64, &Page)| page.iter_from(number * PAGE).last();
        self.pages.iter().rev().find_map(last).map_or(0, |(cluster, _)| cluster + 1)
    }
}

impl Page {
    fn get(&self, index: u16) -> u32 {
        match self {
            Self::Uniform(count) => *count,
            Self::Listed(list) => {
                list.binary_search_by_key(&index, |&(index, _)| index).map_or(0, |at| list[at].1)
            }
            Self::Full(counts) => counts[usize::from(index)],
        }
    }

    fn set(&mut self, index: u16, count: u32) -> Result<()> {
        match self {
            Self::Uniform(uniform) if *uniform == count => {}
            Self::Uniform(0) => {
                let mut list = Vec::new();
                list.try_reserve_exact(1).map_err(|_| out_of_memory())?;
                list.push((index, count));
                *self = Self::Listed(list);
            }
            Self::Uniform(_) => {
                self.fill()?;
                return self.set(index, count);
            }
            Self::Listed(list) => match list.binary_search_by_key(&index, |&(index, _)| index) {
                Ok(at) if count == 0 => drop(list.remove(at)),
                Ok(at) => list[at].1 = count,
                Err(_) if count == 0 => {}
                Err(_) if list.len() == MAX_LISTED => {
                    self.fill()?;
                    return self.set(index, count);
                }
                Err(at) => {
                    list.try_reserve(1).map_err(|_| out_of_memory())?;
                    list.insert(at, (index, count));
                }
            },
            Self::Full(counts) => counts[usize::from(index)] = count,
        }
        Ok(())
    }

    /// Converts the page to a counter for each cluster.
    fn fill(&mut self) -> Result<()> {
        let mut counts = Vec::new();
        counts.try_reserve_exact(PAGE as usize).map_err(|_| out_of_memory())?;
        counts.extend((0..PAGE as u16).map(|index| self.get(index)));
        *self = Self::Full(counts);
        Ok(())
    }

    /// The counters that are not 0; the page begins with cluster `first`.
    fn iter_from(&self, first: u64) -> impl Iterator<Item = (u64, u32)> {
        let (listed, others) = match self {
            Self::Listed(list) => (list.as_slice(), 0..0),
            Self::Uniform(0) => ([].as_slice(), 0..0),
            Self::Uniform(_) | Self::Full(_) => ([].as_slice(), 0..PAGE as u16),
        };
        let others = others.map(|index| (index, self.get(index))).filter(|&(_, count)| count > 0);
        let all = listed.iter().copied().chain(others);
        all.map(move |(index, count)| (first + u64::from(index), count))
    }
}

fn out_of_memory() -> Error {
    Error::host("cannot count the clusters", io::Error::from_raw_os_error(errno::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_kept_wherever_they_are() {
        let mut counts = Counts::new(1 << 54);
        counts.set(5, 2).unwrap();
        counts.add(4090..4100, 1).unwrap();
        counts.add(1 << 53..(1 << 53) + 3 * PAGE, 7).unwrap();
        counts.add(5..6, u32::MAX).unwrap();
        counts.set(1 << 53, 8).unwrap();
        counts.set(4095, 0).unwrap();
        assert_eq!((counts.get(5), counts.get(4090), counts.get(4095)), (u32::MAX, 1, 0));
        assert_eq!((counts.get(1 << 53), counts.get((1 << 53) + 1)), (8, 7));
        assert_eq!(counts.iter().count() as u64, 1 + 9 + 3 * PAGE);
        assert_eq!(counts.end(), (1 << 53) + 3 * PAGE);
        assert!(counts.has_any(4099..5000) && !counts.has_any(4100..1 << 53));
    }

    #[test]
    fn lists_become_pages() {
        let mut counts = Counts::new(PAGE);
        for index in (0..PAGE).rev() {
            counts.set(index, index as u32 + 1).unwrap();
        }
        assert!(counts.iter().eq((0..PAGE).map(|index| (index, index as u32 + 1))));
    }
}
