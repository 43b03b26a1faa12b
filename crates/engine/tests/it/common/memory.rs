//! Memory for operations in as many segments as a test likes.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use blockhouse_core::{IoVector, Segment};

#[repr(C, align(4096))]
struct Page([AtomicU8; 4096]);

/// Page-aligned memory that operations may use.
#[derive(Clone)]
pub struct Memory {
    pages: Arc<Vec<Page>>,
    length: usize,
}

impl Memory {
    /// Zero bytes.
    pub fn new(length: usize) -> Self {
        let page = |_| Page([const { AtomicU8::new(0) }; 4096]);
        Self { pages: Arc::new((0..length.div_ceil(4096)).map(page).collect()), length }
    }

    pub fn with(bytes: &[u8]) -> Self {
        let memory = Self::new(bytes.len());
        for (place, &byte) in memory.places().zip(bytes) {
            place.store(byte, Relaxed);
        }
        memory
    }

    /// The content. To be called when no vector over it exists any longer.
    pub fn bytes(&self) -> Vec<u8> {
        assert_eq!(Arc::strong_count(&self.pages), 1, "an operation still has the memory");
        self.places().map(|byte| byte.load(Relaxed)).collect()
    }

    /// All of it, in segments of `piece` bytes. To be called once at a time.
    pub fn vector(&self, piece: usize) -> IoVector {
        let first = NonNull::from(&self.pages[0]).cast::<u8>();
        let segment = |start: usize| Segment {
            // SAFETY: `start` is less than the length, and the pages lie side by side.
            address: unsafe { first.add(start) },
            length: piece.min(self.length - start),
        };
        let segments: Vec<Segment> = (0..self.length).step_by(piece).map(segment).collect();
        // SAFETY: the bytes are interior-mutable and live as long as the Arc, and are not read
        // while the vector exists: `bytes` asserts it, and the caller has only this vector.
        unsafe { IoVector::from_raw(Arc::clone(&self.pages) as _, segments) }
    }

    fn places(&self) -> impl Iterator<Item = &AtomicU8> {
        self.pages.iter().flat_map(|page| &page.0).take(self.length)
    }
}
