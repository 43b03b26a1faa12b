//! Changes of a file that are only in memory, from a log that was not replayed on disk. Reads of
//! metadata apply them.
//!
//! Guarantees: at most [`MAX_PAGES`] pages and [`MAX_ZEROS`] ranges of zeros.

use std::collections::BTreeMap;

use blockhouse_core::{Buffer, ByteRange, Durability, ErrorKind, Result, Storage, Unmap};

use super::refusal::unsupported;
use crate::aligned_read::read;
use crate::aligned_write::write;

/// Bytes of a page, the unit of changes.
pub(super) const PAGE: usize = 4096;

/// Maximum number of pages in memory, which take 32 MiB.
const MAX_PAGES: usize = 8192;
/// Bytes of zeros in one write.
const ZEROS_AT_ONCE: usize = 1 << 20;
/// Maximum number of ranges of zeros in memory.
const MAX_ZEROS: usize = 4096;

/// The changes; empty by default.
#[derive(Default)]
pub(super) struct Patches {
    /// Changed pages by their offsets, multiples of [`PAGE`].
    pages: BTreeMap<u64, Box<[u8; PAGE]>>,
    /// Ranges that became zeros before the pages in them were written.
    zeros: Vec<ByteRange>,
    /// The minimum size of the file in bytes.
    file_size: u64,
}

impl Patches {
    /// Adds a page. `place` is the offset in the log at which the change was found.
    ///
    /// # Errors
    /// `Unsupported` for too many changes.
    pub(super) fn write(&mut self, offset: u64, page: Box<[u8; PAGE]>, place: u64) -> Result<()> {
        if self.pages.len() == MAX_PAGES && !self.pages.contains_key(&offset) {
            return Err(unsupported("a log with more than 32 MiB of changes", place));
        }
        self.pages.insert(offset, page);
        Ok(())
    }

    /// Zeroes a range of whole pages.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn zero(&mut self, range: ByteRange, place: u64) -> Result<()> {
        if self.zeros.len() == MAX_ZEROS {
            return Err(unsupported("a log with too many ranges of zeros", place));
        }
        self.pages.retain(|&offset, _| !(range.offset()..range.end()).contains(&offset));
        self.zeros.push(range);
        Ok(())
    }

    /// Raises the minimum size of the file to `size`.
    pub(super) fn extend_file(&mut self, size: u64) {
        self.file_size = self.file_size.max(size);
    }

    /// The size of the changed file; `size` is the size of the file on the host.
    pub(super) fn file_size(&self, size: u64) -> u64 {
        self.file_size.max(size)
    }

    /// Whether any byte of `range` is changed.
    pub(super) fn overlaps(&self, range: ByteRange) -> bool {
        let before = range.offset().saturating_sub(PAGE as u64 - 1);
        self.pages.range(before..range.end()).next().is_some()
            || self.zeros.iter().any(|zeros| zeros.overlaps(range))
    }

    /// As [`read`], with the changes applied.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(super) async fn read<S: Storage>(
        &self,
        storage: &S,
        offset: u64,
        length: usize,
    ) -> Result<Vec<u8>> {
        let mut bytes = read(storage, offset, length).await?;
        self.apply(offset, &mut bytes);
        Ok(bytes)
    }

    /// Whether one of the changes is before `offset`.
    pub(super) fn change_before(&self, offset: u64) -> bool {
        let zeros = self.zeros.iter().map(|range| range.offset());
        zeros.chain(self.pages.keys().copied()).any(|start| start < offset)
    }

    /// Applies the changes to the file, and makes it as long as the log states. The changes are not
    /// durable before the next flush.
    ///
    /// # Errors
    /// `Unsupported` if the storage's blocks are larger than pages: nothing has changed. Errors of
    /// the storage; some changes may have been made.
    pub(super) async fn write_to<S: Storage>(&self, storage: &S) -> Result<()> {
        if storage.capabilities().alignment.offset as usize > PAGE {
            let what = "a log of pages of 4 KiB in a storage of larger blocks";
            return Err(unsupported(what, 0));
        }
        let size = storage.size();
        if self.file_size > size {
            storage.resize(self.file_size).await?;
        }
        for range in &self.zeros {
            // Bytes past the old end of the file are zeros already.
            let inside = range.truncate(size.saturating_sub(range.offset()));
            if !inside.is_empty() {
                write_zeroes(storage, inside).await?;
            }
        }
        for (&offset, page) in &self.pages {
            write(storage, offset, &page[..], Durability::None).await?;
        }
        Ok(())
    }

    /// Applies the changes to bytes that were read from `offset` on.
    pub(super) fn apply(&self, offset: u64, bytes: &mut [u8]) {
        let range = ByteRange::between(offset, offset + bytes.len() as u64);
        for zeros in &self.zeros {
            let (_, inner) = common(range, *zeros);
            bytes[inner].fill(0);
        }
        let before = offset.saturating_sub(PAGE as u64 - 1);
        for (&start, page) in self.pages.range(before..range.end()) {
            let (outer, inner) = common(range, ByteRange::between(start, start + PAGE as u64));
            bytes[inner].copy_from_slice(&page[outer]);
        }
    }
}

/// Zeros a range of whole pages; writes zeros if the storage has no operation for it.
async fn write_zeroes<S: Storage>(storage: &S, range: ByteRange) -> Result<()> {
    match storage.write_zeroes(range, Unmap::Allowed).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {}
        done => return done,
    }
    let zeros = Buffer::new(ZEROS_AT_ONCE);
    let mut rest = range;
    while !rest.is_empty() {
        let part = rest.truncate(ZEROS_AT_ONCE as u64);
        let bytes = &zeros.bytes()[..part.length() as usize];
        write(storage, part.offset(), bytes, Durability::None).await?;
        rest = rest.skip(part.length());
    }
    Ok(())
}

/// The common part of both ranges: its positions in the second range, and in the first.
fn common(first: ByteRange, second: ByteRange) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
    let start = first.offset().max(second.offset());
    let end = first.end().min(second.end()).max(start);
    let within = |range: ByteRange| {
        let from = (start - range.offset()).min(range.length());
        from as usize..(from + (end - start)) as usize
    };
    (within(second), within(first))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn reads_see_the_changes_in_their_order(
            changes in prop::collection::vec((0..8u64, 0..4u64, any::<bool>()), 0..12),
            start in 0..30_000u64,
            length in 0..20_000usize,
        ) {
            const BYTES: u64 = PAGE as u64;
            let mut model = vec![9; 16 * PAGE];
            let mut patches = Patches::default();
            for (number, (page, count, is_zero)) in (1u8..).zip(changes) {
                let from = page as usize * PAGE;
                if is_zero {
                    let range = ByteRange::between(page * BYTES, (page + count) * BYTES);
                    patches.zero(range, 0).unwrap();
                    model[from..from + count as usize * PAGE].fill(0);
                } else {
                    patches.write(page * BYTES, Box::new([number; PAGE]), 0).unwrap();
                    model[from..from + PAGE].fill(number);
                }
            }
            let mut bytes = vec![9; length];
            patches.apply(start, &mut bytes);
            let expected = &model[start as usize..start as usize + length];
            prop_assert!(bytes == expected);
            let range = ByteRange::between(start, start + length as u64);
            if length > 0 && expected.iter().any(|&byte| byte != 9) {
                prop_assert!(patches.overlaps(range));
            }
        }
    }

    #[test]
    fn their_number_is_bounded() {
        let mut patches = Patches::default();
        let write = |patches: &mut Patches, page| {
            patches.write(page * PAGE as u64, Box::new([0; PAGE]), 77)
        };
        assert!((0..MAX_PAGES as u64).all(|page| write(&mut patches, page).is_ok()));
        let error = write(&mut patches, MAX_PAGES as u64).unwrap_err();
        assert!(error.to_string().contains("offset 77"), "{error}");
        assert!(write(&mut patches, 0).is_ok(), "a page that is there already");
        let range = ByteRange::between(0, PAGE as u64);
        assert!((0..MAX_ZEROS).all(|_| patches.zero(range, 77).is_ok()));
        assert!(patches.zero(range, 77).is_err());
    }
}
