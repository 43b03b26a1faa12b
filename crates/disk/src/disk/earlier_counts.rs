//! The counters of another process for a disk that it has handed over.

use blockhouse_format::CacheCounts;

use crate::stats::DiskMetrics;
use crate::throttle::ThrottleStats;

/// The counters of a disk before this process had it.
#[derive(Clone, Debug, Default)]
pub struct EarlierCounts {
    /// Requests, operations at the host and clients. Of the clients and requests that there were
    /// at that moment nothing counts.
    pub metrics: DiskMetrics,
    /// Look-ups of metadata.
    pub cache: CacheCounts,
    /// How often requests waited for limits, and how long.
    pub limits: ThrottleStats,
}
