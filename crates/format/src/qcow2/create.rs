//! New images.
//!
//! The header is written last, after everything else is durable: until then the file is no image.

use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage, Sync};

use super::entry::{Entry, Reference, l1_word};
use super::extensions::{BACKING_FORMAT, Extension};
use super::geometry::{Geometry, MOST_OFFSET};
use super::header::{Header, Incompatible, LAZY_REFCOUNTS, LENGTH_2, LENGTH_3};
use super::{Backing, Compression, refcount, table_io};
use crate::{Fill, preallocate};

/// Which revision of the format a new image has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// Version 2, `compat=0.10`: no zero clusters, refcounts of 16 bits, no features.
    V2,
    /// Version 3, `compat=1.1`.
    #[default]
    V3,
}

/// Whether a feature is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switch {
    /// No.
    #[default]
    Off,
    /// Yes.
    On,
}

/// What a new image allocates at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing for the guest.
    #[default]
    Off,
    /// All tables, with a place for every cluster; the places are holes of the file.
    Metadata,
    /// The same, and the host's file system sets the space aside.
    Falloc,
    /// The same, and the space is filled with zeros.
    Full,
}

/// What a new image is like.
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
    /// The file behind the image.
    pub backing: Option<Backing>,
    /// What is allocated at once.
    pub preallocation: Preallocation,
}

impl CreateOptions {
    /// A version 3 image of `size` bytes with clusters of 64 KiB and nothing special.
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
            preallocation: Preallocation::Off,
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
        match &self.backing {
            Some(backing) if backing.name.is_empty() || backing.name.len() > 1023 => {
                Err("the name of the backing file must have 1 to 1023 bytes".into())
            }
            Some(_) if self.preallocation != Preallocation::Off => {
                Err("preallocation would hide the backing file".into())
            }
            _ => Ok(()),
        }
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            version: if self.version == Version::V2 { 2 } else { 3 },
            cluster_bits: self.cluster_size.trailing_zeros(),
            refcount_order: self.refcount_bits.trailing_zeros(),
            extended_l2: self.extended_l2 == Switch::On,
        }
    }
}

/// Where everything goes, in clusters of the file. In this order, without gaps: header, refcount
/// table, refcount blocks, L1 table, L2 tables, guest data.
struct Layout {
    refcount_table: u64,
    refcount_blocks: u64,
    l1: u64,
    l2: u64,
    data: u64,
}

impl Layout {
    fn of(options: &CreateOptions, geometry: Geometry) -> Self {
        let l1_entries = geometry.l1_entries_for(options.size);
        let (l2, data) = match options.preallocation {
            Preallocation::Off => (0, 0),
            Preallocation::Metadata | Preallocation::Falloc | Preallocation::Full => {
                (l1_entries, geometry.clusters_for(options.size))
            }
        };
        let l1 = geometry.clusters_for(l1_entries * 8);
        let mut layout = Self { refcount_table: 1, refcount_blocks: 1, l1, l2, data };
        // More blocks need more clusters that need counting; that grows by ever less.
        loop {
            let blocks = layout.end().div_ceil(geometry.block_refcounts());
            let table = geometry.clusters_for(blocks * 8);
            if (table, blocks) == (layout.refcount_table, layout.refcount_blocks) {
                return layout;
            }
            (layout.refcount_table, layout.refcount_blocks) = (table, blocks);
        }
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

    fn data_start(&self) -> u64 {
        self.l2_start() + self.l2
    }

    fn end(&self) -> u64 {
        self.data_start() + self.data
    }
}

/// Makes an image in `storage`, durably. What was in it is lost.
///
/// # Errors
/// `InvalidInput` for options that contradict each other or the format; or what the storage answers.
pub async fn create<S: Storage>(storage: &S, options: &CreateOptions) -> Result<()> {
    let invalid = |what| {
        Error::new(ErrorKind::InvalidInput, format!("cannot create the image: {what}"))
            .on(storage.name())
    };
    options.check().map_err(invalid)?;
    let block = storage.capabilities().alignment.offset;
    if options.cluster_size < u64::from(block) {
        return Err(invalid(format!("clusters are smaller than the storage's blocks of {block}")));
    }
    let geometry = options.geometry();
    if geometry.l1_entries_for(options.size) * 8 > 32 << 20 {
        return Err(invalid("the disk is too large for clusters of this size".into()));
    }
    let layout = Layout::of(options, geometry);
    let offset_of = |cluster| geometry.offset_of(cluster);
    if layout.refcount_table << geometry.cluster_bits > 8 << 20
        || layout.end() > MOST_OFFSET >> geometry.cluster_bits
    {
        return Err(invalid("the disk is too large for clusters of this size".into()));
    }
    let header = new_header(options, geometry, &layout);
    let header_bytes = header
        .to_bytes()
        .ok_or_else(|| invalid("the backing file's name does not fit into a cluster".into()))?;
    let maker = Maker { storage, geometry, layout };
    // An image that was here before must not be found half overwritten.
    maker.write_cluster(0, Vec::new()).await?;
    maker.write_refcounts().await?;
    maker.write_mappings(options).await?;
    if storage.size() < offset_of(maker.layout.end()) {
        storage.resize(offset_of(maker.layout.end())).await?;
    }
    let data = geometry.bytes_of(maker.layout.data_start()..maker.layout.end());
    match options.preallocation {
        Preallocation::Off | Preallocation::Metadata => {}
        Preallocation::Falloc => preallocate(storage, data, Fill::Reserve).await?,
        Preallocation::Full => preallocate(storage, data, Fill::Write).await?,
    }
    storage.flush(Sync::Full).await?;
    maker.write_cluster(0, header_bytes).await?;
    storage.flush(Sync::Full).await
}

fn new_header(options: &CreateOptions, geometry: Geometry, layout: &Layout) -> Header {
    let mut incompatible = Incompatible::empty();
    incompatible.set(Incompatible::EXTENDED_L2, geometry.extended_l2);
    incompatible.set(Incompatible::COMPRESSION, options.compression != Compression::Zlib);
    let format = options.backing.as_ref().and_then(|backing| backing.format.as_ref());
    let extensions = format
        .map(|format| Extension { kind: BACKING_FORMAT, data: format.as_bytes().to_vec() })
        .into_iter()
        .collect();
    Header {
        geometry,
        size: options.size,
        l1_offset: if layout.l1 > 0 { geometry.offset_of(layout.l1_start()) } else { 0 },
        l1_entries: geometry.l1_entries_for(options.size) as u32,
        refcount_table_offset: geometry.offset_of(1),
        refcount_table_clusters: layout.refcount_table as u32,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible,
        compatible: if options.lazy_refcounts == Switch::On { LAZY_REFCOUNTS } else { 0 },
        autoclear: 0,
        compression: options.compression,
        backing: options.backing.clone(),
        extensions,
        length: if geometry.version == 2 { LENGTH_2 } else { LENGTH_3 + 8 },
    }
}

struct Maker<'a, S> {
    storage: &'a S,
    geometry: Geometry,
    layout: Layout,
}

impl<S: Storage> Maker<'_, S> {
    /// Writes `bytes`, filled up with zeros, as a cluster.
    async fn write_cluster(&self, cluster: u64, mut bytes: Vec<u8>) -> Result<()> {
        bytes.resize(self.geometry.cluster_size() as usize, 0);
        let offset = self.geometry.offset_of(cluster);
        table_io::write(self.storage, offset, &bytes, Durability::None).await
    }

    /// Writes a table of `clusters` clusters that starts with these words.
    async fn write_table(&self, first: u64, clusters: u64, words: &[u64]) -> Result<()> {
        let mut parts = words.chunks(self.geometry.cluster_size() as usize / 8);
        for cluster in first..first + clusters {
            let part = parts.next().unwrap_or_default();
            self.write_cluster(cluster, table_io::bytes_of(part)).await?;
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

    async fn write_mappings(&self, options: &CreateOptions) -> Result<()> {
        let (geometry, layout) = (self.geometry, &self.layout);
        let tables: Vec<u64> = (layout.l2_start()..layout.data_start())
            .map(|cluster| l1_word(Reference::sole(geometry.offset_of(cluster))))
            .collect();
        self.write_table(layout.l1_start(), layout.l1, &tables).await?;
        let clusters = geometry.clusters_for(options.size);
        for table in 0..layout.l2 {
            let first = table * geometry.l2_entries();
            let mut bytes = vec![0; geometry.cluster_size() as usize];
            for index in 0..geometry.l2_entries().min(clusters - first) {
                let host = geometry.offset_of(layout.data_start() + first + index);
                Entry::data(host).write(&mut bytes, index as usize, geometry);
            }
            self.write_cluster(layout.l2_start() + table, bytes).await?;
        }
        Ok(())
    }
}
