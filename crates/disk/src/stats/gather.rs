//! A reading of all that a disk is measured by.

use super::host::HostStats;
use super::reading::{DiskMetrics, StageMetrics};
use super::requests::Stats;

/// A reading of a disk's requests, and of the storages beneath.
pub(crate) fn gather(requests: &Stats, storages: &[&HostStats]) -> DiskMetrics {
    // The stages first, so that no request seems to have taken part in none.
    let mut stages: Vec<StageMetrics> = requests.waits().collect();
    for one in storages.iter().flat_map(|storage| storage.operations()) {
        let same = |other: &&mut StageMetrics| {
            other.stage == one.stage && other.operation == one.operation
        };
        match stages.iter_mut().find(same) {
            Some(sum) => sum.add(&one),
            None => stages.push(one),
        }
    }
    let totals = requests.totals();
    DiskMetrics {
        requests: requests.requests(),
        stages,
        clients: requests.clients().read(),
        in_flight: totals.in_flight,
        bounced: totals.bounced,
        decompressed: totals.decompressed,
        flushes_skipped: storages.iter().map(|storage| storage.skipped_flushes()).sum(),
        flushes_shared: storages.iter().map(|storage| storage.shared_flushes()).sum(),
    }
}
