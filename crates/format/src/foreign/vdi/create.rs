//! New VDI images, dynamic and static ones, with blocks of 1 MiB.

use blockhouse_core::Result;

use super::header::{DYNAMIC, MAX_BLOCKS, SIGNATURE, STATIC, VERSION_1_1};
use super::{ENTRY_SIZE, UNALLOCATED};
use crate::foreign::fields::{SECTOR, le32_bytes, padded};
use crate::foreign::new_parts::{FilePieces, NewBlocks, NewForeignOptions, Subformat, refuse};

const BLOCK: u64 = 1 << 20;
/// Offset of the table.
const TABLE: u64 = SECTOR;
/// Entries of the table that are written at once.
const PART: u64 = 256 << 10;
/// Alignment of the blocks, for direct I/O and large pages.
const DATA_ALIGNMENT: u64 = 1 << 20;
/// Bytes of the text in front of the header, of the header without its later fields, and of the
/// comment in it.
const TEXT: u64 = 64;
const HEADER: u32 = 0x180;
const COMMENT: usize = 256;

/// An image that is being filled.
pub struct NewVdi {
    size: u64,
    blocks: NewBlocks,
    is_static: bool,
    ids: [[u8; 16]; 2],
}

impl NewVdi {
    pub(in crate::foreign) fn new(options: &NewForeignOptions) -> Result<Self> {
        let is_static = options.subformat == Subformat::Fixed;
        let blocks = NewBlocks::new(options.size, BLOCK, is_static)?;
        if blocks.count() > MAX_BLOCKS.into() {
            return Err(refuse(format!("a VDI image has {MAX_BLOCKS} blocks of 1 MiB at most")));
        }
        Ok(Self { size: options.size, blocks, is_static, ids: [options.guid(0), options.guid(1)] })
    }

    pub(in crate::foreign) fn place(&mut self, at: u64) -> Result<(u64, u64)> {
        let start = self.data();
        let (number, inside) = self.blocks.place(at)?;
        Ok((start + number * BLOCK + inside, BLOCK - inside))
    }

    pub(in crate::foreign) fn finish(self) -> (FilePieces, u64) {
        let end = self.data() + self.blocks.used() * BLOCK;
        let header = (0, self.header());
        // The table of the largest disk has 2 GiB, so it is made in parts.
        let table = (0..self.blocks.count()).step_by(PART as usize).map(move |first| {
            let numbers = (first..(first + PART).min(self.blocks.count()))
                .map(|index| self.blocks.number(index).map_or(UNALLOCATED, |it| it as u32));
            (
                TABLE + first * ENTRY_SIZE,
                padded(numbers.flat_map(u32::to_le_bytes).collect(), SECTOR),
            )
        });
        (Box::new(table.chain([header])), end)
    }

    fn data(&self) -> u64 {
        (TABLE + self.blocks.count() * 4).next_multiple_of(DATA_ALIGNMENT)
    }

    fn header(&self) -> Vec<u8> {
        let kind = if self.is_static { STATIC } else { DYNAMIC };
        let mut bytes = padded(b"<<< Virtual Disk Image of Blockhouse >>>\n".to_vec(), TEXT);
        // The last word is the flags.
        bytes.extend(le32_bytes(&[SIGNATURE, VERSION_1_1, HEADER, kind, 0]));
        bytes.extend([0; COMMENT]);
        bytes.extend(le32_bytes(&[TABLE as u32, self.data() as u32]));
        // No geometry: programs compute one.
        bytes.extend(le32_bytes(&[0, 0, 0, SECTOR as u32, 0]));
        bytes.extend(self.size.to_le_bytes());
        let counts = [self.blocks.count() as u32, self.blocks.used() as u32];
        bytes.extend(le32_bytes(&[BLOCK as u32, 0, counts[0], counts[1]]));
        bytes.extend(self.ids.concat());
        padded(bytes, SECTOR)
    }
}
