//! The metadata items of a VHDX image (\[MS-VHDX\] 2.6): the properties of the disk.

use blockhouse_core::{ByteRange, Result, Storage};

use super::guid::{Guid, MIB, guid, show};
use crate::foreign::fields::{array, le16, le32, le64};
use crate::foreign::patches::Patches;
use crate::foreign::refusal::{corrupt, has_parent, unsupported};

pub(super) const SIGNATURE: &[u8; 8] = b"metadata";
/// Bytes of the table, which the items follow; and of its first part, which holds all entries of
/// most images.
pub(super) const TABLE: usize = 64 << 10;
const FIRST: usize = 4096;
/// Bytes of an entry, and of the table's header.
pub(super) const ENTRY: usize = 32;
const MAX_ENTRIES: u16 = 2047;
/// Flags of an entry: the item was made by a user; the item describes the virtual disk, not the
/// file; a reader must understand the item.
const IS_USER: u32 = 1;
pub(super) const IS_DISK: u32 = 2;
pub(super) const IS_REQUIRED: u32 = 4;

pub(super) const FILE_PARAMETERS: Guid = guid(0xcaa1_6737, 0xfa36, 0x4d43, 0xb3b6_33f0_aa44_e76b);
pub(super) const DISK_SIZE: Guid = guid(0x2fa5_4224, 0xcd1b, 0x4876, 0xb211_5dbe_d83b_f4b8);
pub(super) const DISK_ID: Guid = guid(0xbeca_12ab, 0xb2e6, 0x4523, 0x93ef_c309_e000_c746);
pub(super) const LOGICAL_SECTOR: Guid = guid(0x8141_bf1d, 0xa96f, 0x4709, 0xba47_f233_a8fa_ab5f);
pub(super) const PHYSICAL_SECTOR: Guid = guid(0xcda3_48c7, 0x445d, 0x4471, 0x9cc9_e988_5251_c556);
const PARENT_LOCATOR: Guid = guid(0xa8d3_5f2d, 0xb30b, 0x454d, 0xabf7_d3d8_4834_ab0c);

/// Flag of the file parameters: the image holds differences only.
const HAS_PARENT: u32 = 2;
/// Valid block sizes in bytes.
pub(super) const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 1 << 20..=256 << 20;
/// Bytes of the largest disk: 64 TiB.
pub(super) const MAX_SIZE: u64 = 64 << 40;

/// The values of the items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Metadata {
    /// Bytes of the disk, a multiple of 512.
    pub(super) size: u64,
    /// Bytes of a block, a power of two.
    pub(super) block_size: u64,
    /// Bytes of a sector of the guest: 512 or 4096.
    pub(super) sector_size: u64,
}

/// A metadata item.
struct Item {
    value: [u8; 8],
    /// The offset in the file.
    at: u64,
}

/// The items that this program needs.
#[derive(Default)]
struct Items {
    parameters: Option<Item>,
    size: Option<Item>,
    sector: Option<Item>,
}

impl Metadata {
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset; or errors of the storage.
    pub(super) async fn read<S: Storage>(
        storage: &S,
        patches: &Patches,
        region: ByteRange,
    ) -> Result<Self> {
        let mut table = patches.read(storage, region.offset(), FIRST).await?;
        let count = le16(&table, 10);
        if array(&table, 0) != *SIGNATURE || count > MAX_ENTRIES {
            return Err(corrupt("its metadata has no sound table", region.offset()));
        }
        if (usize::from(count) + 1) * ENTRY > FIRST {
            table = patches.read(storage, region.offset(), TABLE).await?;
        }
        let mut items = Items::default();
        for index in 1..=usize::from(count) {
            let entry = &table[index * ENTRY..(index + 1) * ENTRY];
            let at = region.offset() + (index * ENTRY) as u64;
            let offset = location(entry, at, region)?;
            let Some(place) = items.place(array(entry, 0), le32(entry, 24), at)? else { continue };
            let bytes = patches.read(storage, offset, 8).await?;
            if place.replace(Item { value: array(&bytes, 0), at: offset }).is_some() {
                return Err(corrupt("one of its metadata items is there twice", at));
            }
        }
        items.check(region.offset())
    }
}

/// The offset in the file of the item of an entry. The caller reads 8 bytes there, the size of the
/// longest item that it needs; bytes past the end of the file read as zeros.
fn location(entry: &[u8], at: u64, region: ByteRange) -> Result<u64> {
    let (start, length) = (u64::from(le32(entry, 16)), u64::from(le32(entry, 20)));
    let is_before = length > 0 && start < TABLE as u64;
    if is_before || start + length > region.length() || length > MIB {
        let what = format!("a metadata item of {length} bytes at {start} of its region");
        return Err(corrupt(what, at + 16));
    }
    Ok(region.offset() + start)
}

impl Items {
    /// The field for an item; `None` if the item is not needed.
    fn place(&mut self, item: Guid, flags: u32, at: u64) -> Result<Option<&mut Option<Item>>> {
        Ok(match item {
            _ if flags & IS_USER != 0 && flags & IS_REQUIRED == 0 => None,
            FILE_PARAMETERS => Some(&mut self.parameters),
            DISK_SIZE => Some(&mut self.size),
            LOGICAL_SECTOR => Some(&mut self.sector),
            DISK_ID | PHYSICAL_SECTOR => None,
            PARENT_LOCATOR => return Err(has_parent(at)),
            _ if flags & IS_REQUIRED == 0 => None,
            other => {
                let what = format!("the metadata item {} is required and not known", show(&other));
                return Err(unsupported(what, at));
            }
        })
    }

    fn check(self, at: u64) -> Result<Metadata> {
        let Self { parameters: Some(parameters), size: Some(size), sector: Some(sector) } = self
        else {
            return Err(corrupt("its block size, disk size or sector size is missing", at));
        };
        let (block_size, flags) = (le32(&parameters.value, 0), le32(&parameters.value, 4));
        if flags & HAS_PARENT != 0 {
            return Err(has_parent(parameters.at + 4));
        }
        if !BLOCK_SIZES.contains(&block_size) || !block_size.is_power_of_two() {
            return Err(corrupt(format!("blocks of {block_size} bytes"), parameters.at));
        }
        let (bytes, sector_size) = (le64(&size.value, 0), le32(&sector.value, 0));
        if sector_size != 512 && sector_size != 4096 {
            return Err(corrupt(format!("sectors of {sector_size} bytes"), sector.at));
        }
        let sector_size = u64::from(sector_size);
        if bytes > MAX_SIZE || !bytes.is_multiple_of(sector_size) {
            let what = format!("a disk of {bytes} bytes in sectors of {sector_size}");
            return Err(corrupt(what, size.at));
        }
        Ok(Metadata { size: bytes, block_size: block_size.into(), sector_size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(block: [u32; 2], size: u64, sector: u32) -> Result<Metadata> {
        let item = |value: [u8; 8]| Some(Item { value, at: 70_000 });
        let parameters = u64::from(block[0]) | u64::from(block[1]) << 32;
        Items {
            parameters: item(parameters.to_le_bytes()),
            size: item(size.to_le_bytes()),
            sector: item(u64::from(sector).to_le_bytes()),
        }
        .check(65536)
    }

    #[test]
    fn each_item_is_checked() {
        let sound = items([2 << 20, 1], 5 << 20, 4096).unwrap();
        assert_eq!((sound.block_size, sound.size, sound.sector_size), (2 << 20, 5 << 20, 4096));
        for (refused, words) in [
            (items([2 << 20, HAS_PARENT], 5 << 20, 512), "parent image"),
            (items([3 << 20, 0], 5 << 20, 512), "blocks of 3145728"),
            (items([512 << 10, 0], 5 << 20, 512), "blocks of 524288"),
            (items([512 << 20, 0], 5 << 20, 512), "blocks of 536870912"),
            (items([2 << 20, 0], MAX_SIZE + 512, 512), "a disk of"),
            (items([2 << 20, 0], 512, 4096), "a disk of 512 bytes"),
            (items([2 << 20, 0], 5 << 20, 1024), "sectors of 1024"),
            (Items::default().check(65536), "missing"),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("offset"), "{words}: {error}");
        }
    }

    #[test]
    fn an_item_lies_in_its_region() {
        let region = ByteRange::between(2 * MIB, 3 * MIB);
        let entry = |start: u32, length: u32| {
            let mut entry = [0; ENTRY];
            entry[16..20].copy_from_slice(&start.to_le_bytes());
            entry[20..24].copy_from_slice(&length.to_le_bytes());
            location(&entry, 0, region)
        };
        assert_eq!(entry(65536, 8).unwrap(), 2 * MIB + 65536);
        assert_eq!(entry(0, 0).unwrap(), 2 * MIB, "an empty item");
        let beyond = [(0, 8), (1 << 20, 8), (u32::MAX, u32::MAX), (65536, u32::MAX), (u32::MAX, 0)];
        for (start, length) in beyond {
            assert!(entry(start, length).is_err(), "{start}+{length}");
        }
    }

    #[test]
    fn items_that_must_be_known_are() {
        let other = guid(1, 2, 3, 4);
        let place =
            |guid, flags| Items::default().place(guid, flags, 0).map(|place| place.is_some());
        assert_eq!(place(DISK_SIZE, IS_REQUIRED).ok(), Some(true));
        assert_eq!(place(other, 0).ok(), Some(false));
        assert_eq!(place(DISK_SIZE, IS_USER).ok(), Some(false), "a user's item of that name");
        assert!(place(other, IS_REQUIRED).is_err());
        assert!(place(PARENT_LOCATOR, IS_REQUIRED).is_err());
    }
}
