//! A reading of all measurements of a disk.

use super::host::HostStats;
use super::reading::{DiskMetrics, RequestMetrics, StageMetrics};
use super::requests::Stats;

/// A reading of a disk's requests and of its storages, plus the earlier counts `before`.
pub(crate) fn gather(
    requests: &Stats,
    storages: &[&HostStats],
    before: Option<&DiskMetrics>,
) -> DiskMetrics {
    // The stages are read first, so that they never count more than the requests.
    let mut stages: Vec<StageMetrics> = requests.waits().collect();
    let operations = storages.iter().flat_map(|storage| storage.operations());
    operations.for_each(|one| one.add_to(&mut stages));
    // Ends are read before begins, so a request that ends in between counts as in flight, and the
    // number in flight is never negative.
    let totals = requests.totals();
    let (clients, requests) = (requests.clients().read(), requests.requests());
    let unfinished: u64 = requests.iter().map(RequestMetrics::unfinished).sum();
    let mut metrics = DiskMetrics {
        in_flight: unfinished.saturating_sub(totals.cancelled),
        requests,
        stages,
        clients,
        bounced: totals.bounced,
        decompressed: totals.decompressed,
        flushes_skipped: storages.iter().map(|storage| storage.skipped_flushes()).sum(),
        flushes_shared: storages.iter().map(|storage| storage.shared_flushes()).sum(),
    };
    before.into_iter().for_each(|before| metrics.add_counted(before));
    metrics
}
