//! The block allocation table of a VHDX image (\[MS-VHDX\] 2.5): the location of each block. The
//! entry of a sector bitmap follows the entries of the blocks that the bitmap covers. Only
//! differencing images have bitmaps.

use blockhouse_core::{ByteRange, Result, Storage};

use super::guid::MIB;
use super::metadata::Metadata;
use crate::foreign::refusal::corrupt;
use crate::foreign::scan::scan;
use crate::foreign::tables::Tables;

/// Sectors that one sector bitmap covers.
pub(super) const BITMAP_SECTORS: u64 = 1 << 23;
pub(super) const ENTRY_SIZE: u64 = 8;
/// Bits of an entry: the state, and the offset of the block in the file.
const STATE: u64 = 7;
const OFFSET: u64 = !(MIB - 1);

/// States of a block.
pub(super) mod state {
    pub(in crate::foreign::vhdx) const NOT_PRESENT: u64 = 0;
    pub(in crate::foreign::vhdx) const UNDEFINED: u64 = 1;
    pub(in crate::foreign::vhdx) const ZERO: u64 = 2;
    pub(in crate::foreign::vhdx) const UNMAPPED: u64 = 3;
    /// The same in images of version 0.95 of the specification, which QEMU reads, too.
    pub(in crate::foreign::vhdx) const UNMAPPED_V095: u64 = 5;
    pub(in crate::foreign::vhdx) const FULLY_PRESENT: u64 = 6;
}

/// The location and shape of the table.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Bat {
    offset: u64,
    /// Number of block entries between two bitmap entries.
    chunk_ratio: u64,
    /// Blocks of the disk.
    pub(super) blocks: u64,
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// The block was never written, or its content is undefined by the specification.
    Hole,
    Zero,
    Mapped {
        host: u64,
    },
}

impl Bat {
    /// # Errors
    /// `Corrupt` if the table is too short.
    pub(super) fn new(metadata: &Metadata, region: ByteRange) -> Result<Self> {
        let chunk_ratio = BITMAP_SECTORS * metadata.sector_size / metadata.block_size;
        let blocks = metadata.size.div_ceil(metadata.block_size);
        let table = Self { offset: region.offset(), chunk_ratio, blocks };
        let entries = table.entries();
        if entries * ENTRY_SIZE > region.length() {
            let what = format!("its block table needs {entries} entries, and is shorter");
            return Err(corrupt(what, region.offset()));
        }
        Ok(table)
    }

    /// The state of block `index` of the disk.
    ///
    /// # Errors
    /// `Corrupt` with the entry's offset; or errors of the storage.
    pub(super) async fn block<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        index: u64,
    ) -> Result<Block> {
        let number = index + index / self.chunk_ratio;
        let entry = tables.entry(self.entry_offset(number)).await?;
        self.state(index, number, entry)
    }

    /// Passes the number and the state of each block to `visit`, except blocks that were never
    /// written.
    ///
    /// # Errors
    /// `Corrupt` if the table ends past the end of the file; errors of the storage or of `visit`.
    /// `visit` gets the error of an invalid entry.
    pub(super) async fn scan<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        mut visit: impl FnMut(u64, Result<Block>) -> Result<()>,
    ) -> Result<()> {
        let chunk = self.chunk_ratio + 1;
        let visit = |number: u64, entry| {
            if number % chunk == self.chunk_ratio {
                return Ok(());
            }
            let index = number - number / chunk;
            visit(index, self.state(index, number, entry))
        };
        scan(tables, self.offset, 0..self.entries(), 0, visit).await
    }

    /// The number of entries, those of bitmaps between blocks included.
    fn entries(&self) -> u64 {
        self.blocks + self.blocks.saturating_sub(1) / self.chunk_ratio
    }

    fn entry_offset(&self, number: u64) -> u64 {
        self.offset + number * ENTRY_SIZE
    }

    /// The state of block `index`, as entry `number` of the table has it.
    fn state(&self, index: u64, number: u64, entry: [u8; 8]) -> Result<Block> {
        let entry = u64::from_le_bytes(entry);
        match (entry & STATE, entry & OFFSET) {
            (state::NOT_PRESENT | state::UNDEFINED | state::UNMAPPED | state::UNMAPPED_V095, _) => {
                Ok(Block::Hole)
            }
            (state::ZERO, _) => Ok(Block::Zero),
            (state::FULLY_PRESENT, host) if host >= MIB => Ok(Block::Mapped { host }),
            (state, host) => {
                let what = format!("block {index} of the disk has state {state} and offset {host}");
                Err(corrupt(what, self.entry_offset(number)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_bitmaps_lie_between_those_of_blocks() {
        let metadata = |size| Metadata { size, block_size: 1 << 20, sector_size: 512 };
        // A bitmap covers 4 GiB.
        let bat = |size| Bat::new(&metadata(size), ByteRange::between(MIB, MIB + 4097 * 8));
        assert_eq!(bat(4 << 30).unwrap().chunk_ratio, 4096);
        assert!(bat((4 << 30) + 1).is_err(), "4097 blocks and a bitmap");
        assert!(bat(4 << 30).is_ok());
        assert_eq!(bat(0).unwrap().blocks, 0);
    }
}
