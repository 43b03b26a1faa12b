//! An entry of the log as bytes (\[MS-VHDX\] 2.3.1): a header, descriptors of changes, and a sector
//! of data for each change that does not write zeros.

use blockhouse_core::{ByteRange, Result};

use crate::foreign::fields::{array, le32, le64};
use crate::foreign::patches::{PAGE, Patches};
use crate::foreign::refusal::corrupt;
use crate::foreign::vhdx::header::{Header, is_sealed};

/// The unit of the log and of its changes in bytes.
pub(super) const SECTOR: u64 = PAGE as u64;

const SIGNATURE: &[u8; 4] = b"loge";
const DATA_DESCRIPTOR: &[u8; 4] = b"desc";
const ZERO_DESCRIPTOR: &[u8; 4] = b"zero";
const DATA_SECTOR: &[u8; 4] = b"data";
/// Bytes of the header, and of a descriptor.
const HEADER: u64 = 64;
const DESCRIPTOR: u64 = 32;

/// Offsets of the header's fields in bytes.
mod at {
    pub(super) const LENGTH: usize = 8;
    pub(super) const TAIL: usize = 12;
    pub(super) const SEQUENCE: usize = 16;
    pub(super) const DESCRIPTORS: usize = 24;
    pub(super) const GUID: usize = 32;
    pub(super) const FLUSHED_SIZE: usize = 48;
    pub(super) const LAST_SIZE: usize = 56;
}

/// An entry with a valid checksum.
pub(super) struct Entry {
    /// Offset of the entry in the log.
    pub(super) start: u64,
    /// Length in bytes, a multiple of [`SECTOR`].
    pub(super) length: u64,
    pub(super) sequence: u64,
    /// Log offset of the first entry whose changes were not yet at their final offsets when this
    /// entry was written.
    pub(super) tail: u64,
    /// Minimum size of the file in bytes when the entry was written.
    pub(super) flushed_size: u64,
    /// Minimum size of the file in bytes after the replay.
    pub(super) last_size: u64,
    descriptors: u64,
}

impl Entry {
    /// Entry length from the header in a sector, if that header belongs to this log.
    pub(super) fn length(sector: &[u8], header: &Header) -> Option<u64> {
        let length = u64::from(le32(sector, at::LENGTH));
        let is_entry = sector.starts_with(SIGNATURE)
            && array(sector, at::GUID) == header.log_guid
            && length.is_multiple_of(SECTOR)
            && length >= SECTOR;
        is_entry.then_some(length)
    }

    /// Parses all bytes of an entry at `start` of the log; `None` if they are invalid.
    pub(super) fn parse(bytes: &[u8], start: u64) -> Option<Self> {
        let entry = Self {
            start,
            length: bytes.len() as u64,
            sequence: le64(bytes, at::SEQUENCE),
            tail: le32(bytes, at::TAIL).into(),
            flushed_size: le64(bytes, at::FLUSHED_SIZE),
            last_size: le64(bytes, at::LAST_SIZE),
            descriptors: le32(bytes, at::DESCRIPTORS).into(),
        };
        let fits = HEADER + entry.descriptors * DESCRIPTOR <= entry.length;
        (entry.sequence > 0 && fits && is_sealed(bytes, SIGNATURE)).then_some(entry)
    }

    /// Adds the entry's changes to `patches`. `log` is the offset of the log in the file.
    ///
    /// # Errors
    /// `Corrupt` if the entry contradicts itself although its checksum is valid; `Unsupported` for
    /// too many changes.
    pub(super) fn apply(&self, bytes: &[u8], log: u64, patches: &mut Patches) -> Result<()> {
        let place = log + self.start;
        let mut data = (HEADER + self.descriptors * DESCRIPTOR).next_multiple_of(SECTOR);
        for index in 0..self.descriptors {
            let start = HEADER + index * DESCRIPTOR;
            let descriptor = &bytes[start as usize..(start + DESCRIPTOR) as usize];
            let offset = le64(descriptor, 16);
            let wrong = |what: &'static str| Err(corrupt(what, place + start));
            if le64(descriptor, 24) != self.sequence || !offset.is_multiple_of(SECTOR) {
                return wrong("a descriptor of its log contradicts its entry");
            }
            if descriptor.starts_with(ZERO_DESCRIPTOR) {
                match ByteRange::new(offset, le64(descriptor, 8)) {
                    Some(range) if range.is_aligned(SECTOR) => patches.zero(range, place)?,
                    _ => return wrong("a descriptor of its log names no range"),
                }
            } else if descriptor.starts_with(DATA_DESCRIPTOR) && data + SECTOR <= self.length {
                let sector = &bytes[data as usize..(data + SECTOR) as usize];
                if !self.owns(sector) || offset.checked_add(SECTOR).is_none() {
                    return wrong("a sector of its log contradicts its entry");
                }
                patches.write(offset, restore(descriptor, sector), place)?;
                data += SECTOR;
            } else {
                return wrong("a descriptor of its log is invalid, or its data is missing");
            }
        }
        Ok(())
    }

    /// Whether a data sector has the sequence number of this entry.
    fn owns(&self, sector: &[u8]) -> bool {
        let (high, low) = (le32(sector, 4), le32(sector, PAGE - 4));
        sector.starts_with(DATA_SECTOR) && u64::from(high) << 32 | u64::from(low) == self.sequence
    }
}

/// The bytes that a data sector restores: the first eight and the last four bytes are in the
/// descriptor.
fn restore(descriptor: &[u8], sector: &[u8]) -> Box<[u8; PAGE]> {
    let mut page: Box<[u8; PAGE]> = Box::new(array(sector, 0));
    page[..8].copy_from_slice(&descriptor[8..16]);
    page[PAGE - 4..].copy_from_slice(&descriptor[4..8]);
    page
}
