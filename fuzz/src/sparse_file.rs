//! A file that is only read, for the targets of images that are never written: a few ranges with
//! bytes, and zeros.
//!
//! It holds callers to the contract of storages, as [`Memory`](crate::memory::Memory) does:
//! operations keep to the alignment, and nothing is written. Operations end at once: a reader of
//! such an image has one in flight, so there is no order to vary. A case costs no more than the
//! bytes that it has, however long the file is.

use std::cell::Cell;
use std::rc::Rc;

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, IoVector, Offload, Result, Storage,
    SyncMode, Unmap,
};
use blockhouse_sim::PLAIN_CAPABILITIES;

/// So many reads are more than any case needs.
const MAX_READS: u64 = 1 << 16;

/// A file. Clones are the same one.
#[derive(Clone)]
pub struct SparseFile(Rc<Shared>);

struct Shared {
    block: u32,
    size: u64,
    /// In the order of their offsets, without overlap.
    pieces: Vec<(u64, Vec<u8>)>,
    reads: Cell<u64>,
}

impl SparseFile {
    /// A file of `size` bytes and blocks of `block`, zeros but for `pieces`: their offsets,
    /// ascending, and bytes.
    ///
    /// # Panics
    /// When two overlap, or one ends past the end.
    pub fn new(block: u32, size: u64, pieces: Vec<(u64, Vec<u8>)>) -> Self {
        let end = |(start, bytes): &(u64, Vec<u8>)| start + bytes.len() as u64;
        assert!(pieces.windows(2).all(|pair| end(&pair[0]) <= pair[1].0), "pieces overlap");
        assert!(pieces.last().is_none_or(|last| end(last) <= size), "a piece past the end");
        Self(Rc::new(Shared { block, size, pieces, reads: Cell::new(0) }))
    }

    fn assert_aligned(&self, range: ByteRange) {
        let block = u64::from(self.0.block);
        let is_last = range.offset().is_multiple_of(block) && range.end() == self.0.size;
        assert!(range.is_aligned(block) || is_last, "misaligned: {range}");
    }
}

impl Storage for SparseFile {
    fn name(&self) -> &str {
        "file"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            alignment: Alignment { offset: self.0.block, memory: self.0.block.min(512) },
            write_zeroes: Offload::Available,
            discard: Offload::Available,
            ..PLAIN_CAPABILITIES
        }
    }

    fn size(&self) -> u64 {
        self.0.size
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let range = ByteRange::new(offset, into.len() as u64).expect("the end of a read");
        self.assert_aligned(range);
        self.0.reads.set(self.0.reads.get() + 1);
        assert!(self.0.reads.get() < MAX_READS, "{MAX_READS} reads: it does not end");
        let mut at = range.offset();
        for (start, bytes) in &self.0.pieces {
            let piece = ByteRange::between(*start, start + bytes.len() as u64);
            if !piece.overlaps(range) {
                continue;
            }
            let skipped = start.saturating_sub(at) as usize;
            let rest = into.split_off(skipped);
            into.fill(0);
            into = rest;
            at += skipped as u64;
            let end = piece.end().min(range.end());
            let rest = into.split_off((end - at) as usize);
            into.copy_from(&bytes[(at - start) as usize..(end - start) as usize]);
            into = rest;
            at = end;
        }
        into.fill(0);
        Ok(())
    }

    async fn write(&self, offset: u64, _from: IoVector, _durability: Durability) -> Result<()> {
        panic!("it is written at {offset}");
    }

    async fn write_zeroes(&self, range: ByteRange, _unmap: Unmap) -> Result<()> {
        panic!("zeros are written: {range}");
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        panic!("it is discarded: {range}");
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        Ok(())
    }

    async fn resize(&self, size: u64) -> Result<()> {
        panic!("its size becomes {size}");
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        Ok((Allocation::Data, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}
