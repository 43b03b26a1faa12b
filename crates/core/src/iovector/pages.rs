//! A request's bytes in pages that the kernel has registered with a ring, and that this process
//! cannot address.
//!
//! A request that comes from the kernel has its bytes in pages of the kernel. A ring can move them
//! between those pages and a file without a copy, by the number of a slot. Everything else needs
//! them in memory. So a vector of memory may refer to such pages: then the memory has the bytes
//! only after the vector has *left* the pages.
//!
//! Guarantee: no function of [`IoVector`] gives access to memory whose bytes are in the pages. Each
//! makes the vector leave them first: it copies the bytes of a write into the memory, and records
//! that the memory gets the bytes of a read. So code that does not know of pages is correct.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use super::{IoVector, Segment};

/// The value of [`KernelPages::boundary`] while no byte is in the memory.
const NONE_IN_MEMORY: usize = usize::MAX;

/// The direction in which a request's bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageUse {
    /// The request is a read, which fills the pages.
    Filled,
    /// The request is a write: the pages have its bytes.
    Stored,
}

/// Copies the first bytes of the pages into memory; returns whether it could copy all of them.
type CopyOut = dyn Fn(&mut [u8]) -> bool + Send + std::marker::Sync;

/// The kernel's pages of one request after the other.
pub struct KernelPages {
    /// The ring with which the kernel registers the pages, and their slot there.
    slot: Option<(usize, u16)>,
    copy_out: Box<CopyOut>,
    is_stored: AtomicBool,
    /// The memory has the bytes of the request from this one on; the pages have those before it.
    boundary: AtomicUsize,
    /// Whether the bytes of a write could not be copied.
    is_lost: AtomicBool,
}

impl KernelPages {
    /// Pages that the kernel registers in this slot of a ring, which is identified by a number of
    /// the caller's; without a slot the vectors always leave the pages. `copy_out` copies the first
    /// bytes of a write into memory, and returns whether it could copy all of them.
    pub fn new(
        slot: Option<(usize, u16)>,
        copy_out: impl Fn(&mut [u8]) -> bool + Send + std::marker::Sync + 'static,
    ) -> Self {
        Self {
            slot,
            copy_out: Box::new(copy_out),
            is_stored: AtomicBool::new(false),
            boundary: AtomicUsize::new(NONE_IN_MEMORY),
            is_lost: AtomicBool::new(false),
        }
    }

    /// How many of a read's first bytes are in the pages, if others are in the memory of its
    /// vector: the lender of that memory stores them in the pages. `None` if all bytes are in the
    /// pages.
    pub fn filled(&self) -> Option<usize> {
        let boundary = self.boundary.load(Relaxed);
        (boundary != NONE_IN_MEMORY).then_some(boundary)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Relaxed)
    }
}

impl IoVector {
    /// The same vector for a request whose bytes are in `pages`, which nothing else refers to: the
    /// vectors of the request before are dropped.
    ///
    /// # Panics
    /// If the vector has several segments or is not of private memory, or if there is another
    /// reference to `pages`.
    #[must_use]
    pub fn in_pages(self, pages: &Arc<KernelPages>, page_use: PageUse) -> Self {
        let is_private = self.lost.is_none() && self.pages.is_none();
        assert!(self.segments.len() <= 1 && is_private, "pages for one piece of private memory");
        assert_eq!(Arc::strong_count(pages), 1, "pages of a request that has not ended");
        pages.is_stored.store(page_use == PageUse::Stored, Relaxed);
        pages.is_lost.store(false, Relaxed);
        pages.boundary.store(NONE_IN_MEMORY, Relaxed);
        Self { pages: Some(Arc::clone(pages)), ..self }
    }

    /// The slot of the ring that has all bytes of the vector, from the slot's beginning on. `None`
    /// if they are in memory, or in a slot of another ring.
    #[inline]
    pub fn slot_of_pages(&self, ring: usize) -> Option<u16> {
        let pages = self.pages.as_ref().filter(|pages| pages.filled().is_none())?;
        pages.slot.filter(|(of, _)| *of == ring).map(|(_, slot)| slot)
    }

    /// Makes the bytes be in memory from now on. Returns whether they were in the kernel's pages.
    pub fn leave_pages(&self) -> bool {
        let were_there = self.pages.as_ref().is_some_and(|pages| pages.filled().is_none());
        self.is_in_memory();
        were_there
    }

    /// Makes the bytes be in memory. Returns false if the memory cannot have them: the bytes of a
    /// write could not be copied.
    #[inline]
    pub(super) fn is_in_memory(&self) -> bool {
        let Some(pages) = &self.pages else { return true };
        if pages.filled().is_none() {
            self.copy_from_pages(pages);
        }
        !pages.is_lost()
    }

    #[cold]
    fn copy_from_pages(&self, pages: &KernelPages) {
        pages.boundary.store(0, Relaxed);
        if let (true, Some(&Segment { address, length })) =
            (pages.is_stored.load(Relaxed), self.segments.first())
        {
            // SAFETY: the segment is valid for writes (`from_raw`), and this vector is the only
            // view of its bytes, which are private (`in_pages`). A vector is used by one thread at
            // a time.
            let memory = unsafe { std::slice::from_raw_parts_mut(address.as_ptr(), length) };
            pages.is_lost.store(!(pages.copy_out)(memory), Relaxed);
        }
    }

    /// Records that the first `count` bytes are dealt with. A read has filled them in the pages,
    /// and the memory gets the others.
    pub(super) fn pass_in_pages(&self, count: usize) {
        match &self.pages {
            Some(pages) if pages.filled().is_none() && !pages.is_stored.load(Relaxed) => {
                pages.boundary.store(count, Relaxed);
            }
            _ => drop(self.is_in_memory()),
        }
    }

    /// Makes a read's bytes be in memory, so that they can be read there afterwards.
    pub(super) fn leave_pages_of_read(&self) {
        if self.pages.as_ref().is_some_and(|pages| !pages.is_stored.load(Relaxed)) {
            self.is_in_memory();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    /// The ring and the slot of the pages.
    const PLACE: (usize, u16) = (7, 3);

    /// Pages with the bytes 9; copying them fails if `can_copy` is false.
    fn pages(can_copy: bool) -> Arc<KernelPages> {
        let copy_out = move |memory: &mut [u8]| {
            memory.fill(9);
            can_copy
        };
        Arc::new(KernelPages::new(Some(PLACE), copy_out))
    }

    fn bytes(vector: &IoVector) -> Vec<u8> {
        let mut bytes = vec![0; vector.len()];
        vector.copy_to(&mut bytes);
        bytes
    }

    /// Uses of a vector that reach its bytes, or take the whole apart.
    const USES: &[fn(IoVector) -> IoVector] = &[
        |vector| {
            assert_eq!(vector.segments().len(), 1);
            vector
        },
        |mut vector| {
            let rest = vector.split_off(3);
            vector.chain(rest)
        },
        |vector| vector.keep().0,
        |vector| {
            assert!(vector.leave_pages());
            vector
        },
        |vector| {
            vector.is_zero();
            vector
        },
        |vector| {
            bytes(&vector);
            vector
        },
    ];

    #[test]
    fn bytes_stay_in_the_pages_until_they_are_needed() {
        let (mut buffer, pages) = (Buffer::new(8), pages(true));
        let vector = buffer.lend().in_pages(&pages, PageUse::Stored).with_guard(());
        assert!(vector.is_intact() && vector.is_aligned(4096, 1) && vector.len() == 8);
        assert_eq!(vector.slot_of_pages(7), Some(3));
        assert_eq!(vector.slot_of_pages(8), None, "another ring");
        drop(vector);
        assert_eq!((pages.filled(), buffer.bytes()), (None, &[0; 8][..]));
    }

    #[test]
    fn each_use_of_a_write_finds_the_bytes_in_memory() {
        for (number, use_of) in USES.iter().enumerate() {
            let (mut buffer, pages) = (Buffer::new(8), pages(true));
            let vector = use_of(buffer.lend().in_pages(&pages, PageUse::Stored));
            // A use that only keeps the vector need not copy.
            assert_eq!(bytes(&vector), [9; 8], "use {number}");
            assert_eq!(vector.slot_of_pages(7), None, "use {number}");
            assert!(vector.is_intact() && !vector.leave_pages());
        }
    }

    #[test]
    fn each_use_of_a_read_makes_the_memory_its_place() {
        for (number, use_of) in USES.iter().enumerate() {
            let (mut buffer, pages) = (Buffer::new(8), pages(true));
            let mut vector = use_of(buffer.lend().in_pages(&pages, PageUse::Filled));
            assert_eq!(vector.slot_of_pages(7), None, "use {number}");
            vector.fill(5);
            drop(vector);
            assert_eq!((pages.filled(), buffer.bytes()), (Some(0), &[5; 8][..]), "use {number}");
        }
    }

    #[test]
    fn the_rest_of_a_read_that_ended_early_goes_to_memory() {
        let (mut buffer, pages) = (Buffer::new(8), pages(true));
        let mut vector = buffer.lend().in_pages(&pages, PageUse::Filled);
        vector.advance(3);
        assert_eq!(vector.slot_of_pages(7), None);
        vector.fill(5);
        drop(vector);
        assert_eq!((pages.filled(), &buffer.bytes()[3..]), (Some(3), &[5; 5][..]));
        // The next request is in the pages again.
        let vector = buffer.lend().in_pages(&pages, PageUse::Filled);
        assert_eq!((vector.slot_of_pages(7), pages.filled()), (Some(3), None));
    }

    #[test]
    fn the_rest_of_a_write_that_ended_early_is_in_memory() {
        let (mut buffer, pages) = (Buffer::new(8), pages(true));
        let mut vector = buffer.lend().in_pages(&pages, PageUse::Stored);
        vector.advance(3);
        assert_eq!((vector.slot_of_pages(7), bytes(&vector)), (None, vec![9; 5]));
    }

    #[test]
    fn a_write_whose_bytes_are_lost_has_no_segments_in_any_part() {
        let (mut buffer, pages) = (Buffer::new(8), pages(false));
        let mut vector = buffer.lend().in_pages(&pages, PageUse::Stored);
        assert!(vector.is_intact());
        let rest = vector.split_off(3);
        for part in [vector, rest] {
            assert!(!part.is_intact() && part.check_intact().is_err());
            assert!(part.segments().is_empty());
            assert!(bytes(&part).iter().all(|byte| *byte == 0));
            let in_memory = Buffer::new(8).lend().in_pages(&self::pages(true), PageUse::Stored);
            let joined = in_memory.chain(part).chain(Buffer::new(8).lend());
            assert!(joined.segments().is_empty() && !joined.is_intact() && joined.is_shared());
        }
    }

    #[test]
    #[should_panic(expected = "one piece of private memory")]
    fn several_segments_are_never_in_pages() {
        let vector = Buffer::new(8).lend().chain(Buffer::new(8).lend());
        let _ = vector.in_pages(&pages(true), PageUse::Stored);
    }

    #[test]
    #[should_panic(expected = "has not ended")]
    fn pages_have_one_request_at_a_time() {
        let pages = pages(true);
        let _first = Buffer::new(8).lend().in_pages(&pages, PageUse::Stored);
        let _ = Buffer::new(8).lend().in_pages(&pages, PageUse::Stored);
    }

    #[test]
    fn without_a_slot_all_bytes_go_by_memory() {
        let mut buffer = Buffer::new(8);
        let pages = Arc::new(KernelPages::new(None, |_: &mut [u8]| true));
        let vector = buffer.lend().in_pages(&pages, PageUse::Stored);
        assert_eq!(vector.slot_of_pages(7), None);
    }
}
