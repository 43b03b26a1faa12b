//! A cache of the clusters that were decompressed last, so that consecutive small reads decompress
//! each cluster once.
//!
//! The cache is bounded; the least recently used cluster is evicted first. The key is a cluster's
//! guest range and its host range. While a read of a host range is in flight, this range gets no
//! new content. A change of the disk first invalidates the clusters that it touches. So an entry
//! always matches the file.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_lock::OnceCell;
use blockhouse_core::{Buffer, ByteRange};
use parking_lot::Mutex;

/// Maximum bytes of memory, unless [`MIN_CLUSTERS`] large clusters need more.
const MAX_BYTES: u64 = 4 << 20;
/// Minimum and maximum number of cached clusters.
const MIN_CLUSTERS: u64 = 2;
const MAX_CLUSTERS: u64 = 64;

/// Location of a compressed cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompressedLocation {
    /// The cluster's range of the guest's disk.
    pub(crate) guest: ByteRange,
    /// The range of the compressed bytes in the file.
    pub(crate) host: ByteRange,
}

/// A cluster's decompressed bytes: one read decompresses them, other reads wait.
pub(crate) type CachedCluster = Arc<OnceCell<Buffer>>;

/// See the module's page.
pub(crate) struct DecompressedCache {
    /// The most recently used cluster is first.
    lru: Mutex<VecDeque<(CompressedLocation, CachedCluster)>>,
    is_empty: AtomicBool,
    capacity: usize,
}

impl DecompressedCache {
    /// A cache for clusters of this many bytes.
    pub(crate) fn new(cluster_size: u64) -> Self {
        let capacity = (MAX_BYTES / cluster_size).clamp(MIN_CLUSTERS, MAX_CLUSTERS) as usize;
        Self { lru: Mutex::default(), is_empty: AtomicBool::new(true), capacity }
    }

    /// The cluster, if it is cached or being decompressed.
    pub(crate) fn get(&self, place: CompressedLocation) -> Option<CachedCluster> {
        promote(&mut self.lru.lock(), place)
    }

    /// The cluster. If it is not cached, the first read of it decompresses it.
    pub(crate) fn get_or_insert(&self, place: CompressedLocation) -> CachedCluster {
        let mut lru = self.lru.lock();
        if let Some(cluster) = promote(&mut lru, place) {
            return cluster;
        }
        let cluster = CachedCluster::default();
        lru.push_front((place, Arc::clone(&cluster)));
        lru.truncate(self.capacity);
        self.is_empty.store(false, Ordering::SeqCst);
        cluster
    }

    /// Drops the clusters of `guest`, which is about to change.
    pub(crate) fn invalidate(&self, guest: ByteRange) {
        if !self.is_empty.load(Ordering::SeqCst) {
            let mut lru = self.lru.lock();
            lru.retain(|(place, _)| !place.guest.overlaps(guest));
            self.is_empty.store(lru.is_empty(), Ordering::SeqCst);
        }
    }
}

/// Returns the cluster, if it is cached, and makes it the most recently used one.
fn promote(
    lru: &mut VecDeque<(CompressedLocation, CachedCluster)>,
    place: CompressedLocation,
) -> Option<CachedCluster> {
    let at = lru.iter().position(|(other, _)| *other == place)?;
    let found = lru.remove(at)?;
    let cluster = Arc::clone(&found.1);
    lru.push_front(found);
    Some(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 64 << 10;

    fn place(number: u64) -> CompressedLocation {
        let guest = ByteRange::between(number * SIZE, (number + 1) * SIZE);
        CompressedLocation { guest, host: ByteRange::between(number * 100, number * 100 + 99) }
    }

    #[test]
    fn the_last_ones_are_kept() {
        let clusters = DecompressedCache::new(SIZE);
        for number in 0..MAX_CLUSTERS {
            clusters.get_or_insert(place(number));
        }
        assert!(clusters.get(place(0)).is_some(), "used again, it is the last one");
        clusters.get_or_insert(place(MAX_CLUSTERS));
        assert!(clusters.get(place(0)).is_some() && clusters.get(place(1)).is_none());
    }

    #[test]
    fn changed_ones_are_forgotten() {
        let clusters = DecompressedCache::new(SIZE);
        clusters.invalidate(place(1).guest);
        for number in 0..3 {
            clusters.get_or_insert(place(number));
        }
        clusters.invalidate(ByteRange::between(SIZE + 1, SIZE + 2));
        let is_there = |number| clusters.get(place(number)).is_some();
        assert_eq!([0, 1, 2].map(is_there), [true, false, true]);
        let moved = CompressedLocation { host: place(7).host, ..place(0) };
        assert!(clusters.get(moved).is_none(), "the same cluster at another place");
    }
}
