//! The observers of a disk's changes: jobs that copy the disk, and bitmaps in memory.
//!
//! Guarantees: an observer that is attached while the disk is quiesced is called at the begin and
//! the end of every later change, whether the change succeeds or fails. A change counts as ended
//! only after the call at its end. So when the disk is quiesced again, the observer has received
//! the ends of all changes. The observer gets the same bytes of a write as the disk, even if a
//! guest changes its memory meanwhile. For a disk without observers, each write costs three relaxed
//! loads.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::{Buffer, ByteRange, IoVector, Result};
use parking_lot::RwLock;
use smallvec::SmallVec;

/// A future that a request awaits before its change begins, or before it is answered.
pub type ChangeWait = Pin<Box<dyn Future<Output = ()>>>;

/// An observer's ID of a change, valid from the begin of the change to its end.
pub type ChangeId = u64;

/// The maximum length of a write whose bytes observers receive. The bytes are copied if a guest
/// shares the memory.
pub const MAX_OBSERVED_BYTES: u64 = 256 << 10;

/// Receives the changes of a disk: [`DiskJobs::observe`](crate::DiskJobs::observe).
pub trait ChangeObserver: Send + Sync {
    /// Whether the observer wants the bytes of writes now.
    fn wants_bytes(&self) -> bool {
        false
    }

    /// Whether it is forbidden to take, delete or rename snapshots while this observer is attached.
    /// Reason: another image is about to replace the disk's image, and would lack such changes.
    fn forbids_snapshots(&self) -> bool {
        false
    }

    /// A change of `range`, which may be past the end of the disk, is about to begin. If a future
    /// is returned, the change begins after it. While the future is awaited, the change counts as
    /// in flight.
    fn hold_off(&self, _range: ByteRange) -> Option<ChangeWait> {
        None
    }

    /// A change of `range`, which may be past the end of the disk, begins: no part of the change is
    /// done yet. `bytes` are the bytes of a write of at most [`MAX_OBSERVED_BYTES`], if they are
    /// [wanted](Self::wants_bytes); the observer copies them before it returns. The returned ID is
    /// passed back at the end of the change.
    fn begins(&self, range: ByteRange, bytes: Option<&IoVector>) -> ChangeId;

    /// The change has succeeded, and is not answered yet. If a future is returned, it is awaited
    /// before the answer; the change already counts as ended.
    fn completed(&self, change: ChangeId, range: ByteRange) -> Option<ChangeWait>;

    /// The change failed, or its future was dropped: the range may hold anything.
    fn abandoned(&self, change: ChangeId, range: ByteRange);
}

type List = SmallVec<[Arc<dyn ChangeObserver>; 1]>;

/// The observers of a disk.
#[derive(Default)]
pub(crate) struct Observers {
    is_any: AtomicBool,
    list: RwLock<List>,
}

/// A change in flight whose end is reported to observers. If this is dropped, the change is
/// reported as abandoned.
pub(crate) struct ObservedChange {
    observers: SmallVec<[(Arc<dyn ChangeObserver>, ChangeId); 1]>,
    range: ByteRange,
}

impl Observers {
    /// Attaches an observer. No change may be in flight.
    pub(crate) fn attach(&self, observer: Arc<dyn ChangeObserver>) {
        let mut list = self.list.write();
        list.push(observer);
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Detaches an observer. It still receives the ends of changes in flight.
    pub(crate) fn detach(&self, observer: &Arc<dyn ChangeObserver>) {
        let mut list = self.list.write();
        list.retain(|other| !std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(observer)));
        self.is_any.store(!list.is_empty(), Ordering::SeqCst);
    }

    /// Whether any observer forbids snapshots.
    pub(crate) fn forbid_snapshots(&self) -> bool {
        self.list.read().iter().any(|observer| observer.forbids_snapshots())
    }

    /// Whether an observer wants the bytes of a write of `length` bytes that begins now. Always
    /// false for more than [`MAX_OBSERVED_BYTES`].
    pub(crate) fn want_bytes(&self, length: u64) -> bool {
        self.is_any.load(Ordering::Relaxed)
            && length <= MAX_OBSERVED_BYTES
            && self.list.read().iter().any(|observer| observer.wants_bytes())
    }

    /// The futures that a change of `length` bytes from `offset` on awaits before it begins. The
    /// disk is not quiesced.
    pub(crate) fn hold_off(&self, offset: u64, length: u64) -> SmallVec<[ChangeWait; 1]> {
        match ByteRange::new(offset, length) {
            Some(range) if self.is_any.load(Ordering::Relaxed) => {
                self.list.read().iter().filter_map(|one| one.hold_off(range)).collect()
            }
            _ => SmallVec::new(),
        }
    }

    /// Reports the begin of a change of `length` bytes from `offset` on. The disk is not quiesced.
    pub(crate) fn begin(
        &self,
        offset: u64,
        length: u64,
        bytes: Option<&IoVector>,
    ) -> Option<Box<ObservedChange>> {
        if !self.is_any.load(Ordering::Relaxed) {
            return None;
        }
        // A range that ends beyond 64-bit offsets is refused later.
        let range = ByteRange::new(offset, length)?;
        let list = self.list.read();
        let begin = |one: &Arc<dyn ChangeObserver>| (Arc::clone(one), one.begins(range, bytes));
        let observers = list.iter().map(begin).collect();
        Some(Box::new(ObservedChange { observers, range }))
    }
}

impl ObservedChange {
    /// Reports to the observers that the change has succeeded. Returns the futures to await.
    pub(crate) fn complete(mut self) -> Vec<ChangeWait> {
        let observers = std::mem::take(&mut self.observers);
        observers.iter().filter_map(|(one, change)| one.completed(*change, self.range)).collect()
    }
}

impl Drop for ObservedChange {
    fn drop(&mut self) {
        self.observers.iter().for_each(|(one, change)| one.abandoned(*change, self.range));
    }
}

/// The bytes of a write in private memory, so that every reader gets the same bytes.
///
/// # Errors
/// ENOMEM; EFAULT if the guest's memory is lost, or the bytes cannot be copied from the kernel's
/// pages.
pub(crate) fn private_copy(from: IoVector) -> Result<IoVector> {
    if !from.is_shared() {
        from.leave_pages();
        from.check_intact()?;
        return Ok(from);
    }
    let mut buffer = Buffer::try_new(from.len())?;
    from.copy_to(buffer.bytes_mut());
    from.check_intact()?;
    Ok(buffer.lend())
}

#[cfg(test)]
mod tests {
    use blockhouse_core::{KernelPages, PageUse};

    use super::*;

    #[test]
    fn bytes_that_cannot_be_copied_from_the_kernels_pages_reach_no_observer() {
        for can_copy in [true, false] {
            let pages = Arc::new(KernelPages::new(None, move |_: &mut [u8]| can_copy));
            let mut buffer = Buffer::new(8);
            let copied = private_copy(buffer.lend().in_pages(&pages, PageUse::Stored));
            assert_eq!(copied.is_ok(), can_copy);
        }
    }
}
