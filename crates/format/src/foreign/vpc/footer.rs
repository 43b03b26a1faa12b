//! The footer of a VHD image as bytes (specification: "Hard Disk Footer Format"). All numbers are
//! big-endian.

use blockhouse_core::{Error, ErrorKind, Result};

use crate::foreign::fields::{SECTOR, array, be32, be64};
use crate::foreign::refusal::{corrupt, has_parent, unsupported};

pub(super) const COOKIE: &[u8; 8] = b"conectix";
/// Major version 1; the minor version is ignored.
pub(super) const VERSION: u32 = 0x0001_0000;

/// Disk types.
pub(super) const FIXED: u32 = 2;
pub(super) const DYNAMIC: u32 = 3;
const DIFFERENCING: u32 = 4;

/// Sectors of the largest disk that a geometry can express. Larger disks state this geometry, too.
const MAX_GEOMETRY: u64 = 65_535 * 16 * 255;
/// Maximum disk size in bytes of Hyper-V and QEMU: 2040 GiB.
pub(super) const MAX_SIZE: u64 = 0xff00_0000 * SECTOR;

/// Creators whose disks have the size of their geometry, as in Virtual PC. This is QEMU's rule
/// (with `force_size` QEMU writes another creator). For all other creators the field of the current
/// size is valid, because the geometry can be smaller, and then the end of the disk would be
/// missing.
const BY_GEOMETRY: [&[u8; 4]; 3] = [b"vpc ", b"vs  ", b"qemu"];

/// Offsets of the fields in bytes.
mod at {
    pub(super) const VERSION: usize = 12;
    pub(super) const DATA_OFFSET: usize = 16;
    pub(super) const CREATOR: usize = 28;
    pub(super) const CURRENT_SIZE: usize = 48;
    pub(super) const GEOMETRY: usize = 56;
    pub(super) const TYPE: usize = 60;
    pub(super) const CHECKSUM: usize = 64;
}

/// The fields of a footer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Footer {
    /// Bytes of the disk, a multiple of 512.
    pub(super) size: u64,
    pub(super) kind: Kind,
}

/// Supported kinds of images.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The file is the disk, followed by the footer.
    Fixed,
    /// A table has the locations of blocks.
    Dynamic {
        /// Offset of the header of the table.
        header: u64,
    },
}

/// Whether an error of [`Footer::parse`] means that there is no footer at all.
pub(super) fn is_absent(error: &Error) -> bool {
    error.kind() == ErrorKind::InvalidInput
}

impl Footer {
    /// Parses the sector at `offset`.
    ///
    /// # Errors
    /// `InvalidInput` if the sector is not a footer; `Corrupt` or `Unsupported`, with the field's
    /// offset.
    pub(super) fn parse(bytes: &[u8], offset: u64) -> Result<Self> {
        let field = |field: usize| offset + field as u64;
        if array(bytes, 0) != *COOKIE {
            let error = Error::new(ErrorKind::InvalidInput, "is no VHD image: it has no footer");
            return Err(error.at(offset).hint("it was made as another format, or was truncated"));
        }
        let (stated, sum) = (be32(bytes, at::CHECKSUM), checksum(bytes, at::CHECKSUM));
        if stated != sum {
            let what = format!("its footer has the checksum {sum:#x}, but states {stated:#x}");
            return Err(corrupt(what, field(at::CHECKSUM)));
        }
        if be32(bytes, at::VERSION) & 0xffff_0000 != VERSION {
            let what = format!("version {:#x} is not supported", be32(bytes, at::VERSION));
            return Err(unsupported(what, field(at::VERSION)));
        }
        let kind = match be32(bytes, at::TYPE) {
            FIXED => Kind::Fixed,
            DYNAMIC => Kind::Dynamic { header: be64(bytes, at::DATA_OFFSET) },
            DIFFERENCING => return Err(has_parent(field(at::TYPE))),
            other => return Err(unsupported(format!("the type {other}"), field(at::TYPE))),
        };
        let size = disk_size(bytes);
        if size > MAX_SIZE || !size.is_multiple_of(SECTOR) {
            let what = format!("a disk of {size} bytes is not possible in a VHD image");
            return Err(corrupt(what, field(at::CURRENT_SIZE)));
        }
        Ok(Self { size, kind })
    }
}

/// Size of the disk in bytes, by the rule for the program that made the image.
fn disk_size(bytes: &[u8]) -> u64 {
    let [high, low, heads, sectors] = array(bytes, at::GEOMETRY);
    let cylinders = u16::from_be_bytes([high, low]);
    let geometry = u64::from(cylinders) * u64::from(heads) * u64::from(sectors);
    let is_stated = BY_GEOMETRY.contains(&&array(bytes, at::CREATOR)) && geometry < MAX_GEOMETRY;
    if is_stated { geometry * SECTOR } else { be64(bytes, at::CURRENT_SIZE) }
}

/// The complement of the sum of all bytes except those of the checksum field itself.
pub(super) fn checksum(bytes: &[u8], field: usize) -> u32 {
    let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>();
    !(sum(&bytes[..field]) + sum(&bytes[field + 4..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fixed image of 1 MiB by Hyper-V.
    fn sound() -> Vec<u8> {
        let mut bytes = vec![0; SECTOR as usize];
        bytes[..8].copy_from_slice(COOKIE);
        bytes[at::VERSION..][..4].copy_from_slice(&VERSION.to_be_bytes());
        bytes[at::CREATOR..][..4].copy_from_slice(b"win ");
        bytes[at::CURRENT_SIZE..][..8].copy_from_slice(&(1u64 << 20).to_be_bytes());
        bytes[at::GEOMETRY..][..4].copy_from_slice(&[0, 30, 4, 17]);
        bytes[at::TYPE..][..4].copy_from_slice(&FIXED.to_be_bytes());
        seal(bytes)
    }

    fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
        let sum = checksum(&bytes, at::CHECKSUM);
        bytes[at::CHECKSUM..][..4].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    fn with(field: usize, value: &[u8]) -> Vec<u8> {
        let mut bytes = sound();
        bytes[field..field + value.len()].copy_from_slice(value);
        seal(bytes)
    }

    #[test]
    fn the_creator_decides_which_size_counts() {
        let size = |creator: &[u8; 4]| Footer::parse(&with(at::CREATOR, creator), 0).unwrap().size;
        for creator in [b"win ", b"qem2", b"d2v ", b"tap\0", b"vbox", b"CTXS"] {
            assert_eq!(size(creator), 1 << 20);
        }
        for creator in BY_GEOMETRY {
            assert_eq!(size(creator), 30 * 4 * 17 * 512);
        }
        let mut largest = with(at::CREATOR, b"vpc ");
        largest[at::GEOMETRY..][..4].copy_from_slice(&[0xff, 0xff, 16, 255]);
        assert_eq!(Footer::parse(&seal(largest), 0).unwrap().size, 1 << 20);
    }

    #[test]
    fn each_field_is_checked() {
        for (field, value, words) in [
            (at::VERSION, &[0, 2, 0, 0][..], "version 0x20000"),
            (at::TYPE, &[0, 0, 0, 4], "parent image"),
            (at::TYPE, &[0, 0, 0, 0], "type 0"),
            (at::CURRENT_SIZE, &[0xff; 8], "not possible in a VHD image"),
            (at::CURRENT_SIZE, &[0, 0, 0, 0, 0, 0, 0, 1], "not possible in a VHD image"),
        ] {
            let error = Footer::parse(&with(field, value), 4096).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(words) && text.contains("offset 4"), "{text}");
        }
        let mut damaged = sound();
        damaged[100] ^= 1;
        assert!(Footer::parse(&damaged, 0).unwrap_err().to_string().contains("checksum"));
        let absent = Footer::parse(&[0; 512], 0).unwrap_err();
        assert!(is_absent(&absent));
        assert_eq!(Footer::parse(&sound(), 0).unwrap().kind, Kind::Fixed);
    }
}
