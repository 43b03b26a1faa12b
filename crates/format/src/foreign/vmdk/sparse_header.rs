//! The header of a sparse extent as bytes ("Virtual Disk Format 5.0", "Hosted Sparse Extent
//! Header"); all numbers are little-endian.
//!
//! Guarantees: the end of the grain directory lies in the file.

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

use super::descriptor;
use crate::aligned_read::read;
use crate::foreign::fields::{SECTOR, array, le16, le32, le64};
use crate::foreign::refusal::{corrupt, other_signature, unsupported};

pub(super) const MAGIC: &[u8; 4] = b"KDMV";
/// Signature of the sparse extents of ESX servers, whose headers have fewer fields.
pub(super) const ESX_MAGIC: &[u8; 4] = b"COWD";
/// Bytes of a header.
pub(super) const LENGTH: usize = 512;

/// Flags: the header has the bytes of the newline test; the value 1 of a grain table entry means
/// zeros; grains are compressed; grains begin with markers.
pub(super) const NEWLINE_TEST: u32 = 1;
pub(super) const ZERO_GRAINS: u32 = 1 << 2;
pub(super) const COMPRESSED: u32 = 1 << 16;
pub(super) const MARKERS: u32 = 1 << 17;
/// The bytes of the newline test: a transfer in text mode would change them.
pub(super) const NEWLINES: &[u8; 4] = b"\n \r\n";
pub(super) const DEFLATE: u16 = 1;
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=3;

/// Supported grain sizes in sectors: 4 KiB to 2 MiB.
const GRAIN_SECTORS: std::ops::RangeInclusive<u64> = 8..=4096;
/// Supported numbers of entries of a grain table; VMware uses 512.
const TABLE_ENTRIES: std::ops::RangeInclusive<u32> = 1..=65_536;
/// Maximum size of an extent in sectors: 1 EiB.
const MAX_SECTORS: u64 = 1 << 51;

/// Supported grain sizes in sectors, and the number of entries of a grain table, of ESX extents.
const ESX_GRAIN_SECTORS: std::ops::RangeInclusive<u64> = 1..=4096;
const ESX_TABLE_ENTRIES: u64 = 4096;

/// Directory offset of a file that was written as a stream: the footer has the real offset.
pub(super) const AT_END: u64 = u64::MAX;
/// Bytes of the footer, its marker, and the end-of-stream marker after it.
const FOOTER_LENGTH: u64 = 3 * SECTOR;
pub(super) const FOOTER_MARKER: u32 = 3;

/// Offsets of the fields in bytes.
mod at {
    pub(super) const VERSION: usize = 4;
    pub(super) const FLAGS: usize = 8;
    pub(super) const CAPACITY: usize = 12;
    pub(super) const GRAIN_SIZE: usize = 20;
    pub(super) const DESCRIPTOR_OFFSET: usize = 28;
    pub(super) const DESCRIPTOR_SIZE: usize = 36;
    pub(super) const TABLE_ENTRIES: usize = 44;
    pub(super) const DIRECTORY: usize = 56;
    pub(super) const OVERHEAD: usize = 64;
    pub(super) const NEWLINES: usize = 73;
    pub(super) const COMPRESSION: usize = 77;

    /// The fields of an ESX extent.
    pub(super) const ESX_CAPACITY: usize = 12;
    pub(super) const ESX_GRAIN_SIZE: usize = 16;
    pub(super) const ESX_DIRECTORY: usize = 20;
}

/// The fields of a header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SparseHeader {
    /// Bytes of the extent's part of the disk.
    pub(super) capacity: u64,
    /// Bytes of a grain, a power of two.
    pub(super) grain_size: u64,
    /// Entries of a grain table.
    pub(super) table_entries: u64,
    /// Offset of the grain directory in the file.
    pub(super) directory: u64,
    pub(super) has_zero_grains: bool,
    pub(super) is_compressed: bool,
    /// The range in the storage of the file's own descriptor, if it has one.
    pub(super) descriptor: Option<ByteRange>,
}

impl SparseHeader {
    /// Reads the header of the file in the range `file` of `storage`; if the file has a footer,
    /// reads the footer instead.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset; or errors of the storage.
    pub(super) async fn read<S: Storage>(storage: &S, file: ByteRange) -> Result<Self> {
        let bytes = read(storage, file.offset(), LENGTH).await?;
        if bytes.starts_with(ESX_MAGIC) {
            return Self::parse_esx(&bytes, file);
        }
        if le64(&bytes, at::DIRECTORY) != AT_END || !bytes.starts_with(MAGIC) {
            return Self::parse(&bytes, file.offset(), file);
        }
        let start = file.length().checked_sub(FOOTER_LENGTH).filter(|&start| start >= SECTOR);
        let Some(start) = start.map(|start| file.offset() + start) else {
            return Err(corrupt("it ends before its footer", file.offset() + at::DIRECTORY as u64));
        };
        let footer = read(storage, start, FOOTER_LENGTH as usize).await?;
        let (marker, header) = (&footer[..LENGTH], &footer[LENGTH..2 * LENGTH]);
        let is_end = footer[2 * LENGTH..].iter().all(|&byte| byte == 0);
        if le32(marker, 8) != 0 || le32(marker, 12) != FOOTER_MARKER || !is_end {
            return Err(corrupt(
                "it has no footer at its end, as a stream that was cut off",
                start,
            ));
        }
        Self::parse(header, start + SECTOR, file)
    }

    /// Parses a header (or footer) at `offset` of the storage.
    fn parse(bytes: &[u8], offset: u64, file: ByteRange) -> Result<Self> {
        let field = |field: usize| offset + field as u64;
        check_kind(bytes, offset)?;
        let (capacity, grain) = (le64(bytes, at::CAPACITY), le64(bytes, at::GRAIN_SIZE));
        if capacity == 0 || capacity > MAX_SECTORS {
            let what = format!("an extent of {capacity} sectors");
            return Err(corrupt(what, field(at::CAPACITY)));
        }
        if !GRAIN_SECTORS.contains(&grain) || !grain.is_power_of_two() {
            let what = format!("grains of {grain} sectors are not supported");
            return Err(unsupported(what, field(at::GRAIN_SIZE)));
        }
        let entries = le32(bytes, at::TABLE_ENTRIES);
        if !TABLE_ENTRIES.contains(&entries) {
            let what = format!("grain tables of {entries} entries are not supported");
            return Err(unsupported(what, field(at::TABLE_ENTRIES)));
        }
        check_not_truncated(le64(bytes, at::OVERHEAD), file, field(at::OVERHEAD))?;
        let entries = u64::from(entries);
        let tables = capacity.div_ceil(grain * entries);
        let directory = le64(bytes, at::DIRECTORY).checked_mul(SECTOR);
        let directory = directory_in(file, directory, tables, field(at::DIRECTORY))?;
        let flags = le32(bytes, at::FLAGS);
        Ok(Self {
            capacity: capacity * SECTOR,
            grain_size: grain * SECTOR,
            table_entries: entries,
            directory,
            has_zero_grains: flags & ZERO_GRAINS != 0,
            is_compressed: flags & COMPRESSED != 0,
            descriptor: own_descriptor(bytes, offset, file)?,
        })
    }
}

impl SparseHeader {
    /// Parses the header of an ESX extent.
    fn parse_esx(bytes: &[u8], file: ByteRange) -> Result<Self> {
        let field = |field: usize| file.offset() + field as u64;
        let number = |field: usize| u64::from(le32(bytes, field));
        let (capacity, grain) = (number(at::ESX_CAPACITY), number(at::ESX_GRAIN_SIZE));
        if capacity == 0 {
            return Err(corrupt("an extent of 0 sectors", field(at::ESX_CAPACITY)));
        }
        if !ESX_GRAIN_SECTORS.contains(&grain) || !grain.is_power_of_two() {
            let what = format!("grains of {grain} sectors are not supported");
            return Err(unsupported(what, field(at::ESX_GRAIN_SIZE)));
        }
        let tables = capacity.div_ceil(grain * ESX_TABLE_ENTRIES);
        let directory = number(at::ESX_DIRECTORY) * SECTOR;
        let directory = directory_in(file, Some(directory), tables, field(at::ESX_DIRECTORY))?;
        Ok(Self {
            capacity: capacity * SECTOR,
            grain_size: grain * SECTOR,
            table_entries: ESX_TABLE_ENTRIES,
            directory,
            has_zero_grains: false,
            is_compressed: false,
            descriptor: None,
        })
    }

    /// VMware's name for the kind of an image that consists of this extent and has no descriptor.
    pub(super) fn create_type(&self) -> &'static str {
        match (self.is_compressed, self.table_entries) {
            (true, _) => "streamOptimized",
            (false, ESX_TABLE_ENTRIES) => "vmfsSparse",
            (false, _) => "monolithicSparse",
        }
    }
}

/// Refuses a file that is shorter than its metadata, which takes `overhead` sectors. Scripts look
/// for QEMU's words in the error. As in QEMU, a part of a sector counts as a sector.
fn check_not_truncated(overhead: u64, file: ByteRange, field: u64) -> Result<()> {
    let expected = overhead.saturating_mul(SECTOR);
    if file.length().next_multiple_of(SECTOR) >= expected {
        return Ok(());
    }
    let what = format!("File truncated, expecting at least {expected} bytes");
    let hint = "copy the file again, or restore it from a copy";
    Err(Error::new(ErrorKind::Corrupt, what).at(field).hint(hint))
}

/// The offset of a grain directory that names `tables` tables. Fails if any part of the directory
/// lies outside the file.
fn directory_in(file: ByteRange, start: Option<u64>, tables: u64, field: u64) -> Result<u64> {
    let end = start.and_then(|start| start.checked_add(tables * 4));
    let found = start.filter(|_| end.is_some_and(|end| end <= file.length()));
    found.ok_or_else(|| corrupt("its grain directory ends past the end of the file", field))
}

/// The range of the file's own descriptor in the storage; `None` if it has none.
fn own_descriptor(bytes: &[u8], offset: u64, file: ByteRange) -> Result<Option<ByteRange>> {
    let (start, sectors) = (le64(bytes, at::DESCRIPTOR_OFFSET), le64(bytes, at::DESCRIPTOR_SIZE));
    if start == 0 || sectors == 0 {
        return Ok(None);
    }
    let bytes = start.checked_mul(SECTOR).zip(sectors.checked_mul(SECTOR));
    let found = bytes.and_then(|(start, length)| ByteRange::new(start, length));
    match found.filter(|found| found.length() <= descriptor::MAX_LENGTH as u64) {
        Some(found) if found.end() <= file.length() => {
            let start = file.offset() + found.offset();
            Ok(Some(ByteRange::between(start, start + found.length())))
        }
        _ => Err(corrupt(
            "its descriptor is too long, or past the end",
            offset + at::DESCRIPTOR_OFFSET as u64,
        )),
    }
}

/// Refuses bytes that are not a header, and the header of an unsupported kind of image.
fn check_kind(bytes: &[u8], offset: u64) -> Result<()> {
    let field = |field: usize| offset + field as u64;
    if !bytes.starts_with(MAGIC) {
        return Err(other_signature("sparse extent of a VMDK image", offset));
    }
    let (version, flags) = (le32(bytes, at::VERSION), le32(bytes, at::FLAGS));
    if !VERSIONS.contains(&version) {
        let what = format!("version {version} is not supported");
        return Err(unsupported(what, field(at::VERSION)));
    }
    if flags & NEWLINE_TEST != 0 && array(bytes, at::NEWLINES) != *NEWLINES {
        let what = "it was changed by a transfer as text: copy it again as binary";
        return Err(corrupt(what, field(at::NEWLINES)));
    }
    let (is_compressed, algorithm) = (flags & COMPRESSED != 0, le16(bytes, at::COMPRESSION));
    if is_compressed && (algorithm != DEFLATE || flags & MARKERS == 0) {
        let what = format!("compression {algorithm}, or grains without markers");
        return Err(unsupported(what, field(at::COMPRESSION)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: u64 = 1 << 20;

    /// An extent of 64 MiB with grains of 64 KiB.
    fn sound() -> Vec<u8> {
        let mut bytes = vec![0; LENGTH];
        bytes[..4].copy_from_slice(MAGIC);
        for (field, value) in [
            (at::VERSION, 1),
            (at::FLAGS, NEWLINE_TEST),
            (at::CAPACITY, 131_072),
            (at::GRAIN_SIZE, 128),
            (at::DESCRIPTOR_OFFSET, 1),
            (at::DESCRIPTOR_SIZE, 20),
            (at::TABLE_ENTRIES, 512),
            (at::DIRECTORY, 26),
        ] {
            put(&mut bytes, field, value);
        }
        bytes[at::NEWLINES..][..4].copy_from_slice(NEWLINES);
        bytes
    }

    fn put(bytes: &mut [u8], field: usize, value: u32) {
        bytes[field..field + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn parse(bytes: &[u8]) -> Result<SparseHeader> {
        SparseHeader::parse(bytes, 4096, ByteRange::between(4096, 4096 + FILE))
    }

    #[test]
    fn a_sound_header_is_read() {
        let header = parse(&sound()).unwrap();
        assert_eq!((header.capacity, header.grain_size), (64 << 20, 64 << 10));
        assert_eq!(header.directory, 26 * 512);
        assert_eq!(header.descriptor, Some(ByteRange::between(4096 + 512, 4096 + 21 * 512)));
        assert!(!header.is_compressed && !header.has_zero_grains);
        let mut whole = sound();
        put(&mut whole, at::OVERHEAD, 2048);
        assert_eq!(parse(&whole).unwrap(), header);
    }

    #[test]
    fn extents_of_esx_have_fewer_fields() {
        let mut bytes = vec![0; LENGTH];
        bytes[..4].copy_from_slice(ESX_MAGIC);
        put(&mut bytes, at::ESX_CAPACITY, 8192);
        put(&mut bytes, at::ESX_GRAIN_SIZE, 1);
        put(&mut bytes, at::ESX_DIRECTORY, 4);
        let parse =
            |bytes: &[u8]| SparseHeader::parse_esx(bytes, ByteRange::between(4096, 4096 + FILE));
        let header = parse(&bytes).unwrap();
        assert_eq!((header.capacity, header.grain_size, header.directory), (4 << 20, 512, 2048));
        assert_eq!((header.table_entries, header.create_type()), (4096, "vmfsSparse"));
        for (field, value, words) in [
            (at::ESX_CAPACITY, 0, "0 sectors"),
            (at::ESX_GRAIN_SIZE, 0, "grains of 0"),
            (at::ESX_GRAIN_SIZE, 3, "grains of 3"),
            (at::ESX_DIRECTORY, 2048, "directory"),
        ] {
            let mut bytes = bytes.clone();
            put(&mut bytes, field, value);
            let error = parse(&bytes).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("offset 4"), "{field}: {error}");
        }
    }

    #[test]
    fn each_field_is_checked() {
        for (field, value, words) in [
            (0, 0, "another signature"),
            (at::VERSION, 0, "version 0"),
            (at::VERSION, 4, "version 4"),
            (at::FLAGS, NEWLINE_TEST | COMPRESSED | MARKERS, "compression 0"),
            (at::CAPACITY, 0, "0 sectors"),
            (at::CAPACITY + 4, 1 << 20, "sectors"),
            (at::GRAIN_SIZE, 0, "grains of 0"),
            (at::GRAIN_SIZE, 129, "grains of 129"),
            (at::GRAIN_SIZE, 8192, "grains of 8192"),
            (at::GRAIN_SIZE + 4, 1, "grains of"),
            (at::TABLE_ENTRIES, 0, "0 entries"),
            (at::TABLE_ENTRIES, 65_537, "65537 entries"),
            (at::DIRECTORY, 2048, "directory"),
            (at::DIRECTORY + 4, u32::MAX, "directory"),
            (at::CAPACITY + 4, 1 << 18, "directory"),
            (at::DESCRIPTOR_OFFSET, 2040, "descriptor"),
            (at::DESCRIPTOR_OFFSET + 4, u32::MAX, "descriptor"),
            (at::DESCRIPTOR_SIZE, 4096, "descriptor"),
            (at::OVERHEAD, 2049, "File truncated, expecting at least 1049088 bytes"),
            (at::OVERHEAD + 4, u32::MAX, "File truncated, expecting at least 1844674407370955"),
            (at::NEWLINES, 0, "as text"),
        ] {
            let mut bytes = sound();
            put(&mut bytes, field, value);
            let error = parse(&bytes).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("offset 4"), "{field}: {error}");
        }
    }
}
