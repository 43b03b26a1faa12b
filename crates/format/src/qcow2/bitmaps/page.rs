//! One page of a live bitmap: its bits in memory, the bits that must be on disk, and the bits that
//! are durable on disk.
//!
//! On disk, all bits that are set in memory must be set, and also all bits of each *active* extent
//! (a group of consecutive bits). An extent becomes active before the first change in it; then the
//! page is written, durably, before the change is made. Further changes in an active extent set
//! bits in memory only.
//!
//! Invariant: a bit that is set in memory must be set on disk. Whenever further bits must be set on
//! disk, the page gets a new version.

use std::ops::Range;

use super::bits::{all_set, set_bits};
use super::number_map::NumberMap;

/// A page of a live bitmap. See the module's documentation.
pub(super) struct Page {
    bits: Vec<u8>,
    /// Active extents, by their number in the page.
    active: NumberMap<Active>,
    /// The version of the content that must be on disk.
    version: u64,
    /// The version that is durable on disk.
    durable: u64,
    /// Whether a write of the page is in flight.
    is_writing: bool,
    /// Whether the future of a write of the page was dropped, so that the write may still be in
    /// flight.
    was_dropped: bool,
    /// Whether excess bits may be set on disk, in extents that are no longer active.
    is_stale: bool,
}

/// An active extent.
struct Active {
    /// The version of the page with which the extent became active.
    version: u64,
    /// Whether the extent was changed since the last attempt to make it inactive.
    is_used: bool,
}

/// The step that is needed between [`Page::mark`] and the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marked {
    /// No step, because the bits are set on disk already.
    Durable,
    /// The page has to be durable up to this version.
    Needs(u64),
    /// As `Needs`, and the extent has just become active.
    Activated(u64),
}

impl Page {
    /// A page with these bits, which are durable on disk.
    pub(super) fn new(bits: Vec<u8>) -> Self {
        Self {
            bits,
            active: NumberMap::default(),
            version: 0,
            durable: 0,
            is_writing: false,
            was_dropped: false,
            is_stale: false,
        }
    }

    /// The bits in memory.
    pub(super) fn bits(&self) -> &[u8] {
        &self.bits
    }

    /// Sets bits that all lie in the extent with this number, which has `extent_bits` bits.
    pub(super) fn mark(&mut self, extent: u64, extent_bits: u64, bits: Range<u64>) -> Marked {
        // The common case: if all these bits are set and durable, the extent need not be active.
        if self.version <= self.durable && all_set(&self.bits, bits.clone()) {
            return Marked::Durable;
        }
        if let Some(active) = self.active.get_mut(&extent) {
            active.is_used = true;
            let version = active.version;
            set_bits(&mut self.bits, bits);
            return if version <= self.durable { Marked::Durable } else { Marked::Needs(version) };
        }
        if all_set(&self.bits, bits.clone()) {
            return Marked::Durable;
        }
        set_bits(&mut self.bits, bits);
        self.version += 1;
        let version = self.version;
        self.active.insert(extent, Active { version, is_used: extent_bits > 1 });
        Marked::Activated(version)
    }

    /// The content to write to disk, and its version.
    pub(super) fn content(&self, extent_bits: u64) -> (Vec<u8>, u64) {
        let mut bytes = self.bits.clone();
        for &extent in self.active.keys() {
            set_bits(&mut bytes, extent * extent_bits..(extent + 1) * extent_bits);
        }
        (bytes, self.version)
    }

    /// Makes an extent inactive, if its bits are durable on disk, and it was not changed since the
    /// last call. Returns whether the extent is inactive.
    pub(super) fn rest(&mut self, extent: u64, extent_bits: u64) -> bool {
        let Some(active) = self.active.get_mut(&extent) else { return true };
        let bits = extent * extent_bits..(extent + 1) * extent_bits;
        if active.version > self.durable || std::mem::take(&mut active.is_used) {
            return false;
        }
        self.active.remove(&extent);
        self.is_stale |= !all_set(&self.bits, bits);
        true
    }

    /// The bits, if excess bits may be set on disk; else `None`.
    pub(super) fn into_inexact(self) -> Option<Vec<u8>> {
        (self.is_stale || !self.active.is_empty()).then_some(self.bits)
    }

    /// Whether bits may be set on disk in excess, in inactive extents.
    pub(super) fn is_stale(&self) -> bool {
        self.is_stale
    }

    pub(super) fn is_durable(&self, version: u64) -> bool {
        self.durable >= version
    }

    pub(super) fn is_writing(&self) -> bool {
        self.is_writing
    }

    /// Begins a write of [`content`](Self::content). Returns whether an earlier write may still be
    /// in flight: the caller must wait for its end first.
    pub(super) fn begin_write(&mut self) -> bool {
        self.is_writing = true;
        self.was_dropped
    }

    /// Called when no earlier write is in flight, just before [`content`](Self::content) is taken.
    pub(super) fn begin_content(&mut self) {
        self.was_dropped = false;
        self.is_stale = false;
    }

    /// Records how a write of the page ended.
    pub(super) fn end_write(&mut self, end: WriteEnd) {
        self.is_writing = false;
        match end {
            WriteEnd::Durable(version) => self.durable = self.durable.max(version),
            WriteEnd::Written => {}
            WriteEnd::Failed => self.is_stale = true,
            WriteEnd::Dropped => {
                self.is_stale = true;
                self.was_dropped = true;
            }
        }
    }
}

/// How a write of a page ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteEnd {
    /// The content of this version is durable.
    Durable(u64),
    /// The content is durable with the next flush.
    Written,
    Failed,
    /// The future of the write was dropped.
    Dropped,
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: u64 = 8;

    fn write(page: &mut Page) -> Vec<u8> {
        assert!(!page.begin_write());
        page.begin_content();
        let (bytes, version) = page.content(EXTENT);
        page.end_write(WriteEnd::Durable(version));
        bytes
    }

    #[test]
    fn the_disk_says_all_of_an_extent_before_a_change_in_it() {
        let mut page = Page::new(vec![0; 4]);
        assert_eq!(page.mark(1, EXTENT, 9..10), Marked::Activated(1));
        assert_eq!(page.mark(1, EXTENT, 10..11), Marked::Needs(1));
        assert_eq!(page.mark(2, EXTENT, 16..24), Marked::Activated(2));
        assert_eq!(write(&mut page), [0, 0xff, 0xff, 0]);
        assert_eq!(page.mark(1, EXTENT, 12..13), Marked::Durable);
        assert_eq!(page.bits(), [0, 0b1_0110, 0xff, 0]);
    }

    #[test]
    fn an_extent_that_rests_is_marked_anew_where_a_bit_is_not_set() {
        let mut page = Page::new(vec![0; 4]);
        page.mark(1, EXTENT, 9..10);
        assert!(!page.rest(1, EXTENT), "the disk does not say it yet");
        write(&mut page);
        assert!(!page.rest(1, EXTENT) && page.rest(1, EXTENT), "at the second look");
        assert!(page.is_stale());
        assert_eq!(page.mark(1, EXTENT, 9..10), Marked::Durable, "its bit is set");
        assert_eq!(write(&mut page), [0, 0b10, 0, 0]);
        assert!(!page.is_stale());
        assert_eq!(page.mark(1, EXTENT, 10..11), Marked::Activated(2));
    }

    #[test]
    fn a_page_whose_write_was_dropped_is_written_again() {
        let mut page = Page::new(vec![0; 4]);
        page.mark(0, EXTENT, 0..1);
        page.begin_write();
        page.begin_content();
        page.end_write(WriteEnd::Dropped);
        assert!(!page.is_durable(1) && page.is_stale());
        assert!(page.begin_write(), "the dropped one may be in flight");
    }
}
