//! The header of a dynamic VHD image, and its blocks (specification: "Dynamic Disk Header Format",
//! "Block Allocation Table and Data Blocks").
//!
//! Guarantees: the end of the table fits into the file.

use blockhouse_core::{Result, Storage};

use super::footer::checksum;
use crate::foreign::fields::{SECTOR, array, be32, be64};
use crate::foreign::piece::Piece;
use crate::foreign::refusal::{corrupt, unsupported};
use crate::foreign::tables::Tables;

/// Bytes of the header.
pub(super) const LENGTH: usize = 1024;
/// Entry of a block that was never written.
const UNALLOCATED: u32 = u32::MAX;

pub(super) const COOKIE: &[u8; 8] = b"cxsparse";
const ENTRY_SIZE: u64 = 4;
/// Supported block sizes in bytes. Hyper-V uses 2 MiB, and Virtual PC uses 512 KiB.
const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 4096..=256 << 20;

/// Offsets of the fields in bytes.
mod at {
    pub(super) const TABLE_OFFSET: usize = 16;
    pub(super) const VERSION: usize = 24;
    pub(super) const ENTRIES: usize = 28;
    pub(super) const BLOCK_SIZE: usize = 32;
    pub(super) const CHECKSUM: usize = 36;
}

/// The fields of the header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SparseHeader {
    /// Bytes of a block, without its bitmap; a power of two.
    pub(super) block_size: u64,
    /// Bytes of the bitmap before a block, whole sectors.
    pub(super) bitmap_size: u64,
    /// Blocks of the disk.
    pub(super) blocks: u64,
    /// Offset of the table, a multiple of 512.
    pub(super) table_offset: u64,
    /// The offset at which the footer begins, or the end of a file without a footer.
    pub(super) data_end: u64,
}

impl SparseHeader {
    /// Parses the bytes at `offset` of a file with data up to `data_end`, for a disk of `size`
    /// bytes.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset.
    pub(super) fn parse(bytes: &[u8], offset: u64, size: u64, data_end: u64) -> Result<Self> {
        let field = |field: usize| offset.saturating_add(field as u64);
        if array(bytes, 0) != *COOKIE {
            return Err(corrupt("it has no header of a dynamic image", offset));
        }
        let (stated, sum) = (be32(bytes, at::CHECKSUM), checksum(bytes, at::CHECKSUM));
        if stated != sum {
            let what = format!("its header has the checksum {sum:#x}, but states {stated:#x}");
            return Err(corrupt(what, field(at::CHECKSUM)));
        }
        if be32(bytes, at::VERSION) >> 16 != 1 {
            let what = format!("version {:#x} of the header", be32(bytes, at::VERSION));
            return Err(unsupported(what, field(at::VERSION)));
        }
        let block_size = be32(bytes, at::BLOCK_SIZE);
        if !BLOCK_SIZES.contains(&block_size) || !block_size.is_power_of_two() {
            let what = format!("blocks of {block_size} bytes are not supported");
            return Err(unsupported(what, field(at::BLOCK_SIZE)));
        }
        let (block_size, entries) = (u64::from(block_size), u64::from(be32(bytes, at::ENTRIES)));
        let (blocks, table_offset) = (size.div_ceil(block_size), be64(bytes, at::TABLE_OFFSET));
        if blocks > entries {
            let what = format!("its table has {entries} entries, and the disk {blocks} blocks");
            return Err(corrupt(what, field(at::ENTRIES)));
        }
        let end = table_offset.checked_add(blocks * ENTRY_SIZE);
        if !table_offset.is_multiple_of(SECTOR) || end.is_none_or(|end| end > data_end) {
            let what = format!(
                "its table at {table_offset} starts at no sector, or ends past the end of the file"
            );
            return Err(corrupt(what, field(at::TABLE_OFFSET)));
        }
        let bitmap_size = (block_size / SECTOR).div_ceil(8).next_multiple_of(SECTOR);
        Ok(Self { block_size, bitmap_size, blocks, table_offset, data_end })
    }

    /// The piece of the disk from `at` on, at most up to the end of the block.
    ///
    /// # Errors
    /// `Corrupt` if the block's bitmap or its data reaches past the end of the data; errors of the
    /// storage.
    pub(super) async fn piece<S: Storage>(&self, tables: &Tables<'_, S>, at: u64) -> Result<Piece> {
        let inside = at % self.block_size;
        let length = self.block_size - inside;
        let entry = self.entry(tables, at / self.block_size).await?;
        if entry == UNALLOCATED {
            return Ok(Piece::zero(length));
        }
        let bitmap = u64::from(entry) * SECTOR;
        self.check_inside(at, bitmap + self.bitmap_size)?;
        let (is_written, sectors) = self.run(tables, bitmap, inside / SECTOR).await?;
        let length = (sectors * SECTOR - inside % SECTOR).min(length);
        if !is_written {
            return Ok(Piece::zero(length));
        }
        let host = bitmap + self.bitmap_size + inside;
        self.check_inside(at, host + length)?;
        Ok(Piece::mapped(host, length))
    }

    /// Fails if `end`, the end of a bitmap or data for the disk's offset `at`, lies past the end of
    /// the data.
    fn check_inside(&self, at: u64, end: u64) -> Result<()> {
        if end <= self.data_end {
            return Ok(());
        }
        let what = format!("the block of the disk's offset {at} ends past the end of the file");
        Err(corrupt(what, end))
    }

    /// The entry of a block of the disk.
    async fn entry<S: Storage>(&self, tables: &Tables<'_, S>, index: u64) -> Result<u32> {
        let offset = self.table_offset + index * ENTRY_SIZE;
        tables.entry(offset).await.map(u32::from_be_bytes)
    }

    /// Whether a sector of a block was written, and the number of sectors from it on with the same
    /// state: at most those whose bits are in one word.
    async fn run<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        bitmap: u64,
        sector: u64,
    ) -> Result<(bool, u64)> {
        const BITS: u64 = u64::BITS as u64;
        let word = tables.entry(bitmap + sector / BITS * 8).await.map(u64::from_be_bytes)?;
        let word = word << (sector % BITS);
        let is_written = word >> (BITS - 1) == 1;
        let run = if is_written { word.leading_ones() } else { word.leading_zeros() };
        Ok((is_written, u64::from(run).min(BITS - sector % BITS)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header at 512 with a table at 1536 for 3 MiB in blocks of 2 MiB.
    fn sound() -> Vec<u8> {
        let mut bytes = vec![0; LENGTH];
        bytes[..8].copy_from_slice(COOKIE);
        bytes[at::TABLE_OFFSET + 6] = 6;
        bytes[at::VERSION + 1] = 1;
        bytes[at::ENTRIES + 3] = 2;
        bytes[at::BLOCK_SIZE + 1] = 0x20;
        seal(bytes)
    }

    fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
        let sum = checksum(&bytes, at::CHECKSUM);
        bytes[at::CHECKSUM..][..4].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    #[test]
    fn a_sound_header_is_read() {
        let header = SparseHeader::parse(&sound(), 512, 3 << 20, 1 << 20).unwrap();
        assert_eq!((header.block_size, header.bitmap_size, header.blocks), (2 << 20, 512, 2));
        assert_eq!(header.table_offset, 1536);
    }

    #[test]
    fn each_field_is_checked() {
        for (field, value, words) in [
            (0, &b"cxsparsf"[..], "no header of a dynamic image"),
            (at::VERSION, &[0, 2], "version 0x20000"),
            (at::BLOCK_SIZE, &[0, 0, 0, 0], "blocks of 0 bytes"),
            (at::BLOCK_SIZE, &[0, 0x30, 0, 0], "blocks of 3145728 bytes"),
            (at::BLOCK_SIZE, &[0x20, 0, 0, 0], "blocks of 536870912 bytes"),
            (at::ENTRIES, &[0, 0, 0, 1], "1 entries, and the disk 2 blocks"),
            (at::TABLE_OFFSET, &[0xff; 8], "no sector"),
            (at::TABLE_OFFSET, &[0, 0, 0, 0, 0, 0, 6, 1], "no sector"),
            (at::TABLE_OFFSET, &[0, 0, 0, 0, 0, 0x10, 0, 0], "past the end"),
        ] {
            let mut bytes = sound();
            bytes[field..field + value.len()].copy_from_slice(value);
            let error = SparseHeader::parse(&seal(bytes), 512, 3 << 20, 1 << 20).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(words) && text.contains("offset"), "{words}: {text}");
        }
        let mut damaged = sound();
        damaged[500] = 1;
        let error = SparseHeader::parse(&damaged, 512, 3 << 20, 1 << 20).unwrap_err();
        assert!(error.to_string().contains("checksum"), "{error}");
    }
}
