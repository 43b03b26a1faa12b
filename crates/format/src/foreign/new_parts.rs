//! Properties of new images of other programs' formats, and the parts of their files.
//!
//! Guarantees: a block keeps its first number. The numbers take four bytes for each block of a
//! group in which any block has data.

use std::collections::TryReserveError;
use std::io;
use std::ops::Range;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result};

use super::fields::SECTOR;

/// How the disk is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Subformat {
    /// A block takes space when it has data.
    #[default]
    Sparse,
    /// All blocks are allocated, in the order of the disk.
    Fixed,
    /// Compressed grains one after the other, as a stream (VMDK only).
    Stream,
}

/// The parent of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewParent {
    /// The parent's identifier, which changes with its content.
    pub cid: u32,
    /// The name of its file, relative to the new image's folder.
    pub name: String,
}

/// The properties of a new image.
#[derive(Clone, Debug)]
pub struct NewForeignOptions {
    /// Bytes of the disk, a multiple of 512.
    pub size: u64,
    /// How the disk is stored.
    pub subformat: Subformat,
    /// Whether the disk's data is in files of 2 GiB each (VMDK).
    pub is_split: bool,
    /// Bytes of a block (VHDX only). `None`: chosen by the size of the disk.
    pub block_size: Option<u64>,
    /// Bytes of the log (VHDX only), a multiple of 1 MiB.
    pub log_size: u64,
    /// Bytes of a sector of the guest; 4096 is possible in VHDX only.
    pub sector_size: u32,
    /// The file's name without its folder (VMDK).
    pub file_name: String,
    /// The type of the disk's controller, such as `ide` (VMDK).
    pub adapter: String,
    /// The version of VMware's virtual hardware (VMDK).
    pub hardware_version: String,
    /// The version of VMware's tools in the guest (VMDK); 2147483647: VMware does not manage them.
    pub tools_version: String,
    /// Whether tables may mark grains as zeros, without allocating them (VMDK).
    pub has_zero_grains: bool,
    /// The image that has the grains that this one lacks (VMDK).
    pub parent: Option<NewParent>,
    /// Random bytes, for the identifiers of the image.
    pub seed: [u8; 16],
    /// The current time, since the Unix epoch.
    pub now: Duration,
}

impl NewForeignOptions {
    /// Options for a disk of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            subformat: Subformat::Sparse,
            is_split: false,
            block_size: None,
            log_size: 1 << 20,
            sector_size: SECTOR as u32,
            file_name: String::new(),
            adapter: "ide".to_owned(),
            hardware_version: "4".to_owned(),
            tools_version: i32::MAX.to_string(),
            has_zero_grains: false,
            parent: None,
            seed: [0; 16],
            now: Duration::ZERO,
        }
    }

    /// An identifier of the image; `index` distinguishes the identifiers of one image.
    pub(super) fn guid(&self, index: u8) -> [u8; 16] {
        let mut guid = self.seed;
        guid[15] = guid[15].wrapping_add(index);
        // Version 4 of RFC 4122: random.
        guid[6] = (guid[6] & 0x0f) | 0x40;
        guid[8] = (guid[8] & 0x3f) | 0x80;
        guid
    }
}

/// An offset in the file, and the bytes there.
pub type FilePiece = (u64, Vec<u8>);

/// The pieces of a file that are written last.
pub type FilePieces = Box<dyn Iterator<Item = FilePiece>>;

/// The error for an image that cannot be made.
pub(super) fn refuse(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

/// The blocks of a disk, numbered in the order of their first writes.
pub(super) struct NewBlocks {
    /// The numbers, in groups of `GROUP` blocks; `None` for a group without data.
    numbers: Vec<Option<Box<[u32]>>>,
    count: u32,
    used: u32,
    block_size: u64,
    /// Whether all blocks have data, in the order of the disk.
    is_full: bool,
}

/// The number of a block without data.
const NONE: u32 = u32::MAX;
/// Blocks whose numbers are allocated together.
const GROUP: usize = 16 << 10;

impl NewBlocks {
    /// The blocks of a disk of `size` bytes, all without data, or all in the order of the disk.
    ///
    /// # Errors
    /// `InvalidInput` if the disk has too many blocks; ENOMEM.
    pub(super) fn new(size: u64, block_size: u64, is_full: bool) -> Result<Self> {
        let count = u32::try_from(size.div_ceil(block_size)).ok().filter(|&count| count < NONE);
        let count = count.ok_or_else(|| refuse("the disk is longer than the format allows"))?;
        let mut numbers = Vec::new();
        if !is_full {
            let groups = (count as usize).div_ceil(GROUP);
            numbers.try_reserve_exact(groups).map_err(no_memory)?;
            numbers.resize(groups, None);
        }
        Ok(Self { numbers, count, used: if is_full { count } else { 0 }, block_size, is_full })
    }

    /// The number of the block with the disk's byte `at`, and the byte's offset in the block. Gives
    /// the block a number if it has none.
    ///
    /// # Errors
    /// ENOMEM.
    pub(super) fn place(&mut self, at: u64) -> Result<(u64, u64)> {
        let (block, inside) = ((at / self.block_size) as usize, at % self.block_size);
        if self.is_full {
            return Ok((block as u64, inside));
        }
        let group = match &mut self.numbers[block / GROUP] {
            Some(group) => group,
            empty => empty.insert(new_group()?),
        };
        let number = &mut group[block % GROUP];
        if *number == NONE {
            *number = self.used;
            self.used += 1;
        }
        Ok((u64::from(*number), inside))
    }

    /// Blocks of the disk.
    pub(super) fn count(&self) -> u64 {
        self.count.into()
    }

    /// Blocks with data.
    pub(super) fn used(&self) -> u64 {
        self.used.into()
    }

    /// The number of a block; `None` for a block without data, or past the last block.
    pub(super) fn number(&self, index: u64) -> Option<u64> {
        if self.is_full {
            return Some(index).filter(|&index| index < self.count());
        }
        let group = self.numbers.get(index as usize / GROUP)?.as_ref()?;
        Some(group[index as usize % GROUP]).filter(|&number| number != NONE).map(u64::from)
    }

    /// The numbers in the order of the disk.
    pub(super) fn iter(&self) -> impl Iterator<Item = Option<u64>> {
        (0..self.count()).map(|index| self.number(index))
    }

    /// Whether blocks of this range may have data.
    pub(super) fn has_some(&self, range: Range<u64>) -> bool {
        let groups = range.start as usize / GROUP..(range.end as usize).div_ceil(GROUP);
        let mut groups = self.numbers.iter().take(groups.end).skip(groups.start);
        self.is_full || groups.any(Option::is_some)
    }
}

fn new_group() -> Result<Box<[u32]>> {
    let mut group = Vec::new();
    group.try_reserve_exact(GROUP).map_err(no_memory)?;
    group.resize(GROUP, NONE);
    Ok(group.into_boxed_slice())
}

fn no_memory(_: TryReserveError) -> Error {
    Error::host("no memory for its tables", io::ErrorKind::OutOfMemory.into())
}

/// Cylinders, heads and sectors of a track of a disk, by the rule of the VHD specification.
pub(super) fn geometry(size: u64) -> (u16, u8, u8) {
    let sectors = (size / SECTOR).min(65_535 * 16 * 255);
    let (mut heads, mut track) = (16, 255);
    let mut tracks = sectors / track;
    if sectors < 65_535 * 16 * 63 {
        track = 17;
        tracks = sectors / track;
        heads = tracks.div_ceil(1024).max(4);
        if tracks >= heads * 1024 || heads > 16 {
            (heads, track) = (16, 31);
            tracks = sectors / track;
        }
        if tracks >= heads * 1024 {
            (heads, track) = (16, 63);
            tracks = sectors / track;
        }
    }
    ((tracks / heads) as u16, heads as u8, track as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_keeps_the_number_that_it_got_first() {
        let mut blocks = NewBlocks::new(10 << 20, 1 << 20, false).unwrap();
        assert_eq!(blocks.place(5 << 20).unwrap(), (0, 0));
        assert_eq!(blocks.place((2 << 20) + 7).unwrap(), (1, 7));
        assert_eq!(blocks.place((5 << 20) + 512).unwrap(), (0, 512));
        assert_eq!((blocks.count(), blocks.used()), (10, 2));
        assert_eq!((blocks.number(5), blocks.number(4)), (Some(0), None));
        let full = NewBlocks::new((10 << 20) + 512, 1 << 20, true).unwrap();
        assert_eq!((full.used(), full.number(10), full.number(11)), (11, Some(10), None));
    }

    #[test]
    fn numbers_take_memory_where_blocks_have_data() {
        let mut blocks = NewBlocks::new(200 << 40, 64 << 10, false).unwrap();
        let far = blocks.count() - 1;
        assert_eq!(blocks.place(far * (64 << 10)).unwrap(), (0, 0));
        assert_eq!((blocks.number(far), blocks.number(far - 1)), (Some(0), None));
        assert!(blocks.has_some(far - 5..far + 1) && !blocks.has_some(0..far - GROUP as u64));
        assert_eq!(blocks.numbers.iter().flatten().count(), 1);
    }

    #[test]
    fn geometries_are_those_of_the_specification() {
        assert_eq!(geometry(64 << 20), (963, 8, 17));
        assert_eq!(geometry(1 << 20), (30, 4, 17));
        assert_eq!(geometry(2 << 40), (65_535, 16, 255));
    }
}
