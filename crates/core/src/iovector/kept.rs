//! Memory of a request that may have to be submitted again.
//!
//! Guarantee: two vectors never have the same bytes at the same time. A [`KeptVector`] accesses no
//! byte itself. It lends all bytes again only after the vector that it lent before, and all parts
//! of that vector, were dropped.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use smallvec::SmallVec;

use super::{IoVector, KernelPages, Segment};

/// The bytes of an [`IoVector`], kept after the vector is dropped. See [`IoVector::keep`].
pub struct KeptVector(Arc<Kept>);

/// The owner of the bytes, shared with each vector that was lent: while a part of such a vector
/// exists, the `Arc` has more than one reference.
struct Kept {
    /// Dropped before the owner, as in [`IoVector`].
    pages: Option<Arc<KernelPages>>,
    /// Keeps the bytes alive.
    _owner: Arc<dyn Any + Send + Sync>,
    segments: SmallVec<[Segment; 2]>,
    length: usize,
    lost: Option<NonNull<AtomicBool>>,
}

// SAFETY: as for `IoVector`: the owner is `Send + Sync`, and `lost` is an atomic that the owner
// keeps. The bytes are accessed by the one vector that is lent, never through this.
unsafe impl Send for Kept {}
// SAFETY: as above; a shared `Kept` gives no access to the bytes.
unsafe impl Sync for Kept {}

impl IoVector {
    /// Returns a vector of the same bytes, and a [`KeptVector`] that lends them again after that
    /// vector is dropped. The memory returns to its lender when both are dropped.
    #[must_use]
    pub fn keep(self) -> (Self, KeptVector) {
        self.leave_pages_of_read();
        let Self { owner, segments, length, lost, pages } = self;
        let kept = KeptVector(Arc::new(Kept { _owner: owner, segments, length, lost, pages }));
        (kept.vector(), kept)
    }
}

impl KeptVector {
    /// All bytes of the kept vector; `None` while any part of the last loan exists, because an
    /// operation may use it.
    pub fn lend(&mut self) -> Option<IoVector> {
        // `get_mut` sees all other references, also those on other threads, and is ordered after
        // all accesses that they made before they were dropped.
        Arc::get_mut(&mut self.0)?;
        Some(self.vector())
    }

    fn vector(&self) -> IoVector {
        let Kept { segments, length, lost, pages, .. } = &*self.0;
        IoVector {
            owner: Arc::clone(&self.0) as _,
            segments: segments.clone(),
            length: *length,
            lost: *lost,
            pages: pages.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Buffer, IoVector};

    fn bytes(vector: &IoVector) -> Vec<u8> {
        let mut bytes = vec![0; vector.len()];
        vector.copy_to(&mut bytes);
        bytes
    }

    #[test]
    fn what_is_kept_is_lent_again_when_all_parts_are_gone() {
        let mut buffer = Buffer::new(8);
        buffer.bytes_mut().copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        let (mut first, mut kept) = buffer.lend().keep();
        let rest = first.split_off(3);
        first.advance(2);
        drop(first);
        assert!(kept.lend().is_none(), "a part of it exists");
        drop(rest);
        let again = kept.lend().expect("nothing of it exists");
        assert_eq!(bytes(&again), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(kept.lend().is_none());
        drop(again);
        assert!(buffer.is_lent(), "it is kept");
        drop(kept);
        assert_eq!(buffer.bytes().len(), 8);
    }

    #[test]
    fn a_vector_outlives_the_one_that_keeps_it() {
        let mut buffer = Buffer::new(4);
        let (vector, kept) = buffer.lend().keep();
        drop(kept);
        assert_eq!(bytes(&vector), [0; 4]);
        assert!(buffer.is_lent());
        drop(vector);
        assert!(!buffer.is_lent());
    }
}
