//! Persistent dirty bitmaps as bytes: the header extension, the directory, the tables (QEMU's
//! `docs/interop/qcow2.txt`, "Bitmaps").
//!
//! A bitmap has a bit for each `granularity` bytes of the disk, the least significant bit of a byte
//! first. Each entry of its table is the offset of a cluster of bits, or states that the cluster's
//! bits are all zeros or all ones. The directory names the bitmaps, and the header extension has
//! the directory's offset. The extension and the directory are valid only while the autoclear bit
//! [`BITMAPS_CONSISTENT`] is set. Every value is checked against QEMU's bounds before use, so no
//! image is made that QEMU refuses.

use std::ops::Range;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use super::extensions;
use super::geometry::Geometry;
use super::header::Header;
use super::limits::{
    MAX_BITMAP_BYTES, MAX_BITMAP_DIRECTORY, MAX_BITMAP_NAME, MAX_BITMAP_TABLE, MAX_BITMAPS,
    MAX_GRANULARITY_BITS, MAX_OFFSET, MIN_GRANULARITY_BITS,
};
use super::words::{be32, be64, words_of};
use super::{names, table_io};

/// Autoclear feature bit: the bitmaps are consistent with the disk.
pub(crate) const BITMAPS_CONSISTENT: u64 = 1;
/// An autoclear bit that the format reserves: bitmaps that are in use and enabled contain all
/// changes, because their writer records each change before making it. Other programs clear unknown
/// autoclear bits before they change the disk.
pub(crate) const LIVE_BITMAPS: u64 = 1 << 63;

/// Bytes of the header extension.
const EXTENSION: usize = 24;
/// The length of an entry of the directory without its extra data and name.
const FIXED: usize = 24;
/// The only bitmap type of the format.
const DIRTY_TRACKING: u8 = 1;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const ALL_ONES: u64 = 1;

bitflags::bitflags! {
    /// Flags of a bitmap.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct BitmapFlags: u32 {
        /// The bitmap was not saved: a writer has it in memory, or died.
        const IN_USE = 1;
        /// The bitmap is enabled: every writer records its changes in it.
        const AUTO = 1 << 1;
        /// Extra data that is not understood may be ignored.
        const EXTRA_DATA_COMPATIBLE = 1 << 2;
    }
}

/// A dirty bitmap, as shown to users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// The name, unique in the image, 1 to 1023 bytes.
    pub name: String,
    /// The number of bytes of the disk that one bit represents: a power of two, 512 B to 2 GiB.
    pub granularity: u64,
    /// Whether changes of the disk are recorded in the bitmap.
    pub is_enabled: bool,
    /// Whether the bitmap is stored in an image.
    pub is_persistent: bool,
    /// Whether a writer has the bitmap in memory, or died before it saved the bitmap.
    pub is_in_use: bool,
    /// Whether the bitmap was not saved and lacks changes, so that it can only be removed.
    pub is_inconsistent: bool,
    /// The time, since the Unix epoch, at which this process stopped recording changes in it.
    pub lacks_since: Option<Duration>,
}

/// The location of the directory: the content of the header extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectoryLocation {
    pub(crate) count: u32,
    /// In bytes, without padding to a cluster.
    pub(crate) length: u64,
    pub(crate) offset: u64,
}

impl DirectoryLocation {
    /// The location in the header; `None` without bitmaps, or if they are not consistent with the
    /// disk. An error is the reason why the location is invalid.
    pub(crate) fn of(header: &Header) -> Result<Option<Self>, String> {
        let extension = extensions::find(&header.extensions, extensions::BITMAPS);
        match extension.filter(|_| header.autoclear & BITMAPS_CONSISTENT != 0) {
            Some(data) => Self::parse(data, header.geometry).map(Some),
            None => Ok(None),
        }
    }

    fn parse(data: &[u8], geometry: Geometry) -> Result<Self, String> {
        if data.len() != EXTENSION {
            return Err(format!("the header extension of bitmaps has {} bytes", data.len()));
        }
        let location = Self { count: be32(data, 0), length: be64(data, 8), offset: be64(data, 16) };
        let Self { count, length, offset } = location;
        if count == 0 || count > MAX_BITMAPS {
            return Err(format!("{count} bitmaps are not 1 to {MAX_BITMAPS}"));
        }
        if length > MAX_BITMAP_DIRECTORY {
            return Err(format!("the directory of bitmaps of {length} bytes is too long"));
        }
        if !is_possible(offset, length, geometry) {
            return Err(format!("the directory of bitmaps has the invalid offset {offset}"));
        }
        Ok(location)
    }

    /// The content of the header extension.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = u64::from(self.count).to_be_bytes().to_vec();
        bytes.rotate_left(4);
        bytes.extend(self.length.to_be_bytes());
        bytes.extend(self.offset.to_be_bytes());
        bytes
    }
}

fn is_possible(offset: u64, length: u64, geometry: Geometry) -> bool {
    offset != 0 && geometry.is_cluster_aligned(offset) && offset <= MAX_OFFSET - length
}

/// An entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BitmapEntry {
    pub(crate) table_offset: u64,
    /// Entries of the table.
    pub(crate) table_entries: u32,
    pub(crate) flags: BitmapFlags,
    pub(crate) granularity_bits: u32,
    pub(crate) name: Vec<u8>,
    kind: u8,
    /// All extra data, including parts that this program does not know.
    extra: Vec<u8>,
}

impl BitmapEntry {
    /// Writes the bitmap's granularity and the length of its table into a directory. `flags` is the
    /// position of the bitmap's flags in the directory.
    pub(crate) fn put_size(&self, directory: &mut [u8], flags: usize) {
        directory[flags - 4..flags].copy_from_slice(&self.table_entries.to_be_bytes());
        directory[flags + 5] = self.granularity_bits as u8;
    }

    /// An entry for a bitmap whose table has no offset yet.
    pub(crate) fn new(name: &[u8], granularity_bits: u32, flags: BitmapFlags) -> Self {
        Self {
            table_offset: 0,
            table_entries: 0,
            flags,
            granularity_bits,
            name: name.to_vec(),
            kind: DIRTY_TRACKING,
            extra: Vec::new(),
        }
    }

    /// Bytes of the table.
    pub(crate) fn table_length(&self) -> u64 {
        u64::from(self.table_entries) * 8
    }

    /// Whether the bitmap, in an image with this header, lacks changes of the disk.
    pub(crate) fn is_inconsistent(&self, header: &Header) -> bool {
        let is_live =
            header.autoclear & LIVE_BITMAPS != 0 && self.flags.contains(BitmapFlags::AUTO);
        self.flags.contains(BitmapFlags::IN_USE) && !is_live
    }

    /// The bitmap as shown to users.
    pub(crate) fn described(&self, header: &Header) -> Bitmap {
        Bitmap {
            name: names::listed(&self.name),
            granularity: 1 << self.granularity_bits,
            is_enabled: self.flags.contains(BitmapFlags::AUTO),
            is_persistent: true,
            is_in_use: self.flags.contains(BitmapFlags::IN_USE),
            is_inconsistent: self.is_inconsistent(header),
            lacks_since: None,
        }
    }

    /// The bitmap's name in messages.
    pub(crate) fn called(&self) -> String {
        format!("the bitmap '{}'", names::listed(&self.name).escape_default())
    }

    /// How many bits a disk of `size` bytes needs.
    pub(crate) fn bits_for(&self, size: u64) -> u64 {
        size.div_ceil(1 << self.granularity_bits)
    }

    /// The number of clusters of bits that a disk of `size` bytes needs, which is also the number
    /// of the table's entries.
    pub(crate) fn clusters_for(&self, size: u64, geometry: Geometry) -> u64 {
        geometry.clusters_for(self.bits_for(size).div_ceil(8))
    }

    /// The clusters of the bitmap: its table, and its bits.
    ///
    /// # Errors
    /// Errors of the storage when the table is read.
    pub(crate) async fn clusters<S: Storage>(
        &self,
        storage: &S,
        geometry: Geometry,
    ) -> Result<Vec<Range<u64>>> {
        let length = self.table_length();
        let first = geometry.cluster_of(self.table_offset);
        let mut clusters = Vec::new();
        clusters.push(first..first + geometry.clusters_for(length));
        let table = table_io::read(storage, self.table_offset, length as usize).await?;
        for word in words_of(&table) {
            // An invalid word refers to no known cluster.
            if let Ok(BitsCluster::Stored(offset)) = BitsCluster::parse(word, geometry) {
                let cluster = geometry.cluster_of(offset);
                clusters.push(cluster..cluster + 1);
            }
        }
        Ok(clusters)
    }

    /// The reason why no program can use the entry, in words that follow the bitmap's name.
    fn fault(&self, header: &Header) -> Option<String> {
        let geometry = header.geometry;
        let Self { table_offset, table_entries, granularity_bits, .. } = self;
        let bits = u64::from(*granularity_bits);
        if self.kind != DIRTY_TRACKING {
            return Some(format!("is of the unknown type {}", self.kind));
        }
        if !(MIN_GRANULARITY_BITS..=MAX_GRANULARITY_BITS).contains(granularity_bits) {
            return Some(format!("has the granularity 2^{bits}, which is not 512 B to 2 GiB"));
        }
        if self.name.is_empty() || self.name.len() > MAX_BITMAP_NAME {
            let length = self.name.len();
            return Some(format!("has a name of {length} bytes, not 1 to {MAX_BITMAP_NAME}"));
        }
        let unknown = self.flags.difference(BitmapFlags::all()).bits();
        if unknown != 0 {
            return Some(format!("has the unknown flags {unknown:#x}"));
        }
        if !self.extra.is_empty() && !self.flags.contains(BitmapFlags::EXTRA_DATA_COMPATIBLE) {
            return Some("has extra data that is not understood".into());
        }
        let length = self.table_length();
        let bytes = u64::from(*table_entries) << geometry.cluster_bits;
        let is_bounded = length <= MAX_BITMAP_TABLE && bytes <= MAX_BITMAP_BYTES;
        if *table_entries == 0 || !is_bounded || !is_possible(*table_offset, length, geometry) {
            return Some(format!(
                "has an impossible table: {table_entries} entries at offset {table_offset}"
            ));
        }
        let needed = self.clusters_for(header.size, geometry);
        if !self.is_inconsistent(header) && u64::from(*table_entries) < needed {
            return Some(format!("has a table of {table_entries} entries, too few for the disk"));
        }
        None
    }

    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.table_offset.to_be_bytes());
        bytes.extend(self.table_entries.to_be_bytes());
        bytes.extend(self.flags.bits().to_be_bytes());
        bytes.extend([self.kind, self.granularity_bits as u8]);
        bytes.extend((self.name.len() as u16).to_be_bytes());
        bytes.extend((self.extra.len() as u32).to_be_bytes());
        bytes.extend(&self.extra);
        bytes.extend(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }

    /// The entry at the beginning of `bytes`, and its length there; `None` if it is longer than
    /// `bytes`.
    fn take(bytes: &[u8]) -> Option<(Self, usize)> {
        if bytes.len() < FIXED {
            return None;
        }
        let name = usize::from(u16::from_be_bytes([bytes[18], bytes[19]]));
        let extra = be32(bytes, 20) as usize;
        let (extra_end, end) = (FIXED.checked_add(extra)?, (FIXED + name).checked_add(extra)?);
        let entry = Self {
            table_offset: be64(bytes, 0),
            table_entries: be32(bytes, 8),
            flags: BitmapFlags::from_bits_retain(be32(bytes, 12)),
            granularity_bits: u32::from(bytes[17]),
            name: bytes.get(extra_end..end)?.to_vec(),
            kind: bytes[16],
            extra: bytes[FIXED..extra_end].to_vec(),
        };
        Some((entry, end.next_multiple_of(8).min(bytes.len())))
    }
}

/// The index of the entry of the bitmap with this name.
///
/// # Errors
/// `InvalidInput` if no bitmap has the name.
pub(crate) fn index_of(image: &str, name: &str, entries: &[BitmapEntry]) -> Result<usize> {
    names::index_of(entries.iter().map(|entry| &entry.name[..]), name).ok_or_else(|| {
        let error = Error::new(ErrorKind::InvalidInput, format!("has no bitmap '{name}'"));
        error.on(image).hint("'bitmap list' names those that it has")
    })
}

/// Entries as the bytes of a directory.
pub(crate) fn to_bytes(entries: &[BitmapEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    entries.iter().for_each(|entry| entry.put(&mut bytes));
    bytes
}

/// The position of each entry's flags in the directory of these entries.
pub(crate) fn flags_positions(entries: &[BitmapEntry]) -> impl Iterator<Item = usize> {
    entries.iter().scan(0, |at, entry| {
        let flags = *at + 12;
        *at = (*at + FIXED + entry.extra.len() + entry.name.len()).next_multiple_of(8);
        Some(flags)
    })
}

/// The entries of a directory, each checked. An error is the reason why the directory is invalid.
pub(crate) fn parse(
    directory: &[u8],
    header: &Header,
    count: u32,
) -> Result<Vec<BitmapEntry>, String> {
    let mut entries: Vec<BitmapEntry> = Vec::new();
    let mut names = std::collections::HashSet::new();
    let mut rest = directory;
    for number in 0..count {
        let Some((entry, length)) = BitmapEntry::take(rest) else {
            return Err(format!("the directory of bitmaps ends before entry {number}"));
        };
        if let Some(fault) = entry.fault(header) {
            return Err(format!("{} {fault}", entry.called()));
        }
        if !names.insert(entry.name.clone()) {
            return Err(format!("{} is there twice", entry.called()));
        }
        rest = &rest[length..];
        entries.push(entry);
    }
    match rest {
        [] => Ok(entries),
        rest => Err(format!("the directory of bitmaps has {} bytes too many", rest.len())),
    }
}

/// An entry of a bitmap's table: the state of one cluster of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BitsCluster {
    Zeros,
    Ones,
    /// At this offset.
    Stored(u64),
}

impl BitsCluster {
    /// Parses a word of the table. An error is the rule that the word breaks.
    pub(crate) fn parse(word: u64, geometry: Geometry) -> Result<Self, &'static str> {
        let offset = word & OFFSET;
        if word & !(OFFSET | ALL_ONES) != 0 || (offset != 0 && word & ALL_ONES != 0) {
            Err("has reserved bits set")
        } else if !geometry.is_cluster_aligned(offset) {
            Err("refers to bits that do not start at a cluster")
        } else {
            Ok(match word {
                0 => Self::Zeros,
                ALL_ONES => Self::Ones,
                offset => Self::Stored(offset),
            })
        }
    }

    pub(crate) fn word(self) -> u64 {
        match self {
            Self::Zeros => 0,
            Self::Ones => ALL_ONES,
            Self::Stored(offset) => offset,
        }
    }
}

/// The bitmaps of an image; none if they are not consistent with the disk.
///
/// # Errors
/// Errors of the storage; `Corrupt` if the directory or an entry is out of bounds.
pub(crate) async fn read<S: Storage>(storage: &S, header: &Header) -> Result<Vec<BitmapEntry>> {
    let refuse = |what: String, offset: u64| {
        Error::new(ErrorKind::Corrupt, what)
            .on(storage.name())
            .at(offset)
            .hint("check tells more of it")
    };
    let location = DirectoryLocation::of(header);
    let location = location.map_err(|why| refuse(why, header.length as u64))?;
    let Some(DirectoryLocation { count, length, offset }) = location else { return Ok(Vec::new()) };
    if offset.saturating_add(length) > storage.size() {
        return Err(refuse("the directory of bitmaps is past the end of the file".into(), offset));
    }
    let directory = table_io::read(storage, offset, length as usize).await?;
    parse(&directory, header, count).map_err(|why| refuse(why, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry::COMMON;

    /// A header for a disk of 1 GiB.
    fn header() -> Header {
        let mut bytes = vec![0; 1 << 16];
        bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        let fields: [(usize, u32); 9] = [
            (20, 16),
            (28, 1 << 30),
            (36, 2),
            (44, 3 << 16),
            (52, 1 << 16),
            (56, 1),
            (96, 4),
            (100, 104),
            (92, 1),
        ];
        for (at, value) in fields {
            bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        Header::parse(&bytes, 1).expect("a header")
    }

    #[test]
    fn a_bitmap_in_use_lacks_changes_unless_its_session_records_all() {
        let mut header = header();
        let of = |flags| BitmapEntry { flags, ..entry("one") };
        let live = of(BitmapFlags::IN_USE | BitmapFlags::AUTO);
        assert!(live.is_inconsistent(&header));
        header.autoclear |= LIVE_BITMAPS;
        assert!(!live.is_inconsistent(&header));
        assert!(of(BitmapFlags::IN_USE).is_inconsistent(&header), "it was not enabled");
        assert!(!of(BitmapFlags::AUTO).is_inconsistent(&header));
    }

    fn entry(name: &str) -> BitmapEntry {
        BitmapEntry {
            table_offset: 5 << 16,
            table_entries: 1,
            ..BitmapEntry::new(name.as_bytes(), 16, BitmapFlags::AUTO)
        }
    }

    #[test]
    fn an_entry_comes_back_as_it_was_stored() {
        let one = BitmapEntry { extra: vec![7; 13], ..entry("first") };
        let two = entry("second");
        let bytes = to_bytes(&[one.clone(), two.clone()]);
        let (taken, length) = BitmapEntry::take(&bytes).expect("it is whole");
        assert_eq!((&taken, length % 8), (&one, 0));
        assert_eq!(BitmapEntry::take(&bytes[length..]), Some((two, bytes.len() - length)));
        assert_eq!(BitmapEntry::take(&bytes[..length - 9]), None);
        assert!(flags_positions(&[taken.clone(), taken]).eq([12, length + 12]));
    }

    #[test]
    fn the_extension_comes_back_as_it_was_stored() {
        let location = DirectoryLocation { count: 3, length: 96, offset: 7 << 16 };
        let bytes = location.to_bytes();
        assert_eq!(bytes[..8], [0, 0, 0, 3, 0, 0, 0, 0]);
        assert_eq!(DirectoryLocation::parse(&bytes, GEOMETRY), Ok(location));
        assert!(DirectoryLocation::parse(&bytes[..16], GEOMETRY).is_err());
    }

    #[test]
    fn what_is_out_of_its_bounds_is_refused() {
        let header = header();
        assert_eq!(entry("good").fault(&header), None);
        let bad = [
            BitmapEntry { kind: 2, ..entry("bad") },
            BitmapEntry { granularity_bits: 8, ..entry("bad") },
            BitmapEntry { granularity_bits: 32, ..entry("bad") },
            BitmapEntry { name: vec![b'x'; 1024], ..entry("bad") },
            BitmapEntry { flags: BitmapFlags::from_bits_retain(8), ..entry("bad") },
            BitmapEntry { extra: vec![1], ..entry("bad") },
            BitmapEntry { table_entries: 0, ..entry("bad") },
            BitmapEntry { table_entries: u32::MAX, ..entry("bad") },
            BitmapEntry { table_offset: 512, ..entry("bad") },
            BitmapEntry { granularity_bits: 9, ..entry("too few entries") },
        ];
        for bad in bad {
            assert!(bad.fault(&header).is_some(), "{bad:?}");
        }
    }

    #[test]
    fn a_table_says_where_bits_are() {
        for (word, wanted) in [
            (0, BitsCluster::Zeros),
            (1, BitsCluster::Ones),
            (5 << 16, BitsCluster::Stored(5 << 16)),
        ] {
            assert_eq!(BitsCluster::parse(word, GEOMETRY), Ok(wanted));
            assert_eq!(wanted.word(), word);
        }
        for word in [2, 1 << 60, 5 << 16 | 1, 512] {
            assert!(BitsCluster::parse(word, GEOMETRY).is_err(), "{word:#x}");
        }
    }
}
