//! The end of the image's file. An entry that refers to a cluster past the end is damaged.

use std::ops::Range;

/// The end of the file, in clusters.
pub(crate) struct FileEnd {
    /// No cluster from here on is in use.
    end: u64,
    /// The length of the file when the image was opened, its tables were replaced, or the file was
    /// truncated. Clusters from here on read as zeros until they are written.
    opened: u64,
    /// Whether bytes that are added when the file grows may be other than zeros.
    has_stale_growth: bool,
}

impl FileEnd {
    /// The end of a file of this many clusters.
    pub(crate) fn new(clusters: u64) -> Self {
        Self { end: clusters, opened: clusters, has_stale_growth: false }
    }

    /// The end of a file that now has this many clusters, but at least the old end: a write that
    /// failed in its middle, or was dropped, may have stored bytes up to the old end.
    pub(crate) fn with_clusters(&self, clusters: u64) -> Self {
        let has_stale_growth = self.has_stale_growth;
        Self { has_stale_growth, ..Self::new(clusters.max(self.bound())) }
    }

    /// Records that bytes past the length of the file may be other than zeros, as on a block device
    /// that another program extends.
    pub(crate) fn expect_stale_growth(&mut self) {
        self.has_stale_growth = true;
    }

    /// The cluster from which on no cluster is in use.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// The cluster from which on no cluster can hold data: a reference to such a cluster is damage.
    pub(crate) fn bound(&self) -> u64 {
        self.end.max(self.opened)
    }

    /// Whether a new cluster reads as zeros before it is written.
    pub(crate) fn is_unwritten(&self, cluster: u64) -> bool {
        cluster >= self.opened && !self.has_stale_growth
    }

    /// Records that clusters before `end` are in use, or cannot be used.
    pub(crate) fn advance(&mut self, end: u64) {
        self.end = self.end.max(end);
    }

    /// Reserves `count` clusters at the end. Their refcounts stay as they are.
    pub(crate) fn reserve(&mut self, count: u64) -> Range<u64> {
        let start = self.end;
        self.end += count;
        start..self.end
    }

    /// Releases reserved clusters from `start` to `end`, if the end is still `end`.
    pub(crate) fn unreserve(&mut self, end: u64, start: u64) {
        if self.end == end {
            self.end = start;
        }
    }

    /// Moves the end to `cluster`, if that is lower. All refcounts from `cluster` on are zero.
    /// Returns whether the end has moved. The end stays if it differs from the recorded length of
    /// the file, for example because clusters past that length were taken.
    pub(crate) fn lower(&mut self, cluster: u64) -> bool {
        let is_lower = self.end == self.opened && cluster < self.end;
        if is_lower {
            self.end = cluster;
        }
        is_lower
    }

    /// Records that the file was truncated to `end` clusters.
    pub(crate) fn cut(&mut self, end: u64) {
        (self.end, self.opened) = (end, end);
    }
}
