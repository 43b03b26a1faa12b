//! The end of the image's file: an entry that refers to a cluster past it is damaged.

use std::ops::Range;

/// The end of the file, in clusters.
pub(crate) struct FileEnd {
    /// No cluster from here on is in use.
    end: u64,
    /// The length of the file when the image was opened: clusters from here on read as zeros until
    /// they are written.
    opened: u64,
    /// Whether what the file gets when it becomes longer may hold anything.
    has_stale_growth: bool,
}

impl FileEnd {
    /// Of a file of this many clusters.
    pub(crate) fn new(clusters: u64) -> Self {
        Self { end: clusters, opened: clusters, has_stale_growth: false }
    }

    /// The end of a file that has this many clusters now. Bytes before the old end may have been
    /// written, however short the file is taken to be: by a write that failed in its middle, or was
    /// dropped.
    pub(crate) fn with_clusters(&self, clusters: u64) -> Self {
        let has_stale_growth = self.has_stale_growth;
        Self { has_stale_growth, ..Self::new(clusters.max(self.bound())) }
    }

    /// Bytes past the length of the file may hold anything: a block device that others make longer.
    pub(crate) fn expect_stale_growth(&mut self) {
        self.has_stale_growth = true;
    }

    /// No cluster from here on is in use.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Nothing can be in clusters from here on, whatever refers to them.
    pub(crate) fn bound(&self) -> u64 {
        self.end.max(self.opened)
    }

    /// Whether a new cluster reads as zeros before it is written.
    pub(crate) fn is_unwritten(&self, cluster: u64) -> bool {
        cluster >= self.opened && !self.has_stale_growth
    }

    /// Clusters up to `end` are in use, or cannot be used.
    pub(crate) fn advance(&mut self, end: u64) {
        self.end = self.end.max(end);
    }

    /// Takes `count` clusters from the end without counting them.
    pub(crate) fn reserve(&mut self, count: u64) -> Range<u64> {
        let start = self.end;
        self.end += count;
        start..self.end
    }

    /// The clusters from `start` up to the end, if that is `end`, are not in use after all.
    pub(crate) fn unreserve(&mut self, end: u64, start: u64) {
        if self.end == end {
            self.end = start;
        }
    }

    /// Nothing is counted from `cluster` on: the end is there, unless clusters were taken past the
    /// old one.
    pub(crate) fn lower(&mut self, cluster: u64) {
        if self.end == self.opened {
            self.end = cluster;
        }
    }

    /// The file was cut off here.
    pub(crate) fn cut(&mut self, end: u64) {
        (self.end, self.opened) = (end, end);
    }
}
