//! The compressed clusters that were unpacked last, so that small reads in a row unpack each once.
//!
//! Bounded. A cluster is known by its place in the guest's disk and in the file: a place in the file gets
//! no other content while reads of it are under way, and whoever is about to change a part of the
//! guest's disk makes its clusters be forgotten first. So what is found here is what the file holds.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_lock::OnceCell;
use blockhouse_core::{Buffer, ByteRange};
use parking_lot::Mutex;

/// How much memory is kept in bytes, where clusters are not larger than that allows.
const KEPT: u64 = 4 << 20;
/// How many clusters are kept at least, and at most.
const MIN_CLUSTERS: u64 = 2;
const MAX_CLUSTERS: u64 = 64;

/// Where a compressed cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedPlace {
    /// Its bytes of the guest's disk.
    pub(crate) guest: ByteRange,
    /// Its bytes of the file.
    pub(crate) host: ByteRange,
}

/// A cluster's bytes, once somebody has unpacked them: one does, the others wait.
pub(crate) type Unpacked = Arc<OnceCell<Buffer>>;

/// See the module's page.
pub(crate) struct UnpackedClusters {
    /// The one that was used last is in front.
    last: Mutex<VecDeque<(PackedPlace, Unpacked)>>,
    is_empty: AtomicBool,
    most: usize,
}

impl UnpackedClusters {
    /// For clusters of so many bytes.
    pub(crate) fn new(cluster_size: u64) -> Self {
        let most = (KEPT / cluster_size).clamp(MIN_CLUSTERS, MAX_CLUSTERS) as usize;
        Self { last: Mutex::default(), is_empty: AtomicBool::new(true), most }
    }

    /// The cluster, if it is there or being unpacked.
    pub(crate) fn find(&self, place: PackedPlace) -> Option<Unpacked> {
        find_in(&mut self.last.lock(), place)
    }

    /// The cluster, to be unpacked by the first who comes.
    pub(crate) fn find_or_add(&self, place: PackedPlace) -> Unpacked {
        let mut last = self.last.lock();
        if let Some(unpacked) = find_in(&mut last, place) {
            return unpacked;
        }
        let unpacked = Unpacked::default();
        last.push_front((place, Arc::clone(&unpacked)));
        last.truncate(self.most);
        self.is_empty.store(false, Ordering::SeqCst);
        unpacked
    }

    /// `guest` is about to change.
    pub(crate) fn forget(&self, guest: ByteRange) {
        if !self.is_empty.load(Ordering::SeqCst) {
            let mut last = self.last.lock();
            last.retain(|(place, _)| !place.guest.overlaps(guest));
            self.is_empty.store(last.is_empty(), Ordering::SeqCst);
        }
    }
}

/// The cluster, if it is among the last ones; it is in front from then on.
fn find_in(last: &mut VecDeque<(PackedPlace, Unpacked)>, place: PackedPlace) -> Option<Unpacked> {
    let at = last.iter().position(|(other, _)| *other == place)?;
    let found = last.remove(at)?;
    let unpacked = Arc::clone(&found.1);
    last.push_front(found);
    Some(unpacked)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 64 << 10;

    fn place(number: u64) -> PackedPlace {
        let guest = ByteRange::between(number * SIZE, (number + 1) * SIZE);
        PackedPlace { guest, host: ByteRange::between(number * 100, number * 100 + 99) }
    }

    #[test]
    fn the_last_ones_are_kept() {
        let clusters = UnpackedClusters::new(SIZE);
        for number in 0..MAX_CLUSTERS {
            clusters.find_or_add(place(number));
        }
        assert!(clusters.find(place(0)).is_some(), "used again, it is the last one");
        clusters.find_or_add(place(MAX_CLUSTERS));
        assert!(clusters.find(place(0)).is_some() && clusters.find(place(1)).is_none());
    }

    #[test]
    fn changed_ones_are_forgotten() {
        let clusters = UnpackedClusters::new(SIZE);
        clusters.forget(place(1).guest);
        for number in 0..3 {
            clusters.find_or_add(place(number));
        }
        clusters.forget(ByteRange::between(SIZE + 1, SIZE + 2));
        let is_there = |number| clusters.find(place(number)).is_some();
        assert_eq!([0, 1, 2].map(is_there), [true, false, true]);
        let moved = PackedPlace { host: place(7).host, ..place(0) };
        assert!(clusters.find(moved).is_none(), "the same cluster at another place");
    }
}
