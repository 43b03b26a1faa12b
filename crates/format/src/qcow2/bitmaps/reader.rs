//! Reads the bits of a bitmap from the image, cluster by cluster.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::qcow2::layout::bitmap_directory::{BitmapEntry, BitsCluster};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::{table_io, words};

/// The bits of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Bits {
    Zeros,
    Ones,
    Some(Vec<u8>),
}

/// A bitmap as it is stored in the image.
pub(crate) struct BitsReader<'a, S> {
    storage: &'a S,
    geometry: Geometry,
    table: Vec<BitsCluster>,
    granularity_bits: u32,
    /// Number of bits that cover the disk.
    bits: u64,
}

impl<'a, S: Storage> BitsReader<'a, S> {
    /// Reads the table of a bitmap of a disk of `size` bytes.
    ///
    /// # Errors
    /// Errors of the storage; `Corrupt` for an entry that breaks the format's rules.
    pub(crate) async fn open(
        storage: &'a S,
        geometry: Geometry,
        entry: &BitmapEntry,
        size: u64,
    ) -> Result<Self> {
        if entry.table_offset.saturating_add(entry.table_length()) > storage.size() {
            let what = format!("the table of {} is past the end of the file", entry.called());
            let error = Error::new(ErrorKind::Corrupt, what).on(storage.name());
            return Err(error.at(entry.table_offset));
        }
        let count = entry.clusters_for(size, geometry).min(u64::from(entry.table_entries));
        let words = table_io::read(storage, entry.table_offset, count as usize * 8).await?;
        let parse = |(index, word): (u64, u64)| {
            BitsCluster::parse(word, geometry).map_err(|fault| {
                let what = format!("an entry of the table of {} {fault}", entry.called());
                let offset = entry.table_offset + index * 8;
                Error::new(ErrorKind::Corrupt, what).on(storage.name()).at(offset)
            })
        };
        let table = (0..).zip(words::words_of(&words)).map(parse).collect::<Result<_>>()?;
        let granularity_bits = entry.granularity_bits;
        Ok(Self { storage, geometry, table, granularity_bits, bits: entry.bits_for(size) })
    }

    /// A reader of a bitmap in which no bit is set.
    pub(crate) fn empty(
        storage: &'a S,
        geometry: Geometry,
        entry: &BitmapEntry,
        size: u64,
    ) -> Self {
        let table = vec![BitsCluster::Zeros; entry.clusters_for(size, geometry) as usize];
        let granularity_bits = entry.granularity_bits;
        Self { storage, geometry, table, granularity_bits, bits: entry.bits_for(size) }
    }

    /// The locations of the clusters of bits.
    pub(crate) fn table(&self) -> &[BitsCluster] {
        &self.table
    }

    /// As [`table`](Self::table), by value.
    pub(crate) fn into_table(self) -> Vec<BitsCluster> {
        self.table
    }

    /// How many clusters of bits there are.
    pub(crate) fn clusters(&self) -> u64 {
        self.table.len() as u64
    }

    /// Bits of a cluster.
    pub(crate) fn cluster_bits(&self) -> u64 {
        self.geometry.cluster_size() * 8
    }

    /// How many bits cover the disk.
    pub(crate) fn bits(&self) -> u64 {
        self.bits
    }

    /// How many of the bits of a cluster cover a part of the disk.
    pub(crate) fn bits_in(&self, cluster: u64) -> u64 {
        self.bits.saturating_sub(cluster * self.cluster_bits()).min(self.cluster_bits())
    }

    /// Bytes of the disk per bit, as a power of two.
    pub(crate) fn granularity_bits(&self) -> u32 {
        self.granularity_bits
    }

    /// The bits of a cluster.
    ///
    /// # Errors
    /// Errors of the storage; `Corrupt` for bits past the end of the file.
    pub(crate) async fn read(&self, cluster: u64) -> Result<Bits> {
        Ok(match self.table[cluster as usize] {
            BitsCluster::Zeros => Bits::Zeros,
            BitsCluster::Ones => Bits::Ones,
            BitsCluster::Stored(offset) if offset >= self.storage.size() => {
                let what = "the bits of a bitmap are past the end of the file";
                return Err(Error::new(ErrorKind::Corrupt, what)
                    .on(self.storage.name())
                    .at(offset));
            }
            BitsCluster::Stored(offset) => {
                let length = self.geometry.cluster_size() as usize;
                Bits::Some(table_io::read(self.storage, offset, length).await?)
            }
        })
    }
}
