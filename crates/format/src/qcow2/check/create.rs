//! New images.
//!
//! The header is written last, after everything else is durable: until then the file is not an
//! image.

use std::time::Duration;

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode, ToolProgress, Unmap,
};

use crate::qcow2::layout::compression::Compression;
use crate::qcow2::layout::data_file_mark::DataFileMark;
use crate::qcow2::layout::entry::{Entry, Reference, SubclusterBitmap, l1_word};
use crate::qcow2::layout::extensions::{self, BACKING_FORMAT, Extension};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::{
    EncryptionKind, Header, Incompatible, LAZY_REFCOUNTS, LENGTH_2, LENGTH_3, RAW_DATA_FILE,
};
use crate::qcow2::layout::limits::{MAX_FILE_NAME, MAX_L1_BYTES, MAX_OFFSET, MAX_REFCOUNT_TABLE};
use crate::qcow2::layout::options::{Backing, DataFile, Switch, Version};
use crate::qcow2::layout::{refcount, table_io, words};
use crate::{SpaceMode, preallocate};

/// The space that a new image allocates at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing for the guest.
    #[default]
    Off,
    /// All tables, with a host cluster for every guest cluster; the host clusters are holes of the
    /// file.
    Metadata,
    /// As `Metadata`, and the host's file system reserves the space.
    Falloc,
    /// As `Falloc`, and the space is filled with zeros.
    Full,
}

/// The options of a new image.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Bytes of the guest's disk, a multiple of 512.
    pub size: u64,
    /// Bytes of a cluster: a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// Bits of a refcount: 1, 2, 4, 8, 16, 32 or 64.
    pub refcount_bits: u32,
    /// The revision of the format.
    pub version: Version,
    /// Whether refcounts may be written late.
    pub lazy_refcounts: Switch,
    /// Whether clusters have 32 subclusters each.
    pub extended_l2: Switch,
    /// How clusters will be compressed.
    pub compression: Compression,
    /// The backing file.
    pub backing: Option<Backing>,
    /// The file with the guest's clusters, if it is not the image itself. If the data file is the
    /// raw disk, every cluster is allocated from the start.
    pub data_file: Option<DataFile>,
    /// The space that is allocated at once.
    pub preallocation: Preallocation,
    /// How the guest's data is encrypted, if it is.
    pub encryption: Option<NewEncryption>,
    /// For a side file: the identity of its data file, see
    /// [`SideFileHeader`](crate::qcow2::SideFileHeader).
    pub identity: Option<[u8; 16]>,
}

/// Minimum size of a write in bytes.
const PAGE: u64 = 4096;

/// How the guest's data of a new image is encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewEncryption {
    /// QEMU's encryption before LUKS: the image stores nothing about the key.
    Aes,
    /// With keys in this LUKS header.
    Luks(Vec<u8>),
}

impl CreateOptions {
    /// Options for an image of version 3 with `size` bytes, clusters of 64 KiB and no further
    /// features.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            cluster_size: 64 << 10,
            refcount_bits: 16,
            version: Version::V3,
            lazy_refcounts: Switch::Off,
            extended_l2: Switch::Off,
            compression: Compression::Zlib,
            backing: None,
            data_file: None,
            preallocation: Preallocation::Off,
            encryption: None,
            identity: None,
        }
    }

    fn check(&self) -> Result<(), String> {
        let is_v2 = self.version == Version::V2;
        if !self.size.is_multiple_of(512) {
            return Err(format!("a disk of {} bytes is no multiple of 512", self.size));
        }
        if !self.cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&self.cluster_size) {
            let size = self.cluster_size;
            return Err(format!("clusters of {size} bytes: choose a power of two, 512 to 2 MiB"));
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            let bits = self.refcount_bits;
            return Err(format!("refcounts of {bits} bits: choose a power of two up to 64"));
        }
        if is_v2 && self.refcount_bits != 16 {
            return Err("version 2 (compat 0.10) has refcounts of 16 bits".into());
        }
        if is_v2 && (self.lazy_refcounts == Switch::On || self.extended_l2 == Switch::On) {
            return Err("version 2 (compat 0.10) has neither lazy refcounts nor subclusters".into());
        }
        if is_v2 && self.compression != Compression::Zlib {
            return Err("version 2 (compat 0.10) compresses with zlib only".into());
        }
        if self.extended_l2 == Switch::On && self.cluster_size < 16 << 10 {
            return Err("subclusters need clusters of 16 KiB or more".into());
        }
        self.check_data_file()?;
        self.check_encryption()?;
        match &self.backing {
            Some(backing) if backing.name.is_empty() || backing.name.len() > MAX_FILE_NAME => {
                Err("the name of the backing file must have 1 to 1023 bytes".into())
            }
            Some(_) if self.is_preallocated() && self.extended_l2 == Switch::Off => {
                Err("preallocation would hide the backing file, except with extended_l2=on".into())
            }
            _ => Ok(()),
        }
    }

    fn check_data_file(&self) -> Result<(), String> {
        let Some(file) = &self.data_file else { return Ok(()) };
        if self.version == Version::V2 {
            return Err("version 2 (compat 0.10) has no data file".into());
        }
        if file.name.is_empty() || file.name.len() > MAX_FILE_NAME {
            return Err("the name of the data file must have 1 to 1023 bytes".into());
        }
        if file.raw == Switch::On && self.backing.is_some() {
            return Err("a data file that is the raw disk has no backing file".into());
        }
        Ok(())
    }

    /// Checks the options of encryption. Preallocated clusters of an encrypted image need the zero
    /// flag, which version 2 lacks, because zeros in the file do not decrypt to zeros.
    fn check_encryption(&self) -> Result<(), String> {
        if self.encryption.is_none() {
            return Ok(());
        }
        if self.version == Version::V2 && self.preallocation != Preallocation::Off {
            let why =
                "an encrypted image of version 2 (compat 0.10) has no space ahead: no zero flag";
            return Err(why.into());
        }
        if self.data_file.as_ref().is_some_and(DataFile::is_raw_disk) {
            return Err("an encrypted data file is not the raw disk".into());
        }
        Ok(())
    }

    fn luks_header(&self) -> Option<&[u8]> {
        match &self.encryption {
            Some(NewEncryption::Luks(header)) => Some(header),
            Some(NewEncryption::Aes) | None => None,
        }
    }

    /// The size of the image file in bytes when every cluster of the disk is allocated, without
    /// snapshots and bitmaps.
    ///
    /// # Errors
    /// The reason why there is no such image: the options contradict each other, or the disk is too
    /// large for them.
    pub fn full_length(&self) -> Result<u64, String> {
        self.check()?;
        let geometry = self.geometry();
        let full = Self { preallocation: Preallocation::Metadata, ..self.clone() };
        let layout = Layout::of(&full, geometry);
        layout.check(self.size, geometry)?;
        Ok(geometry.offset_of(layout.end()))
    }

    /// Whether every cluster is allocated from the start.
    fn is_preallocated(&self) -> bool {
        self.has_raw_disk() || self.preallocation != Preallocation::Off
    }

    /// Preallocates the range of the guest's data and makes it read as zeros. Before the call, the
    /// first `old` bytes of the storage may have any content.
    async fn fill<S: Storage>(
        &self,
        storage: &S,
        range: ByteRange,
        old: u64,
        progress: &ToolProgress,
    ) -> Result<()> {
        match self.space_mode() {
            None if self.is_preallocated() => clear(storage, range.before(old), progress).await,
            None => Ok(()),
            Some(mode) => preallocate(storage, range, mode, progress).await,
        }
    }

    /// Whether the data file is the raw disk, whose content is kept.
    fn has_raw_disk(&self) -> bool {
        self.data_file.as_ref().is_some_and(|file| file.raw == Switch::On)
    }

    /// How space for the guest's data is allocated from the start, if it is.
    fn space_mode(&self) -> Option<SpaceMode> {
        match self.preallocation {
            Preallocation::Off | Preallocation::Metadata => None,
            Preallocation::Falloc => Some(SpaceMode::Falloc),
            Preallocation::Full => Some(SpaceMode::Full),
        }
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            version: if self.version == Version::V2 { 2 } else { 3 },
            cluster_bits: self.cluster_size.trailing_zeros(),
            refcount_order: self.refcount_bits.trailing_zeros(),
            extended_l2: self.extended_l2 == Switch::On,
            has_data_file: self.data_file.is_some(),
            // A new image is written in whole clusters.
            block: 1,
        }
    }
}

/// The layout of the file: the number of clusters of each part. The parts follow each other without
/// gaps, in this order: header, refcount table, refcount blocks, L1 table, L2 tables, the
/// encryption's header, guest data.
struct Layout {
    refcount_table: u64,
    refcount_blocks: u64,
    l1: u64,
    l2: u64,
    encryption: u64,
    data: u64,
}

impl Layout {
    fn of(options: &CreateOptions, geometry: Geometry) -> Self {
        let l1_entries = geometry.l1_entries_for(options.size);
        let (l2, data) = match (options.is_preallocated(), geometry.has_data_file) {
            (false, _) => (0, 0),
            (true, false) => (l1_entries, geometry.clusters_for(options.size)),
            (true, true) => (l1_entries, 0),
        };
        let l1 = geometry.clusters_for(l1_entries * 8);
        let encryption = options.luks_header().map_or(0, |header| header.len() as u64);
        let encryption = geometry.clusters_for(encryption);
        let mut layout = Self { refcount_table: 1, refcount_blocks: 1, l1, l2, encryption, data };
        // Further refcount blocks are clusters that must be counted, too. The additions shrink, so
        // the loop ends.
        loop {
            let blocks = layout.end().div_ceil(geometry.block_refcounts());
            let table = geometry.clusters_for(blocks * 8);
            if (table, blocks) == (layout.refcount_table, layout.refcount_blocks) {
                return layout;
            }
            (layout.refcount_table, layout.refcount_blocks) = (table, blocks);
        }
    }

    /// Refuses a disk that is too large for the format's limits.
    fn check(&self, size: u64, geometry: Geometry) -> Result<(), String> {
        if geometry.l1_entries_for(size) * 8 > MAX_L1_BYTES
            || self.refcount_table << geometry.cluster_bits > MAX_REFCOUNT_TABLE
            || self.end() > MAX_OFFSET >> geometry.cluster_bits
        {
            return Err("the disk is too large for clusters of this size".into());
        }
        Ok(())
    }

    fn blocks_start(&self) -> u64 {
        1 + self.refcount_table
    }

    fn l1_start(&self) -> u64 {
        self.blocks_start() + self.refcount_blocks
    }

    fn l2_start(&self) -> u64 {
        self.l1_start() + self.l1
    }

    fn encryption_start(&self) -> u64 {
        self.l2_start() + self.l2
    }

    fn data_start(&self) -> u64 {
        self.encryption_start() + self.encryption
    }

    fn end(&self) -> u64 {
        self.data_start() + self.data
    }
}

/// Makes an image in `storage`, durably. The previous content is lost, and does not appear on the
/// disk.
///
/// # Errors
/// `InvalidInput` for options that contradict each other or the format, or that name a data file;
/// `NoSpace` if the image does not fit into a storage that cannot be made longer; or errors of the
/// storage.
pub async fn create<S: Storage>(storage: &S, options: &CreateOptions) -> Result<()> {
    create_with(storage, None, options, &ToolProgress::default()).await
}

/// As [`create`], with the data file that the options name: `data` is extended to the size of the
/// disk, if it is shorter. If `data` is the raw disk, its content is kept. `progress` counts bytes
/// of tables and of allocated space.
///
/// # Errors
/// As [`create`].
pub async fn create_with<S: Storage>(
    storage: &S,
    data: Option<&S>,
    options: &CreateOptions,
    progress: &ToolProgress,
) -> Result<()> {
    let invalid = |what| {
        Error::new(ErrorKind::InvalidInput, format!("cannot create the image: {what}"))
            .on(storage.name())
    };
    options.check().map_err(invalid)?;
    if data.is_some() != options.data_file.is_some() {
        return Err(invalid("a data file goes with its name".into()));
    }
    let block = storage.capabilities().alignment.offset;
    if options.cluster_size < u64::from(block) {
        return Err(invalid(format!("clusters are smaller than the storage's blocks of {block}")));
    }
    let geometry = options.geometry();
    let layout = Layout::of(options, geometry);
    layout.check(options.size, geometry).map_err(invalid)?;
    let offset_of = |cluster| geometry.offset_of(cluster);
    let mut header = new_header(options, geometry, &layout);
    let header_bytes = header.to_bytes().or_else(|| {
        header.extensions.retain(|extension| extension.kind != extensions::FEATURE_NAMES);
        header.to_bytes()
    });
    let header_bytes = header_bytes
        .ok_or_else(|| invalid("the names of other files do not fit into a cluster".into()))?;
    let old = storage.size();
    let zeros_from = if storage.grows_with_zeros() { old } else { u64::MAX };
    let unit = PAGE.max(u64::from(block));
    let writer = ImageWriter { storage, geometry, layout, zeros_from, unit };
    lengthen(storage, offset_of(writer.layout.end())).await?;
    let filled = options.space_mode().map_or(0, |_| options.size);
    progress.begin((writer.layout.l2 << geometry.cluster_bits) + filled);
    // An earlier image in this storage must not be opened while it is half overwritten.
    writer.write_cluster(0, Vec::new()).await?;
    if old > 0 {
        storage.flush(SyncMode::Data).await?;
    }
    writer.write_refcounts().await?;
    writer.write_mappings(options, progress).await?;
    writer.write_encryption(options.luks_header().unwrap_or_default()).await?;
    let inside = geometry.bytes_of(writer.layout.data_start()..writer.layout.end());
    match data {
        None => options.fill(storage, inside, old, progress).await?,
        Some(data) => {
            let old = data.size();
            lengthen(data, options.size).await?;
            let kept = if options.has_raw_disk() { old.min(options.size) } else { 0 };
            options.fill(data, ByteRange::between(kept, options.size), old, progress).await?;
            data.flush(SyncMode::Full).await?;
        }
    }
    storage.flush(SyncMode::Full).await?;
    writer.write_cluster(0, header_bytes).await?;
    storage.flush(SyncMode::Full).await
}

/// Makes a storage at least `size` bytes long.
async fn lengthen<S: Storage>(storage: &S, size: u64) -> Result<()> {
    let has = storage.size();
    if has >= size {
        return Ok(());
    }
    storage.resize(size).await.map_err(|error| match error.kind() {
        ErrorKind::Unsupported => {
            let what = format!("has {has} bytes, and the image needs {size} at least");
            Error::new(ErrorKind::NoSpace, what)
                .on(storage.name())
                .hint("use a larger device, or make the image smaller")
        }
        _ => error,
    })
}

/// Makes a range read as zeros, and frees its space if possible.
async fn clear<S: Storage>(storage: &S, range: ByteRange, progress: &ToolProgress) -> Result<()> {
    const PIECE: u64 = 1 << 30;
    let mut rest = range;
    while !rest.is_empty() {
        let piece = rest.truncate(PIECE);
        match storage.write_zeroes(piece, Unmap::Allowed).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                return preallocate(storage, rest, SpaceMode::Full, progress).await;
            }
            outcome => outcome?,
        }
        rest = rest.skip(piece.length());
    }
    Ok(())
}

fn new_header(options: &CreateOptions, geometry: Geometry, layout: &Layout) -> Header {
    let mut incompatible = Incompatible::empty();
    incompatible.set(Incompatible::EXTENDED_L2, geometry.extended_l2);
    incompatible.set(Incompatible::COMPRESSION, options.compression != Compression::Zlib);
    let format = options.backing.as_ref().and_then(|backing| backing.format.as_ref());
    incompatible.set(Incompatible::DATA_FILE, geometry.has_data_file);
    let format = format.map(|format| (BACKING_FORMAT, format.as_bytes().to_vec()));
    let data_file = options.data_file.as_ref();
    let named = data_file.map(|file| (extensions::DATA_FILE, file.name.clone()));
    let place = geometry.bytes_of(layout.encryption_start()..layout.data_start());
    let encryption = options.luks_header().map(|header| {
        let numbers = [place.offset(), header.len() as u64].map(u64::to_be_bytes);
        (extensions::ENCRYPTION, numbers.concat())
    });
    let identity = options.identity.map(|identity| {
        let mark =
            DataFileMark { identity, changed: Duration::ZERO, other_size: None, voucher: None };
        (extensions::SIDE_FILE, mark.to_bytes())
    });
    // A side file has bitmaps and no disk, so it has no table of feature names.
    let names = geometry.version >= 3 && identity.is_none();
    let extensions = [format, named, encryption, identity].into_iter().flatten();
    let extensions = extensions.map(|(kind, data)| Extension { kind, data });
    let extensions = extensions.chain(names.then(extensions::feature_names)).collect();
    let is_raw = data_file.is_some_and(|file| file.raw == Switch::On);
    Header {
        geometry,
        size: options.size,
        excess: 0,
        l1_offset: if layout.l1 > 0 { geometry.offset_of(layout.l1_start()) } else { 0 },
        l1_entries: geometry.l1_entries_for(options.size) as u32,
        refcount_table_offset: geometry.offset_of(1),
        refcount_table_clusters: layout.refcount_table as u32,
        snapshots: 0,
        snapshots_offset: 0,
        snapshot_fault: None,
        incompatible,
        compatible: if options.lazy_refcounts == Switch::On { LAZY_REFCOUNTS } else { 0 },
        autoclear: if is_raw { RAW_DATA_FILE } else { 0 },
        compression: options.compression,
        backing: options.backing.clone(),
        data_file: options.data_file.clone(),
        encryption: options.encryption.as_ref().map(|encryption| match encryption {
            NewEncryption::Aes => EncryptionKind::Aes,
            NewEncryption::Luks(_) => EncryptionKind::Luks(place),
        }),
        extensions,
        length: if geometry.version == 2 { LENGTH_2 } else { LENGTH_3 + 8 },
    }
}

struct ImageWriter<'a, S> {
    storage: &'a S,
    geometry: Geometry,
    layout: Layout,
    /// The offset from which on the storage reads as zeros.
    zeros_from: u64,
    /// The unit of writes in bytes.
    unit: u64,
}

impl<S: Storage> ImageWriter<'_, S> {
    /// Writes `bytes`, padded with zeros, as a cluster. Padding is not written where the storage
    /// already reads as zeros, so that the padding takes no space.
    async fn write_cluster(&self, cluster: u64, mut bytes: Vec<u8>) -> Result<()> {
        let (offset, size) = (self.geometry.offset_of(cluster), self.geometry.cluster_size());
        let used = if offset < self.zeros_from {
            size
        } else {
            (bytes.len() as u64).next_multiple_of(self.unit).min(size)
        };
        if used == 0 {
            return Ok(());
        }
        bytes.resize(used as usize, 0);
        table_io::write(self.storage, offset, &bytes, Durability::None).await
    }

    /// Writes a table of `clusters` clusters: these words, then zeros.
    async fn write_table(&self, first: u64, clusters: u64, words: &[u64]) -> Result<()> {
        let mut parts = words.chunks(self.geometry.cluster_size() as usize / 8);
        for cluster in first..first + clusters {
            let part = parts.next().unwrap_or_default();
            self.write_cluster(cluster, words::bytes_of(part)).await?;
        }
        Ok(())
    }

    async fn write_refcounts(&self) -> Result<()> {
        let (geometry, layout) = (self.geometry, &self.layout);
        let start = layout.blocks_start();
        let blocks: Vec<u64> = (start..start + layout.refcount_blocks)
            .map(|cluster| geometry.offset_of(cluster))
            .collect();
        self.write_table(1, layout.refcount_table, &blocks).await?;
        for block in 0..layout.refcount_blocks {
            let counted = block * geometry.block_refcounts();
            let used = (layout.end() - counted).min(geometry.block_refcounts());
            let mut bytes = vec![0; geometry.cluster_size() as usize];
            for index in 0..used as usize {
                refcount::set(&mut bytes, geometry.refcount_order, index, 1);
            }
            self.write_cluster(start + block, bytes).await?;
        }
        Ok(())
    }

    /// Writes the encryption's header, padded with zeros.
    async fn write_encryption(&self, header: &[u8]) -> Result<()> {
        let mut parts = header.chunks(self.geometry.cluster_size() as usize);
        for cluster in self.layout.encryption_start()..self.layout.data_start() {
            let part = parts.next().unwrap_or_default();
            self.write_cluster(cluster, part.to_vec()).await?;
        }
        Ok(())
    }

    async fn write_mappings(&self, options: &CreateOptions, progress: &ToolProgress) -> Result<()> {
        let (geometry, layout) = (self.geometry, &self.layout);
        let mut tables: Vec<u64> = (layout.l2_start()..layout.encryption_start())
            .map(|cluster| l1_word(Reference::with_copied(geometry.offset_of(cluster))))
            .collect();
        tables.resize(geometry.l1_entries_for(options.size) as usize, 0);
        self.write_table(layout.l1_start(), layout.l1, &tables).await?;
        let clusters = geometry.clusters_for(options.size);
        let subclusters = match options {
            CreateOptions { backing: Some(_), .. } => SubclusterBitmap::UNALLOCATED,
            CreateOptions { encryption: Some(_), .. } => SubclusterBitmap::ZERO,
            _ => SubclusterBitmap::DATA,
        };
        for table in 0..layout.l2 {
            let first = table * geometry.l2_entries();
            let mut bytes = vec![0; geometry.cluster_size() as usize];
            for index in 0..geometry.l2_entries().min(clusters - first) {
                let start = if geometry.has_data_file { 0 } else { layout.data_start() };
                let host = geometry.offset_of(start + first + index);
                let entry =
                    Entry::Standard { host: Some(Reference::with_copied(host)), subclusters };
                entry.write(&mut bytes, index as usize, geometry);
            }
            self.write_cluster(layout.l2_start() + table, bytes).await?;
            progress.advance(geometry.cluster_size());
        }
        Ok(())
    }
}
