//! New VHD images: fixed ones, and dynamic ones with blocks of 2 MiB.
//!
//! The disk has exactly the requested size, even if no geometry matches it. Reason: the footer has
//! the creator `qem2`, by which QEMU takes the size from the size field, not from the geometry
//! (QEMU's option `force_size`). If the geometry of the specification is smaller than the disk, the
//! footer has the largest one, which no reader takes for the size.

use std::time::Duration;

use blockhouse_core::Result;

use super::footer::{COOKIE, DYNAMIC, FIXED, MAX_SIZE, VERSION, checksum};
use super::sparse;
use crate::foreign::fields::{SECTOR, padded, put};
use crate::foreign::new_parts::{
    FilePieces, NewBlocks, NewForeignOptions, Subformat, geometry, refuse,
};

/// Bytes of a block, and of the bitmap of its sectors, which precedes it.
const BLOCK: u64 = 2 << 20;
const BITMAP: u64 = SECTOR;
/// Offsets of the table's header, and of the table.
const HEADER: u64 = 512;
const TABLE: u64 = 1536;
/// 1 January 2000, the epoch of VHD's timestamps, as Unix time in seconds.
const EPOCH: u64 = 946_684_800;
const CREATOR: &[u8; 4] = b"qem2";
/// Table entry of a block without space in the file.
const UNALLOCATED: u32 = u32::MAX;

/// An image that is being filled.
pub struct NewVpc {
    size: u64,
    /// `None` for a fixed image.
    blocks: Option<NewBlocks>,
    id: [u8; 16],
    now: Duration,
}

impl NewVpc {
    pub(in crate::foreign) fn new(options: &NewForeignOptions) -> Result<Self> {
        let size = options.size;
        if size > MAX_SIZE {
            return Err(refuse(format!("a VHD image has {MAX_SIZE} bytes at most")));
        }
        let blocks = match options.subformat {
            Subformat::Fixed => None,
            Subformat::Sparse | Subformat::Stream => Some(NewBlocks::new(size, BLOCK, false)?),
        };
        Ok(Self { size, blocks, id: options.guid(0), now: options.now })
    }

    pub(in crate::foreign) fn place(&mut self, at: u64) -> Result<(u64, u64)> {
        let Some(blocks) = &mut self.blocks else { return Ok((at, self.size - at)) };
        let start = first_block(blocks);
        let (number, inside) = blocks.place(at)?;
        Ok((block_at(start, number) + BITMAP + inside, BLOCK - inside))
    }

    pub(in crate::foreign) fn finish(self) -> (FilePieces, u64) {
        let footer = self.footer();
        let Some(blocks) = self.blocks else {
            let pieces = std::iter::once((self.size, footer));
            return (Box::new(pieces), self.size + SECTOR);
        };
        let start = first_block(&blocks);
        let end = block_at(start, blocks.used());
        let sector = |number: u64| (block_at(start, number) / SECTOR) as u32;
        let entries = blocks.iter().map(|number| number.map_or(UNALLOCATED, sector));
        let mut table: Vec<u8> = entries.flat_map(u32::to_be_bytes).collect();
        table.resize((start - TABLE) as usize, 0xff);
        let head = [(0, footer.clone()), (HEADER, header(blocks.count())), (TABLE, table)];
        // The bitmaps mark all sectors as written: sectors that were not written read as zeros.
        let bitmaps = (0..blocks.used())
            .map(move |number| (block_at(start, number), vec![0xff; BITMAP as usize]));
        let pieces = head.into_iter().chain(bitmaps).chain([(end, footer)]);
        (Box::new(pieces), end + SECTOR)
    }

    fn footer(&self) -> Vec<u8> {
        let is_fixed = self.blocks.is_none();
        let fitting @ (cylinders, heads, track) = geometry(self.size);
        let sectors = u64::from(cylinders) * u64::from(heads) * u64::from(track);
        let is_whole = sectors * SECTOR == self.size;
        let (cylinders, heads, track) = if is_whole { fitting } else { geometry(u64::MAX) };
        let time = self.now.as_secs().saturating_sub(EPOCH) as u32;
        let mut bytes = COOKIE.to_vec();
        // The reserved feature bit, which is always set.
        bytes.extend(2_u32.to_be_bytes());
        bytes.extend(VERSION.to_be_bytes());
        bytes.extend(if is_fixed { u64::MAX } else { HEADER }.to_be_bytes());
        bytes.extend(time.to_be_bytes());
        bytes.extend(CREATOR);
        bytes.extend(0x0005_0003_u32.to_be_bytes());
        // The creator's host OS: all programs state Windows.
        bytes.extend(b"Wi2k");
        bytes.extend(self.size.to_be_bytes());
        bytes.extend(self.size.to_be_bytes());
        bytes.extend(cylinders.to_be_bytes());
        bytes.extend([heads, track]);
        bytes.extend(if is_fixed { FIXED } else { DYNAMIC }.to_be_bytes());
        let sum_at = bytes.len();
        bytes.extend([0; 4]);
        bytes.extend(self.id);
        seal(padded(bytes, SECTOR), sum_at)
    }
}

/// The header of a table of this number of blocks.
fn header(blocks: u64) -> Vec<u8> {
    let mut bytes = sparse::COOKIE.to_vec();
    bytes.extend(u64::MAX.to_be_bytes());
    bytes.extend(TABLE.to_be_bytes());
    bytes.extend(VERSION.to_be_bytes());
    bytes.extend((blocks as u32).to_be_bytes());
    bytes.extend((BLOCK as u32).to_be_bytes());
    let sum_at = bytes.len();
    seal(padded(bytes, TABLE - HEADER), sum_at)
}

fn seal(mut bytes: Vec<u8>, sum_at: usize) -> Vec<u8> {
    let sum = checksum(&bytes, sum_at);
    put(&mut bytes, sum_at, sum.to_be_bytes());
    bytes
}

/// The offset of the first block's bitmap.
fn first_block(blocks: &NewBlocks) -> u64 {
    TABLE + (blocks.count() * 4).next_multiple_of(SECTOR)
}

fn block_at(start: u64, number: u64) -> u64 {
    start + number * (BITMAP + BLOCK)
}
