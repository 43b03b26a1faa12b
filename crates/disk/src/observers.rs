//! Who is told which parts of a disk change: jobs that copy it, bitmaps.
//!
//! Guarantees: an observer that is attached while the disk is quiesced is told of every change that is made from then
//! on, whatever its outcome, and before the change counts as ended: when the disk is quiesced again, the observer has
//! been told of all of them. A disk without observers pays one relaxed load for each change.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::ByteRange;
use parking_lot::RwLock;
use smallvec::SmallVec;

/// What a request waits for before it is answered.
pub type ChangeWait = Pin<Box<dyn Future<Output = ()>>>;

/// Is told of changes of a disk: [`Disk::observe`](crate::Disk::observe).
pub trait ChangeObserver: Send + Sync {
    /// A write, zero write or discard of `range` was carried out, and is not answered yet. A future that is returned is
    /// awaited before it is; the change counts as ended meanwhile.
    fn completed(&self, range: ByteRange) -> Option<ChangeWait>;

    /// A change of `range` failed, or its future was dropped: the range may hold anything.
    fn abandoned(&self, range: ByteRange);
}

type List = SmallVec<[Arc<dyn ChangeObserver>; 1]>;

/// The observers of a disk.
#[derive(Default)]
pub(crate) struct Observers {
    is_any: AtomicBool,
    list: RwLock<List>,
}

/// A change in flight that observers are going to be told of; of a dropped one, that it was abandoned.
pub(crate) struct ObservedChange {
    observers: List,
    range: ByteRange,
}

impl Observers {
    /// Adds one. No change may be in flight.
    pub(crate) fn attach(&self, observer: Arc<dyn ChangeObserver>) {
        let mut list = self.list.write();
        list.push(observer);
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Removes one. It is still told of the changes that are in flight.
    pub(crate) fn detach(&self, observer: &Arc<dyn ChangeObserver>) {
        let mut list = self.list.write();
        list.retain(|other| !std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(observer)));
        self.is_any.store(!list.is_empty(), Ordering::SeqCst);
    }

    /// A change of `length` bytes from `offset` on begins, of a disk that is not quiesced.
    pub(crate) fn begin(&self, offset: u64, length: u64) -> Option<Box<ObservedChange>> {
        if !self.is_any.load(Ordering::Relaxed) {
            return None;
        }
        // One past the end of all disks is refused later.
        let range = ByteRange::new(offset, length)?;
        let observers = self.list.read().clone();
        Some(Box::new(ObservedChange { observers, range }))
    }
}

impl ObservedChange {
    /// The change was carried out: tells the observers. What they wait for.
    pub(crate) fn complete(mut self) -> Vec<ChangeWait> {
        let observers = std::mem::take(&mut self.observers);
        observers.iter().filter_map(|observer| observer.completed(self.range)).collect()
    }
}

impl Drop for ObservedChange {
    fn drop(&mut self) {
        self.observers.iter().for_each(|observer| observer.abandoned(self.range));
    }
}
