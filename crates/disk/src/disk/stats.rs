//! The counters of a disk since it was first opened. They include the counters of processes that
//! handed the disk over, and of its replaced images, so no counter decreases.

use std::pin::Pin;

use blockhouse_core::Storage;
use blockhouse_format::CacheCounts;

use super::Disk;
use super::earlier_counts::EarlierCounts;
use crate::layer::BackingWait;
use crate::stats::{
    self, ClientGuard, Counters, DiskMetrics, ExportKind, ExportLoad, HostStats, Operation,
    RequestTimer, Stats,
};
use crate::throttle::ThrottleStats;

/// The counters of a disk. See the module's page.
pub struct DiskStats<'a, S: Storage> {
    disk: &'a Disk<S>,
}

impl<S: Storage> Clone for DiskStats<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Storage> Copy for DiskStats<'_, S> {}

impl<S: Storage> Disk<S> {
    /// The measurements of the disk.
    pub fn stats(&self) -> DiskStats<'_, S> {
        DiskStats { disk: self }
    }

    /// The requests of the disk's users, over all of its images.
    pub(super) fn request_stats(&self) -> &Stats {
        self.images.first().layer().stats()
    }
}

impl<'a, S: Storage> DiskStats<'a, S> {
    /// The counters.
    pub fn counters(self) -> Counters {
        self.metrics().counters()
    }

    /// All metrics of the disk. For rare queries: it reads the counters of all threads.
    pub fn metrics(self) -> DiskMetrics {
        let layers = self.disk.images.all_openings();
        let storages = layers.into_iter().flat_map(|layer| {
            let (image, data) = (layer.format().storage(), layer.format().data());
            let data = (!std::ptr::eq(image, data)).then(|| data.stats());
            std::iter::once(image.stats()).chain(data)
        });
        let storages: Vec<&HostStats> = storages.collect();
        let earlier = self.disk.earlier.get().map(|earlier| &earlier.metrics);
        stats::gather(self.disk.request_stats(), &storages, earlier)
    }

    /// The read of a backing file that a request in flight waits for, if there is such a request.
    pub fn backing_wait(self) -> Option<BackingWait> {
        self.disk.image().layer().opened().longest_wait()
    }

    /// How many reads and writes of the disk's exports have ended, how long they took, and how many
    /// are in flight, without those that wait for their limits or for space. Cheaper than
    /// [`metrics`](Self::metrics).
    pub fn export_load(self) -> ExportLoad {
        let load = self.disk.request_stats().export_load();
        let waiting = self.disk.hold().count() + self.throttle().waiting;
        ExportLoad { in_flight: load.in_flight.saturating_sub(waiting), ..load }
    }

    /// Hits and misses of look-ups of metadata; `None` if the format has no such counts.
    pub fn metadata_cache(self) -> Option<CacheCounts> {
        let layers = self.disk.images.layers();
        let counted = layers.filter_map(|layer| layer.format().cache_counts());
        let earlier = self.disk.earlier.get().map(|earlier| earlier.cache);
        let earlier = earlier.filter(|cache| cache.hits + cache.misses > 0);
        counted.chain(earlier).reduce(|sum, one| CacheCounts {
            hits: sum.hits + one.hits,
            misses: sum.misses + one.misses,
        })
    }

    /// The waits of requests for rate limits.
    pub fn throttle(self) -> ThrottleStats {
        let stats = self.disk.throttle.stats();
        let Some(earlier) = self.disk.earlier.get() else { return stats };
        ThrottleStats {
            waiting: stats.waiting,
            delayed: stats.delayed + earlier.limits.delayed,
            delayed_time: stats.delayed_time + earlier.limits.delayed_time,
        }
    }

    /// All counts so far, for the process that takes over the disk.
    pub fn earlier_counts(self) -> EarlierCounts {
        EarlierCounts {
            metrics: self.metrics(),
            cache: self.metadata_cache().unwrap_or_default(),
            limits: self.throttle(),
        }
    }

    /// Continues the counts of another process. Called once, before the disk is used.
    pub fn count_from(self, earlier: EarlierCounts) {
        // The first counts are kept.
        let _ = self.disk.earlier.set(Box::new(earlier));
    }

    /// Counts a client that uses the disk by this kind of export, until the guard is dropped.
    pub fn enter_client(self, export: ExportKind) -> ClientGuard {
        self.disk.request_stats().clients().enter(export)
    }

    /// As [`enter_client`](Self::enter_client), for a client that another process has handed over:
    /// that process has [counted](Self::count_from) it already.
    pub fn enter_client_again(self, export: ExportKind) -> ClientGuard {
        self.disk.request_stats().clients().enter_again(export)
    }

    /// Waits for a request's turn in an export, and counts the time as spent in the
    /// [queue](crate::Stage::Queue).
    pub async fn wait_turn<F: Future>(self, operation: Operation, turn: Pin<&mut F>) -> F::Output {
        self.disk.request_stats().wait(operation, turn).await
    }

    /// Counts a request that an export carries out by another call than
    /// [`submit`](crate::Disk::submit), such as a query of block status.
    pub fn measure(self, export: ExportKind, operation: Operation, bytes: u64) -> RequestTimer<'a> {
        self.disk.request_stats().begin_operation(export, operation, bytes)
    }
}
