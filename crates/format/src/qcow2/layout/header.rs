//! The header of an image: its fields, their checks, and changes of them.
//!
//! Every field is checked before anything is computed from it. Unknown fields are kept: a change of
//! the header replaces only the fields that can change, in the bytes that were read. All fields
//! that can change are in the first 512 bytes, so that a change is atomic.

use std::hash::{BuildHasher, Hasher, RandomState};

use blockhouse_core::ByteRange;

use super::compression::Compression;
use super::extensions::{self, Extension};
use super::geometry::Geometry;
use super::limits::{MAX_FILE_NAME, MAX_L1_BYTES, MAX_OFFSET, MAX_REFCOUNT_TABLE, MAX_SNAPSHOTS};
use super::options::{Backing, DataFile, Switch};
use super::words::{be32, be64};

/// The first bytes of every image.
pub(crate) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// The length of a version 2 header.
pub(crate) const LENGTH_2: usize = 72;
/// The minimum length of a version 3 header.
pub(crate) const LENGTH_3: usize = 104;
/// The kinds of encryption.
const CRYPT_AES: u32 = 1;
const CRYPT_LUKS: u32 = 2;
/// The maximum size of an encryption's header in bytes; QEMU writes about 2 MiB.
const MAX_ENCRYPTION_HEADER: u64 = 16 << 20;
/// Bytes of the first sector: all changes of the header are in it.
pub(crate) const SECTOR: usize = 512;

bitflags::bitflags! {
    /// Features that a program must support to open an image.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Incompatible: u64 {
        /// Refcounts may be wrong.
        const DIRTY = 1;
        /// Tables may be wrong.
        const CORRUPT = 1 << 1;
        /// Guest data is in another file.
        const DATA_FILE = 1 << 2;
        /// The header names a kind of compression.
        const COMPRESSION = 1 << 3;
        /// L2 entries have subclusters.
        const EXTENDED_L2 = 1 << 4;
    }
}

/// Compatible feature bit: refcounts may be written late.
pub(crate) const LAZY_REFCOUNTS: u64 = 1;
/// Autoclear feature bit: the data file reads as the guest's disk.
pub(crate) const RAW_DATA_FILE: u64 = 1 << 1;
/// Autoclear bit, which the format reserves: a process that keeps a redo log has the image open for
/// writing, or died with the image open. Other programs clear unknown autoclear bits before they
/// change the image.
pub(crate) const SESSION: u64 = 1 << 62;
/// The session bit, and the session's number in the autoclear bits 30 to 61. Reason for the number:
/// a log must not match an image that another process with a log has changed later. All these bits
/// are cleared together.
pub(crate) const SESSION_BITS: u64 = SESSION | SESSION_NUMBER;
const SESSION_NUMBER: u64 = (u32::MAX as u64) << 30;

/// The autoclear bits of a new session. The session's number is random: the previous number is
/// unknown, because other programs clear the bits.
pub(crate) fn new_session() -> u64 {
    // Each `RandomState` has random keys.
    let number = RandomState::new().build_hasher().finish();
    SESSION | number << 30 & SESSION_NUMBER
}

/// A header whose fields were checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) geometry: Geometry,
    /// Bytes of the guest's disk, a multiple of 512.
    pub(crate) size: u64,
    /// The size in the file minus `size`, in bytes: less than a sector. No guest can read these
    /// bytes (QEMU rounds the size down, too). The next change of the header drops them.
    pub(crate) excess: u64,
    pub(crate) l1_offset: u64,
    pub(crate) l1_entries: u32,
    pub(crate) refcount_table_offset: u64,
    pub(crate) refcount_table_clusters: u32,
    pub(crate) snapshots: u32,
    pub(crate) snapshots_offset: u64,
    /// The fault of `snapshots` or `snapshots_offset`, if they describe an impossible snapshot
    /// table. The disk can still be read.
    pub(crate) snapshot_fault: Option<HeaderError>,
    pub(crate) incompatible: Incompatible,
    pub(crate) compatible: u64,
    pub(crate) autoclear: u64,
    pub(crate) compression: Compression,
    pub(crate) backing: Option<Backing>,
    pub(crate) data_file: Option<DataFile>,
    /// The encryption of the guest's data, if any.
    pub(crate) encryption: Option<EncryptionKind>,
    pub(crate) extensions: Vec<Extension>,
    /// Bytes from the start of the file to the first extension.
    pub(crate) length: usize,
}

/// The encryption of the guest's data of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncryptionKind {
    /// QEMU's encryption before LUKS: AES-128-CBC, with the password as the key.
    Aes,
    /// Encryption with keys in a LUKS header, which takes these whole clusters.
    Luks(ByteRange),
}

/// Why a header is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeaderError {
    pub(crate) what: String,
    /// The offset of the field in the file.
    pub(crate) offset: u64,
    pub(crate) reason: HeaderErrorKind,
}

/// The kind of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderErrorKind {
    /// The header violates the format.
    Corrupt,
    /// The header requires an unsupported feature.
    Unsupported,
}

fn corrupt(offset: u64, what: impl Into<String>) -> HeaderError {
    HeaderError { what: what.into(), offset, reason: HeaderErrorKind::Corrupt }
}

fn unsupported(offset: u64, what: impl Into<String>) -> HeaderError {
    HeaderError { what: what.into(), offset, reason: HeaderErrorKind::Unsupported }
}

/// The exponent of the cluster size (a power of two), from the first bytes of a header.
/// [`Header::parse`] needs the bytes of the whole first cluster.
pub(crate) fn cluster_bits(first: &[u8]) -> Result<u32, HeaderError> {
    if first.len() < LENGTH_2 || first[..4] != MAGIC {
        return Err(corrupt(0, "not a qcow2 image: the magic bytes are missing"));
    }
    let version = be32(first, 4);
    if !(2..=3).contains(&version) {
        return Err(unsupported(4, format!("qcow2 version {version} is neither 2 nor 3")));
    }
    let bits = be32(first, 20);
    if !(9..=21).contains(&bits) {
        return Err(corrupt(20, format!("clusters of 2^{bits} bytes are not 512 B to 2 MiB")));
    }
    Ok(bits)
}

impl Header {
    /// Reads a header from the first cluster of a file on a storage with blocks of `block` bytes.
    pub(crate) fn parse(bytes: &[u8], block: u32) -> Result<Self, HeaderError> {
        let cluster_bits = cluster_bits(bytes)?;
        let version = be32(bytes, 4);
        let features = Features::parse(bytes, version)?;
        let geometry = Geometry {
            version,
            cluster_bits,
            refcount_order: features.refcount_order,
            extended_l2: features.incompatible.contains(Incompatible::EXTENDED_L2),
            has_data_file: features.incompatible.contains(Incompatible::DATA_FILE),
            block,
        };
        if geometry.extended_l2 && cluster_bits < 14 {
            return Err(corrupt(20, "subclusters need clusters of 16 KiB or more"));
        }
        let extensions_end = match be64(bytes, 8) {
            0 => bytes.len(),
            offset => offset.min(bytes.len() as u64) as usize,
        };
        let extensions = extensions::parse(bytes, features.length, extensions_end)
            .map_err(|(what, at)| corrupt(at as u64, what))?;
        features.check_known(&extensions)?;
        let mut header = Self {
            geometry,
            size: be64(bytes, 24) & !(SECTOR as u64 - 1),
            excess: be64(bytes, 24) % SECTOR as u64,
            l1_offset: be64(bytes, 40),
            l1_entries: be32(bytes, 36),
            refcount_table_offset: be64(bytes, 48),
            refcount_table_clusters: be32(bytes, 56),
            snapshots: be32(bytes, 60),
            snapshots_offset: be64(bytes, 64),
            snapshot_fault: None,
            incompatible: features.incompatible,
            compatible: features.compatible,
            autoclear: features.autoclear,
            compression: features.compression,
            backing: backing(bytes, &extensions)?,
            data_file: data_file(&features, &extensions)?,
            encryption: encryption(bytes, &extensions, geometry)?,
            extensions,
            length: features.length,
        };
        header.check_tables()?;
        header.check_data_file()?;
        header.snapshot_fault = header.check_snapshots().err();
        Ok(header)
    }

    /// Refuses unsupported combinations of a data file with other features.
    fn check_data_file(&self) -> Result<(), HeaderError> {
        let Some(DataFile { raw, .. }) = &self.data_file else { return Ok(()) };
        if self.snapshots > 0 {
            return Err(unsupported(60, "snapshots of an image with a data file"));
        }
        if *raw == Switch::On && self.backing.is_some() {
            return Err(unsupported(
                8,
                "a backing file of an image whose data file is the raw disk",
            ));
        }
        Ok(())
    }

    /// Whether refcounts are written late (lazy refcounts): the image is marked as dirty instead,
    /// until a writeback covers all metadata.
    pub(crate) fn has_late_refcounts(&self) -> bool {
        self.compatible & LAZY_REFCOUNTS != 0
    }

    /// The autoclear bits, other than [`SESSION_BITS`], that stay valid after every change of the
    /// image.
    pub(crate) fn preserved_autoclear(&self) -> u64 {
        if self.geometry.has_data_file { RAW_DATA_FILE } else { 0 }
    }

    fn check_tables(&self) -> Result<(), HeaderError> {
        let geometry = self.geometry;
        let needed = geometry.l1_entries_for(self.size);
        let bytes = u64::from(self.l1_entries) * 8;
        if bytes > MAX_L1_BYTES || needed * 8 > MAX_L1_BYTES {
            let entries = needed.max(u64::from(self.l1_entries));
            return Err(corrupt(36, format!("an L1 table of {entries} entries exceeds 32 MiB")));
        }
        if u64::from(self.l1_entries) < needed {
            let what = format!("an L1 table of {} entries, {needed} needed", self.l1_entries);
            return Err(corrupt(36, what));
        }
        let table = |name, field, offset, bytes| self.check_table(name, field, offset, bytes);
        if self.l1_entries > 0 {
            table("L1 table", 40, self.l1_offset, bytes)?;
        }
        let clusters = u64::from(self.refcount_table_clusters);
        let bytes = clusters << geometry.cluster_bits;
        if clusters == 0 || bytes > MAX_REFCOUNT_TABLE {
            let what = format!("a refcount table of {clusters} clusters is not 1 cluster to 8 MiB");
            return Err(corrupt(56, what));
        }
        table("refcount table", 48, self.refcount_table_offset, bytes)
    }

    fn check_snapshots(&self) -> Result<(), HeaderError> {
        if self.snapshots > MAX_SNAPSHOTS {
            let what = format!("{} snapshots are more than {MAX_SNAPSHOTS}", self.snapshots);
            return Err(corrupt(60, what));
        }
        if self.snapshots > 0 {
            let length = u64::from(self.snapshots) * 40;
            self.check_table("snapshot table", 64, self.snapshots_offset, length)?;
        }
        Ok(())
    }

    /// Whether the header's offset of the snapshot table is valid.
    pub(crate) fn has_possible_snapshot_table(&self) -> bool {
        self.check_table("snapshot table", 64, self.snapshots_offset, 0).is_ok()
    }

    fn check_table(&self, name: &str, field: u64, at: u64, bytes: u64) -> Result<(), HeaderError> {
        if at == 0 || !self.geometry.is_cluster_aligned(at) {
            return Err(corrupt(field, format!("the {name} cannot be at offset {at}")));
        }
        if at > MAX_OFFSET - bytes {
            return Err(corrupt(field, format!("the {name} at offset {at} is out of bounds")));
        }
        Ok(())
    }

    /// Stores the fields that can change into `bytes`, from which the header was read.
    pub(crate) fn patch(&self, bytes: &mut [u8]) {
        let mut put = |offset: usize, field: &[u8]| {
            bytes[offset..offset + field.len()].copy_from_slice(field);
        };
        put(4, &self.geometry.version.to_be_bytes());
        put(24, &self.size.to_be_bytes());
        put(36, &self.l1_entries.to_be_bytes());
        put(40, &self.l1_offset.to_be_bytes());
        put(48, &self.refcount_table_offset.to_be_bytes());
        put(56, &self.refcount_table_clusters.to_be_bytes());
        put(60, &self.snapshots.to_be_bytes());
        put(64, &self.snapshots_offset.to_be_bytes());
        if self.geometry.version >= 3 {
            put(72, &self.incompatible.bits().to_be_bytes());
            put(80, &self.compatible.to_be_bytes());
            put(88, &self.autoclear.to_be_bytes());
            put(96, &self.geometry.refcount_order.to_be_bytes());
            put(100, &(self.length as u32).to_be_bytes());
        }
    }

    /// Removes the names of feature bits if the extensions otherwise do not fit into the first
    /// sector. Only messages use the names. `sector` is the first sector as on disk. Returns
    /// whether the extensions fit now.
    pub(crate) fn fit_extensions(&mut self, sector: &[u8]) -> bool {
        let room = Self::extensions_end(sector).saturating_sub(self.length);
        let fits = |list: &[Extension]| extensions::to_bytes(list).len() <= room;
        if !fits(&self.extensions) {
            self.extensions.retain(|extension| extension.kind != extensions::FEATURE_NAMES);
        }
        fits(&self.extensions)
    }

    /// Stores the extensions into the first sector. They must [fit](Self::fit_extensions).
    pub(crate) fn put_extensions(&self, sector: &mut [u8]) {
        let end = Self::extensions_end(sector);
        let list = extensions::to_bytes(&self.extensions);
        sector[self.length..end].fill(0);
        sector[self.length..self.length + list.len()].copy_from_slice(&list);
    }

    /// The end of the space for extensions in the first sector: the start of the backing file's
    /// name, if the name is in this sector, else the end of the sector.
    fn extensions_end(sector: &[u8]) -> usize {
        match be64(sector, 8) {
            0 => SECTOR,
            name => name.min(SECTOR as u64) as usize,
        }
    }

    /// The bytes of a new header: fields, extensions, name of the backing file. `None` if they do
    /// not fit into the first cluster.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.length];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[20..24].copy_from_slice(&self.geometry.cluster_bits.to_be_bytes());
        let encryption = match self.encryption {
            None => 0,
            Some(EncryptionKind::Aes) => CRYPT_AES,
            Some(EncryptionKind::Luks(_)) => CRYPT_LUKS,
        };
        bytes[32..36].copy_from_slice(&encryption.to_be_bytes());
        if self.length > LENGTH_3 {
            bytes[LENGTH_3] = self.compression as u8;
        }
        self.patch(&mut bytes);
        bytes.extend(extensions::to_bytes(&self.extensions));
        if let Some(backing) = &self.backing {
            let offset = bytes.len() as u64;
            bytes[8..16].copy_from_slice(&offset.to_be_bytes());
            bytes[16..20].copy_from_slice(&(backing.name.len() as u32).to_be_bytes());
            bytes.extend_from_slice(&backing.name);
        }
        (bytes.len() as u64 <= self.geometry.cluster_size()).then_some(bytes)
    }
}

/// The fields that version 3 added; for version 2, their implied values.
struct Features {
    incompatible: Incompatible,
    compatible: u64,
    autoclear: u64,
    refcount_order: u32,
    length: usize,
    compression: Compression,
}

impl Features {
    fn parse(bytes: &[u8], version: u32) -> Result<Self, HeaderError> {
        if version == 2 {
            return Ok(Self {
                incompatible: Incompatible::empty(),
                compatible: 0,
                autoclear: 0,
                refcount_order: 4,
                length: LENGTH_2,
                compression: Compression::Zlib,
            });
        }
        let length = be32(bytes, 100) as usize;
        if length < LENGTH_3 || !length.is_multiple_of(8) || length > bytes.len() {
            return Err(corrupt(100, format!("a header of {length} bytes")));
        }
        let refcount_order = be32(bytes, 96);
        if refcount_order > 6 {
            return Err(corrupt(96, format!("refcounts of 2^{refcount_order} bits")));
        }
        let incompatible = Incompatible::from_bits_retain(be64(bytes, 72));
        let kind = if length > LENGTH_3 { bytes[LENGTH_3] } else { 0 };
        let compression = match kind {
            0 => Compression::Zlib,
            1 => Compression::Zstd,
            _ => return Err(unsupported(104, format!("compression of the unknown kind {kind}"))),
        };
        if (compression != Compression::Zlib) != incompatible.contains(Incompatible::COMPRESSION) {
            return Err(corrupt(104, "the kind of compression contradicts the feature bits"));
        }
        let (compatible, autoclear) = (be64(bytes, 80), be64(bytes, 88));
        Ok(Self { incompatible, compatible, autoclear, refcount_order, length, compression })
    }

    fn check_known(&self, extensions: &[Extension]) -> Result<(), HeaderError> {
        let unknown = self.incompatible.difference(Incompatible::all()).bits();
        if unknown != 0 {
            let bits = (0..u64::BITS).filter(|bit| unknown >> bit & 1 != 0);
            let named = bits.map(|bit| {
                let name = extensions::incompatible_feature_name(extensions, bit);
                format!("{bit}{}", name.map_or_else(String::new, |name| format!(" ('{name}')")))
            });
            let named = named.collect::<Vec<_>>();
            let plural = if named.len() > 1 { "s" } else { "" };
            let what = format!("the image needs the unknown feature{plural} {}", named.join(", "));
            return Err(unsupported(72, what));
        }
        Ok(())
    }
}

fn data_file(
    features: &Features,
    extensions: &[Extension],
) -> Result<Option<DataFile>, HeaderError> {
    if !features.incompatible.contains(Incompatible::DATA_FILE) {
        return Ok(None);
    }
    let Some(name) = extensions::find(extensions, extensions::DATA_FILE) else {
        return Err(unsupported(72, "the image does not name its data file"));
    };
    if name.is_empty() || name.len() > MAX_FILE_NAME {
        let what = format!("a data file's name of {} bytes is not 1 to 1023", name.len());
        return Err(corrupt(features.length as u64, what));
    }
    let raw = (features.autoclear & RAW_DATA_FILE != 0).into();
    Ok(Some(DataFile { name: name.to_vec(), raw }))
}

fn encryption(
    bytes: &[u8],
    extensions: &[Extension],
    geometry: Geometry,
) -> Result<Option<EncryptionKind>, HeaderError> {
    match be32(bytes, 32) {
        0 => return Ok(None),
        CRYPT_AES => return Ok(Some(EncryptionKind::Aes)),
        CRYPT_LUKS => {}
        other => return Err(unsupported(32, format!("an encryption of the unknown kind {other}"))),
    }
    let place =
        extensions::find(extensions, extensions::ENCRYPTION).filter(|data| data.len() >= 16);
    let Some(place) = place else {
        return Err(corrupt(32, "the image is encrypted, and does not say where its keys are"));
    };
    let (offset, length) = (be64(place, 0), be64(place, 8));
    if offset == 0 || !geometry.is_cluster_aligned(offset) || offset > MAX_OFFSET {
        return Err(corrupt(32, format!("the encryption's header cannot be at offset {offset}")));
    }
    if length == 0 || length > MAX_ENCRYPTION_HEADER {
        return Err(corrupt(32, format!("an encryption's header of {length} bytes")));
    }
    let length = length.next_multiple_of(geometry.cluster_size());
    Ok(Some(EncryptionKind::Luks(ByteRange::between(offset, offset + length))))
}

fn backing(bytes: &[u8], extensions: &[Extension]) -> Result<Option<Backing>, HeaderError> {
    let offset = be64(bytes, 8);
    let length = be32(bytes, 16) as usize;
    if offset == 0 || length == 0 {
        return Ok(None);
    }
    if length > MAX_FILE_NAME {
        let what = format!("a backing file's name of {length} bytes is longer than 1023");
        return Err(corrupt(16, what));
    }
    if offset.saturating_add(length as u64) > bytes.len() as u64 {
        return Err(corrupt(8, "the backing file's name is not in the first cluster"));
    }
    let name = bytes[offset as usize..offset as usize + length].to_vec();
    let format = extensions::find(extensions, extensions::BACKING_FORMAT)
        .map(|name| String::from_utf8_lossy(name).into_owned());
    Ok(Some(Backing { name, format }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            geometry: Geometry {
                version: 3,
                cluster_bits: 16,
                refcount_order: 4,
                extended_l2: false,
                has_data_file: false,
                block: 1,
            },
            size: 1 << 30,
            excess: 0,
            l1_offset: 3 << 16,
            l1_entries: 2,
            refcount_table_offset: 1 << 16,
            refcount_table_clusters: 1,
            snapshots: 0,
            snapshots_offset: 0,
            snapshot_fault: None,
            incompatible: Incompatible::empty(),
            compatible: 0,
            autoclear: 0,
            compression: Compression::Zlib,
            data_file: None,
            encryption: None,
            backing: Some(Backing { name: b"base.img".to_vec(), format: Some("raw".into()) }),
            extensions: vec![
                Extension { kind: extensions::BACKING_FORMAT, data: b"raw".to_vec() },
                Extension { kind: 0xfeed, data: vec![1, 2, 3] },
            ],
            length: 112,
        }
    }

    fn bytes() -> Vec<u8> {
        let mut bytes = header().to_bytes().expect("it fits");
        bytes.resize(1 << 16, 0);
        bytes
    }

    #[test]
    fn a_header_comes_back_as_it_was_stored() {
        assert_eq!(Header::parse(&bytes(), 1), Ok(header()));
        let encrypted = Header { encryption: Some(EncryptionKind::Aes), ..header() };
        let mut bytes = encrypted.to_bytes().expect("it fits");
        bytes.resize(1 << 16, 0);
        assert_eq!(Header::parse(&bytes, 1), Ok(encrypted));
    }

    #[test]
    fn each_field_out_of_its_bounds_is_named_by_its_offset() {
        let cases: [(usize, &[u8]); 13] = [
            (0, b"QFJ"),
            (4, &4u32.to_be_bytes()),
            (8, &u64::MAX.to_be_bytes()),
            (16, &1024u32.to_be_bytes()),
            (20, &22u32.to_be_bytes()),
            (32, &3u32.to_be_bytes()),
            (36, &1u32.to_be_bytes()),
            (40, &512u64.to_be_bytes()),
            (48, &(MAX_OFFSET - (1 << 15)).to_be_bytes()),
            (56, &129u32.to_be_bytes()),
            (72, &32u64.to_be_bytes()),
            (96, &7u32.to_be_bytes()),
            (100, &96u32.to_be_bytes()),
        ];
        for (offset, value) in cases {
            let mut bytes = bytes();
            bytes[offset..offset + value.len()].copy_from_slice(value);
            let refusal = Header::parse(&bytes, 1).expect_err(&format!("field at {offset}"));
            assert_eq!(refusal.offset, offset as u64, "{refusal:?}");
        }
    }

    #[test]
    fn an_impossible_snapshot_table_is_named_and_leaves_the_disk_readable() {
        let cases: [(usize, &[u8], u64); 2] =
            [(60, &65537_u32.to_be_bytes(), 60), (62, &[0, 1, 0, 0, 0, 0, 0, 0, 2, 0], 64)];
        for (offset, value, field) in cases {
            let mut bytes = bytes();
            bytes[offset..offset + value.len()].copy_from_slice(value);
            let header = Header::parse(&bytes, 1).expect("the disk can be read");
            assert_eq!(header.snapshot_fault.map(|fault| fault.offset), Some(field));
        }
    }

    #[test]
    fn a_size_with_a_part_of_a_sector_is_rounded_down() {
        let mut bytes = bytes();
        bytes[24..32].copy_from_slice(&((1_u64 << 30) + 100).to_be_bytes());
        assert_eq!(Header::parse(&bytes, 1), Ok(Header { excess: 100, ..header() }));
    }

    #[test]
    fn a_backing_name_longer_than_its_cluster_is_refused() {
        let mut bytes = bytes();
        bytes.truncate(512);
        let fields = [(4, 2), (12, 80), (16, 1000), (20, 9), (28, 512), (36, 1), (44, 512)];
        for (offset, value) in fields {
            bytes[offset..offset + 4].copy_from_slice(&u32::to_be_bytes(value));
        }
        let refusal = Header::parse(&bytes, 1).unwrap_err();
        assert_eq!(refusal.offset, 8, "{refusal:?}");
    }

    #[test]
    fn a_change_keeps_what_is_not_understood() {
        let mut before = bytes();
        before[105] = 7;
        let mut header = Header::parse(&before, 1).unwrap();
        header.size -= 1 << 29;
        let mut after = before.clone();
        header.patch(&mut after);
        let changed: Vec<_> = (0..before.len()).filter(|&i| before[i] != after[i]).collect();
        assert_eq!(changed, [28], "the big-endian size");
        assert_eq!(Header::parse(&after, 1), Ok(header));
    }
}
