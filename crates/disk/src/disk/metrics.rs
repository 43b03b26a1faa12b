//! The counters of a disk, from when it was first opened: also before another process handed it
//! over, and with the images that it has left. So no counter goes backwards.

use std::pin::Pin;

use blockhouse_core::Storage;
use blockhouse_format::CacheCounts;

use super::Disk;
use super::earlier_counts::EarlierCounts;
use crate::layer::Layer;
use crate::stats::{
    self, ClientGuard, Counters, DiskMetrics, ExportKind, ExportLoad, HostStats, Operation,
    RequestTimer,
};
use crate::throttle::ThrottleStats;

impl<S: Storage> Disk<S> {
    /// The counters.
    pub fn stats(&self) -> Counters {
        self.metrics().counters()
    }

    /// All that it is measured by. For people who ask now and then: it reads the blocks of all
    /// threads.
    pub fn metrics(&self) -> DiskMetrics {
        let former = self.former_layers();
        let storages = layers_of(self.layer()).chain(former).flat_map(|layer| {
            let (image, data) = (layer.format().storage(), layer.format().data());
            let data = (!std::ptr::eq(image, data)).then(|| data.stats());
            std::iter::once(image.stats()).chain(data)
        });
        let storages: Vec<&HostStats> = storages.collect();
        let earlier = self.earlier.get().map(|earlier| &earlier.metrics);
        stats::gather(self.request_stats(), &storages, earlier)
    }

    /// How many reads and writes of its exports have ended, and how long they took: cheaper than
    /// [`metrics`](Self::metrics).
    pub fn export_load(&self) -> ExportLoad {
        self.request_stats().export_load()
    }

    /// Look-ups of the image's metadata; `None` where the format has none.
    pub fn metadata_cache(&self) -> Option<CacheCounts> {
        let replaced = self.replaced().map(|disk| disk.own_layer());
        let counted = std::iter::once(self.layer()).chain(replaced);
        let counted = counted.filter_map(|layer| layer.format().cache_counts());
        let earlier = self.earlier.get().map(|earlier| earlier.cache);
        let earlier = earlier.filter(|cache| cache.hits + cache.misses > 0);
        counted.chain(earlier).reduce(|sum, one| CacheCounts {
            hits: sum.hits + one.hits,
            misses: sum.misses + one.misses,
        })
    }

    /// The waits of requests for their limits.
    pub fn throttle_stats(&self) -> ThrottleStats {
        let stats = self.throttle.stats();
        let Some(earlier) = self.earlier.get() else { return stats };
        ThrottleStats {
            waiting: stats.waiting,
            delayed: stats.delayed + earlier.limits.delayed,
            delayed_time: stats.delayed_time + earlier.limits.delayed_time,
        }
    }

    /// All that was counted so far, for the process that goes on with the disk.
    pub fn earlier_counts(&self) -> EarlierCounts {
        EarlierCounts {
            metrics: self.metrics(),
            cache: self.metadata_cache().unwrap_or_default(),
            limits: self.throttle_stats(),
        }
    }

    /// Counts on from what another process has counted. Before the disk is used, and once.
    pub fn count_from(&self, earlier: EarlierCounts) {
        // It counts on from the first one.
        let _ = self.earlier.set(Box::new(earlier));
    }

    /// Counts a client that uses the disk by this kind of export, until the guard is dropped.
    pub fn enter_client(&self, export: ExportKind) -> ClientGuard {
        self.request_stats().clients().enter(export)
    }

    /// As [`enter_client`](Self::enter_client), for a client that another process has handed over:
    /// it is among those that were [counted](Self::count_from) there.
    pub fn enter_client_again(&self, export: ExportKind) -> ClientGuard {
        self.request_stats().clients().enter_again(export)
    }

    /// Waits for a request's turn in an export, and counts the time as one in the
    /// [queue](crate::Stage::Queue).
    pub async fn wait_turn<F: Future>(&self, operation: Operation, turn: Pin<&mut F>) -> F::Output {
        self.request_stats().wait(operation, turn).await
    }

    /// Counts a request that an export carries out by other calls than [`submit`](Self::submit), as
    /// one for block status.
    pub fn measure(
        &self,
        export: ExportKind,
        operation: Operation,
        bytes: u64,
    ) -> RequestTimer<'_> {
        self.request_stats().begin_operation(export, operation, bytes)
    }
}

impl<S: Storage> Disk<S> {
    /// The images that the disk has left: those that were replaced with those of their backing
    /// files, and backing files that were detached. Without those that it uses now.
    pub(crate) fn former_layers(&self) -> impl Iterator<Item = &Layer<S>> {
        let is_used =
            |layer: &Layer<S>| layers_of(self.layer()).any(|one| std::ptr::eq(one, layer));
        let tops = self.replaced().map(|disk| disk.own_layer()).chain([self.layer()]);
        tops.flat_map(Layer::opened_layers).filter(move |layer| !is_used(layer))
    }

    /// As [`former_layers`](Self::former_layers), without those that another disk stands on.
    pub(crate) fn left_layers(&self) -> impl Iterator<Item = &Layer<S>> {
        let is_shared = |layer: &Layer<S>| {
            let mut tops = self.replaced().map(|disk| disk.own_layer()).chain([self.layer()]);
            // An overlay needs all that is behind it.
            tops.any(|top| {
                let mut behind = top.opened_layers().skip_while(|one| one.stands() <= 1);
                behind.any(|one| std::ptr::eq(one, layer))
            })
        };
        self.former_layers().filter(move |layer| !is_shared(layer))
    }
}

/// An image and those of its backing files.
fn layers_of<S: Storage>(top: &Layer<S>) -> impl Iterator<Item = &Layer<S>> {
    (0..).map_while(|depth| top.at_depth(depth))
}
