//! The region table of a VHDX image (\[MS-VHDX\] 2.2.3): the locations of the block table and the
//! metadata.

use blockhouse_core::{ByteRange, Result, Storage};

use super::guid::{Guid, MIB, guid, show};
use super::header::is_sealed;
use crate::foreign::fields::{array, le32, le64};
use crate::foreign::patches::Patches;
use crate::foreign::refusal::{corrupt, unsupported};

pub(super) const SIGNATURE: &[u8; 4] = b"regi";
/// Offsets of the two copies.
pub(super) const OFFSETS: [u64; 2] = [192 << 10, 256 << 10];
/// Bytes of a copy.
pub(super) const LENGTH: usize = 64 << 10;
/// Bytes of an entry, and of the table's header.
const ENTRY: usize = 32;
const FIRST: usize = 16;
/// The number of entries that fit into the table.
const MAX_ENTRIES: u32 = 2047;
/// Flag of a region that a reader must understand.
pub(super) const REQUIRED: u32 = 1;

pub(super) const BAT: Guid = guid(0x2dc2_7766, 0xf623, 0x4200, 0x9d64_115e_9bfd_4a08);
pub(super) const METADATA: Guid = guid(0x8b7c_a206, 0x4790, 0x4b9a, 0xb8fe_575f_050f_886e);

/// The two regions that every image has.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Regions {
    pub(super) bat: ByteRange,
    pub(super) metadata: ByteRange,
}

impl Regions {
    /// Reads the first sound copy of the table, with the changes of the log applied.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset; or errors of the storage.
    pub(super) async fn find<S: Storage>(storage: &S, patches: &Patches) -> Result<Self> {
        for offset in OFFSETS {
            let bytes = patches.read(storage, offset, LENGTH).await?;
            if is_sealed(&bytes, SIGNATURE) {
                return Self::parse(&bytes, offset);
            }
        }
        Err(corrupt("neither of its two region tables has a sound checksum", OFFSETS[0]))
    }

    fn parse(bytes: &[u8], offset: u64) -> Result<Self> {
        let count = le32(bytes, 8);
        if count > MAX_ENTRIES {
            return Err(corrupt(format!("a region table of {count} entries"), offset + 8));
        }
        let (mut bat, mut metadata) = (None, None);
        let mut all: Vec<ByteRange> = Vec::new();
        for index in 0..count as usize {
            let start = FIRST + index * ENTRY;
            let (entry, at) = (&bytes[start..start + ENTRY], offset + start as u64);
            let range = region(entry, at)?;
            if all.iter().any(|other| other.overlaps(range)) {
                return Err(corrupt("two of its regions overlap", at));
            }
            all.push(range);
            let place = match array(entry, 0) {
                BAT => &mut bat,
                METADATA => &mut metadata,
                other if le32(entry, 28) & REQUIRED != 0 => {
                    let what = format!("the region {} is required and not known", show(&other));
                    return Err(unsupported(what, at));
                }
                _ => continue,
            };
            if place.replace(range).is_some() {
                return Err(corrupt("one of its regions is there twice", at));
            }
        }
        match (bat, metadata) {
            (Some(bat), Some(metadata)) => Ok(Self { bat, metadata }),
            _ => Err(corrupt("its block table or its metadata is missing", offset)),
        }
    }
}

fn region(entry: &[u8], at: u64) -> Result<ByteRange> {
    let (start, length) = (le64(entry, 16), u64::from(le32(entry, 24)));
    let is_aligned = start.is_multiple_of(MIB) && length.is_multiple_of(MIB);
    match ByteRange::new(start, length) {
        Some(range) if is_aligned && start >= MIB && length > 0 => Ok(range),
        _ => Err(corrupt(format!("a region of {length} bytes at {start}"), at + 16)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(entries: &[(Guid, u64, u32, u32)]) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH];
        bytes[8..12].copy_from_slice(&(entries.len() as u32).to_le_bytes());
        for (entry, (guid, start, length, flags)) in bytes[FIRST..].chunks_mut(ENTRY).zip(entries) {
            entry[..16].copy_from_slice(guid);
            entry[16..24].copy_from_slice(&start.to_le_bytes());
            entry[24..28].copy_from_slice(&length.to_le_bytes());
            entry[28..].copy_from_slice(&flags.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn regions_are_found_and_unknown_ones_passed_over() {
        let other = (guid(1, 2, 3, 4), 9 * MIB, 1 << 20, 0);
        let entries = [other, (METADATA, 2 * MIB, 1 << 20, 1), (BAT, 3 * MIB, 2 << 20, 1)];
        let regions = Regions::parse(&table(&entries), 0).unwrap();
        assert_eq!(regions.bat, ByteRange::between(3 * MIB, 5 * MIB));
        assert_eq!(regions.metadata, ByteRange::between(2 * MIB, 3 * MIB));
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let (bat, metadata) = ((BAT, 3 * MIB, 1 << 20, 1), (METADATA, 2 * MIB, 1 << 20, 1));
        let required = (guid(1, 2, 3, 4), 9 * MIB, 1 << 20, 1);
        for (entries, words) in [
            (vec![bat], "missing"),
            (vec![bat, (METADATA, 3 * MIB, 1 << 20, 1)], "overlap"),
            (vec![bat, metadata, (BAT, 7 * MIB, 1 << 20, 1)], "twice"),
            (vec![bat, metadata, required], "00000001-0002-0003-0000-000000000004 is required"),
            (vec![(BAT, 0, 1 << 20, 1)], "bytes at 0"),
            (vec![(BAT, MIB + 512, 1 << 20, 1)], "bytes at 1049088"),
            (vec![(BAT, MIB, 0, 1)], "0 bytes"),
            (vec![(BAT, u64::MAX - MIB + 1, 1 << 20, 1)], "region of"),
        ] {
            let error = Regions::parse(&table(&entries), 192 << 10).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("offset"), "{words}: {error}");
        }
        let mut many = table(&[bat, metadata]);
        many[9] = 8;
        assert!(Regions::parse(&many, 0).unwrap_err().to_string().contains("2050 entries"));
    }
}
