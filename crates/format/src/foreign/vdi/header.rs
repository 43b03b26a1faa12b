//! The header of a VDI image as bytes. Every field that determines the location of data is checked
//! here.
//!
//! Guarantees: the host offset of each block (block number times block size plus the offset of the
//! data) and the end of the table fit into 64 bits.

use blockhouse_core::Result;

use crate::foreign::fields::{SECTOR, array, le32, le64};
use crate::foreign::refusal::{corrupt, has_parent, other_signature, unsupported};

/// Number of bytes that are read: they have all fields of version 1.1.
pub(super) const LENGTH: usize = 512;

pub(super) const SIGNATURE: u32 = 0xbeda_107f;
pub(super) const VERSION_1_1: u32 = 0x0001_0001;

/// Image types.
pub(super) const DYNAMIC: u32 = 1;
pub(super) const STATIC: u32 = 2;
const UNDO: u32 = 3;
const DIFFERENCING: u32 = 4;

/// Number of blocks of the largest image that VirtualBox and QEMU support.
pub(super) const MAX_BLOCKS: u32 = 0x2000_0000;
/// Supported block sizes in bytes: VirtualBox uses blocks of 1 MiB.
const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 4096..=256 << 20;

/// Offsets of the fields in bytes.
mod at {
    pub(super) const SIGNATURE: usize = 0x40;
    pub(super) const VERSION: usize = 0x44;
    pub(super) const TYPE: usize = 0x4c;
    pub(super) const TABLE_OFFSET: usize = 0x154;
    pub(super) const DATA_OFFSET: usize = 0x158;
    pub(super) const SECTOR_SIZE: usize = 0x168;
    pub(super) const DISK_SIZE: usize = 0x170;
    pub(super) const BLOCK_SIZE: usize = 0x178;
    pub(super) const BLOCK_EXTRA: usize = 0x17c;
    pub(super) const BLOCKS: usize = 0x180;
    pub(super) const ALLOCATED: usize = 0x184;
    pub(super) const LINK_UUID: usize = 0x1a8;
    pub(super) const PARENT_UUID: usize = 0x1b8;
}

/// The fields of the header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes of the disk, rounded up to whole sectors.
    pub(super) size: u64,
    /// Bytes of a block, a power of two.
    pub(super) block_size: u64,
    /// Entries of the table, and blocks that the file can have.
    pub(super) blocks: u32,
    /// Number of blocks in use, as the header states it.
    pub(super) allocated: u32,
    /// Offset of the table, a multiple of 512.
    pub(super) table_offset: u64,
    /// Offset of the first block, a multiple of 512.
    pub(super) data_offset: u64,
}

impl Header {
    /// Parses the first [`LENGTH`] bytes of a file.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        check_kind(bytes)?;
        let header = Self {
            size: le64(bytes, at::DISK_SIZE).checked_next_multiple_of(SECTOR).unwrap_or(u64::MAX),
            block_size: le32(bytes, at::BLOCK_SIZE).into(),
            blocks: le32(bytes, at::BLOCKS),
            allocated: le32(bytes, at::ALLOCATED),
            table_offset: le32(bytes, at::TABLE_OFFSET).into(),
            data_offset: le32(bytes, at::DATA_OFFSET).into(),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<()> {
        let block_size = u32::try_from(self.block_size).unwrap_or(u32::MAX);
        if !BLOCK_SIZES.contains(&block_size) || !block_size.is_power_of_two() {
            let what = format!("blocks of {block_size} bytes are not supported");
            return Err(unsupported(what, at::BLOCK_SIZE as u64));
        }
        if self.blocks > MAX_BLOCKS {
            let what = format!("{} blocks are more than a VDI image can have", self.blocks);
            return Err(corrupt(what, at::BLOCKS as u64));
        }
        let capacity = u64::from(self.blocks) * self.block_size;
        if self.size > capacity {
            let what = format!("a disk of {} bytes does not fit into its blocks", self.size);
            return Err(corrupt(what, at::DISK_SIZE as u64));
        }
        for (field, offset) in
            [(at::TABLE_OFFSET, self.table_offset), (at::DATA_OFFSET, self.data_offset)]
        {
            if !offset.is_multiple_of(SECTOR) || offset < SECTOR {
                let what =
                    format!("its block table or data starts at {offset}, which is no sector");
                return Err(corrupt(what, field as u64));
            }
        }
        if self.table_offset + 4 * u64::from(self.blocks) > self.data_offset {
            return Err(corrupt("its block table reaches into its data", at::TABLE_OFFSET as u64));
        }
        Ok(())
    }
}

/// Refuses a file that is not a VDI image, and a VDI image of an unsupported kind.
fn check_kind(bytes: &[u8]) -> Result<()> {
    let is = |field, value| le32(bytes, field) == value;
    if !is(at::SIGNATURE, SIGNATURE) {
        return Err(other_signature("VDI image", at::SIGNATURE as u64));
    }
    if !is(at::VERSION, VERSION_1_1) {
        let version = le32(bytes, at::VERSION);
        let what = format!("version {}.{} is not supported", version >> 16, version & 0xffff);
        return Err(unsupported(what, at::VERSION as u64));
    }
    match le32(bytes, at::TYPE) {
        DYNAMIC | STATIC => {}
        UNDO | DIFFERENCING => return Err(has_parent(at::TYPE as u64)),
        other => return Err(unsupported(format!("the type {other}"), at::TYPE as u64)),
    }
    if let Some(uuid) =
        [at::LINK_UUID, at::PARENT_UUID].into_iter().find(|&uuid| array(bytes, uuid) != [0; 16])
    {
        return Err(has_parent(uuid as u64));
    }
    if !is(at::SECTOR_SIZE, SECTOR as u32) {
        let what = format!("sectors of {} bytes", le32(bytes, at::SECTOR_SIZE));
        return Err(unsupported(what, at::SECTOR_SIZE as u64));
    }
    if !is(at::BLOCK_EXTRA, 0) {
        let what = format!("{} extra bytes before each block", le32(bytes, at::BLOCK_EXTRA));
        return Err(unsupported(what, at::BLOCK_EXTRA as u64));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header of a dynamic image of 10 blocks.
    fn sound() -> Vec<u8> {
        let mut bytes = vec![0; LENGTH];
        for (field, value) in [
            (at::SIGNATURE, SIGNATURE),
            (at::VERSION, VERSION_1_1),
            (at::TYPE, DYNAMIC),
            (at::TABLE_OFFSET, 512),
            (at::DATA_OFFSET, 1024),
            (at::SECTOR_SIZE, 512),
            (at::DISK_SIZE, 10 << 20),
            (at::BLOCK_SIZE, 1 << 20),
            (at::BLOCKS, 10),
        ] {
            put(&mut bytes, field, value);
        }
        bytes
    }

    fn put(bytes: &mut [u8], field: usize, value: u32) {
        bytes[field..field + 4].copy_from_slice(&value.to_le_bytes());
    }

    #[test]
    fn a_sound_header_is_read_and_its_size_rounded_up() {
        let mut bytes = sound();
        put(&mut bytes, at::DISK_SIZE, (10 << 20) - 1);
        let header = Header::parse(&bytes).unwrap();
        assert_eq!((header.size, header.blocks, header.data_offset), (10 << 20, 10, 1024));
    }

    #[test]
    fn each_field_is_checked() {
        for (field, value, words) in [
            (at::SIGNATURE, 1, "no VDI image"),
            (at::VERSION, 0x0001_0002, "version 1.2 is not supported"),
            (at::TYPE, DIFFERENCING, "parent image"),
            (at::TYPE, UNDO, "parent image"),
            (at::TYPE, 9, "type 9"),
            (at::TABLE_OFFSET, 0, "no sector"),
            (at::TABLE_OFFSET, 513, "no sector"),
            (at::TABLE_OFFSET, 1024, "reaches into its data"),
            (at::DATA_OFFSET, 0x7fff_ffff, "no sector"),
            (at::SECTOR_SIZE, 4096, "sectors of 4096"),
            (at::DISK_SIZE, u32::MAX, "does not fit"),
            (at::DISK_SIZE + 4, u32::MAX, "does not fit"),
            (at::BLOCK_SIZE, 0, "blocks of 0 bytes"),
            (at::BLOCK_SIZE, (1 << 20) + 512, "blocks of 1049088 bytes"),
            (at::BLOCK_SIZE, 1 << 31, "blocks of 2147483648 bytes"),
            (at::BLOCK_EXTRA, 512, "512 extra bytes"),
            (at::BLOCKS, 9, "does not fit"),
            (at::BLOCKS, MAX_BLOCKS + 1, "more than a VDI image can have"),
            (at::BLOCKS, 129, "reaches into its data"),
            (at::LINK_UUID, 1, "parent image"),
            (at::PARENT_UUID + 12, 1, "parent image"),
        ] {
            let mut bytes = sound();
            put(&mut bytes, field, value);
            let error = Header::parse(&bytes).unwrap_err().to_string();
            assert!(error.contains(words), "{field:#x} = {value}: {error}");
            assert!(error.contains("offset"), "{error}");
        }
    }
}
