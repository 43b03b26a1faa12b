//! The counters of another process for a disk that it has handed over.

use blockhouse_format::CacheCounts;

use crate::stats::DiskMetrics;
use crate::throttle::ThrottleStats;

/// The counters of a disk before this process had it.
#[derive(Clone, Debug, Default)]
pub struct EarlierCounts {
    /// Counters of requests, host operations and clients. The clients and requests present at the
    /// handover do not count.
    pub metrics: DiskMetrics,
    /// Look-ups of metadata in the cache.
    pub cache: CacheCounts,
    /// The number and the length of waits for limits.
    pub limits: ThrottleStats,
}
