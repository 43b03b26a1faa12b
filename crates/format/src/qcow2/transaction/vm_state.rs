//! The tables of a VM state that is being stored.
//!
//! No table on disk refers to the clusters of the state before the snapshot is committed; their
//! refcount is 1. If a crash ends the saving, the clusters leak, and nothing else is wrong. All
//! tables of the state are in memory, 8 or 16 bytes for each cluster of the state.

use std::collections::BTreeMap;
use std::ops::Range;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

use crate::qcow2::Qcow2;
use crate::qcow2::layout::entry::{CompressedDescriptor, Entry, Reference, l1_word};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::limits::MAX_L1_BYTES;

use super::metadata_transaction::{MetadataTransaction, RefcountDelta, check_no_data_file};

/// The tables of a VM state; see the module's documentation. Offsets are relative to the start of
/// the state.
pub struct VmStateTables {
    geometry: Geometry,
    /// Number of L1 entries before the entries of the state.
    first_l1: u64,
    zero_encoding: ZeroEncoding,
    /// The L2 tables, by the number of their L1 entry, counted from `first_l1`.
    tables: BTreeMap<u64, Vec<u8>>,
    /// Host clusters of the state.
    reserved: Vec<Range<u64>>,
    size: u64,
}

/// The encoding of a cluster of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroEncoding {
    /// The zero flag of an entry.
    ZeroFlag,
    /// No entry, because there is no backing file.
    Unallocated,
    /// Zeros are stored as data.
    None,
}

/// Location of a cluster of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmStateCluster {
    /// The cluster is not stored and reads as zeros.
    Zero,
    /// At this offset of the storage.
    Data(u64),
    /// Compressed: from this offset on, in at most this many bytes.
    Compressed(ByteRange),
}

/// The machines' states in an image's snapshots.
pub struct VmStates<'a, S: Storage> {
    image: &'a Qcow2<S>,
}

impl<S: Storage> Qcow2<S> {
    /// The machines' states in the image's snapshots.
    pub fn vm_states(&self) -> VmStates<'_, S> {
        VmStates { image: self }
    }
}

impl<S: Storage> VmStates<'_, S> {
    /// Bytes of a cluster. Machine states are stored in whole clusters.
    pub fn cluster_size(&self) -> u64 {
        self.image.cluster_size()
    }

    /// Start of a machine's state: past the end of the disk, at a whole L1 entry.
    pub fn start(&self) -> u64 {
        let metadata = &self.image.metadata;
        let geometry = metadata.geometry();
        geometry.l1_entries_for(metadata.size()) * geometry.l1_entry_span()
    }

    /// The range of the state in the snapshot that the image was opened on. The range begins at
    /// [`start`](Self::start), and is empty for a snapshot without a state.
    ///
    /// # Errors
    /// `InvalidInput` for an image that was not opened on a snapshot; `Corrupt` if the snapshot's
    /// tables are too short for the state; `Unsupported` for an image with a data file.
    pub fn location(&self) -> Result<ByteRange> {
        let Qcow2 { metadata, facts, .. } = self.image;
        check_no_data_file(metadata)?;
        let (name, geometry) = (metadata.storage().name(), metadata.geometry());
        let Some(snapshot) = &facts.snapshot else {
            let what = "was not opened on a snapshot";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(name));
        };
        let start = self.start();
        let reach = metadata.lock().tables.l1().len() as u64 * geometry.l1_entry_span();
        let range = ByteRange::new(start, snapshot.vm_state_size);
        range.filter(|range| range.is_empty() || range.end() <= reach).ok_or_else(|| {
            let what = format!(
                "the VM state of the snapshot '{}' is larger than its tables",
                snapshot.name
            );
            Error::new(ErrorKind::Corrupt, what).on(name)
        })
    }

    /// Tables for a state of which nothing is stored yet.
    pub fn new_tables(&self) -> VmStateTables {
        let metadata = &self.image.metadata;
        VmStateTables::new(metadata.lock().tables.header(), metadata.size())
    }

    /// Allocates one to `limit` clusters in a row. No table refers to the clusters, so the caller
    /// must [reserve](VmStateTables::reserve) or [free](Self::free_clusters) them.
    ///
    /// # Errors
    /// `NoSpace`, `ReadOnly`, or an earlier failure to write tables; `Unsupported` for an image
    /// with a data file.
    pub async fn allocate_clusters(&self, limit: u64) -> Result<ByteRange> {
        let metadata = &self.image.metadata;
        metadata.check_writable()?;
        check_no_data_file(metadata)?;
        let allocated = metadata.step(|state| {
            state.tables.freeze.wait_thawed()?;
            state.tables.check_dirty_limit()?;
            state.allocator.allocate(&mut state.tables, limit)
        });
        Ok(metadata.geometry().bytes_of(allocated.await?))
    }

    /// Frees clusters that no table refers to and no operation writes to. Never waits.
    pub fn free_clusters(&self, range: ByteRange) {
        let metadata = &self.image.metadata;
        let mut state = metadata.lock();
        let state = &mut *state;
        let clusters = metadata.geometry().clusters_of(range);
        state.allocator.free_unlinked(&mut state.tables, clusters);
    }
}

impl VmStateTables {
    /// Tables for a state of which nothing is stored yet, in an image with a disk of `size` bytes.
    fn new(header: &Header, size: u64) -> Self {
        let geometry = header.geometry;
        let zero_encoding = match &header.backing {
            _ if geometry.version >= 3 => ZeroEncoding::ZeroFlag,
            None => ZeroEncoding::Unallocated,
            Some(_) => ZeroEncoding::None,
        };
        Self {
            geometry,
            first_l1: geometry.l1_entries_for(size),
            zero_encoding,
            tables: BTreeMap::new(),
            reserved: Vec::new(),
            size: 0,
        }
    }

    /// Bytes of the state so far.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether zeros need no cluster.
    pub fn has_zero_encoding(&self) -> bool {
        self.zero_encoding != ZeroEncoding::None
    }

    /// Extends the state to at least `end` bytes.
    ///
    /// # Errors
    /// `NoSpace` if the state would be larger than the format allows.
    pub fn extend(&mut self, end: u64) -> Result<()> {
        let entries = end.div_ceil(self.geometry.l1_entry_span());
        if self.first_l1.saturating_add(entries) > MAX_L1_BYTES / 8 {
            let what = format!("a VM state of {end} bytes is too large for the image's clusters");
            return Err(Error::new(ErrorKind::NoSpace, what));
        }
        self.size = self.size.max(end);
        Ok(())
    }

    /// Makes these clusters part of the state.
    pub fn reserve(&mut self, range: ByteRange) {
        let clusters = self.geometry.clusters_of(range);
        match self.reserved.last_mut() {
            Some(last) if last.end == clusters.start => last.end = clusters.end,
            _ => self.reserved.push(clusters),
        }
    }

    /// Empties the tables. Returns all clusters of the state, to be freed.
    pub fn release_all(&mut self) -> Vec<ByteRange> {
        self.tables.clear();
        let reserved = std::mem::take(&mut self.reserved);
        reserved.into_iter().map(|clusters| self.geometry.bytes_of(clusters)).collect()
    }

    /// Location of a cluster of the state; `None` if nothing was stored.
    pub fn get(&self, cluster: u64) -> Option<VmStateCluster> {
        let (l1, index) = self.index_of(cluster);
        match Entry::read(self.tables.get(&l1)?, index, self.geometry).ok()? {
            Entry::Standard { host: Some(host), .. } => Some(VmStateCluster::Data(host.offset)),
            Entry::Standard { host: None, subclusters } if subclusters.zero != 0 => {
                Some(VmStateCluster::Zero)
            }
            Entry::Standard { .. } => None,
            Entry::Compressed(data) => {
                let range = ByteRange::new(data.offset, data.length)?;
                Some(VmStateCluster::Compressed(range))
            }
        }
    }

    /// Sets the location of a cluster of the state.
    pub fn set(&mut self, cluster: u64, content: VmStateCluster) {
        let (l1, index) = self.index_of(cluster);
        let entry = match content {
            VmStateCluster::Zero if self.zero_encoding == ZeroEncoding::ZeroFlag => Entry::ZERO,
            VmStateCluster::Zero => Entry::UNALLOCATED,
            VmStateCluster::Data(offset) => Entry::data(offset),
            VmStateCluster::Compressed(range) => Entry::Compressed(CompressedDescriptor {
                offset: range.offset(),
                length: range.length(),
            }),
        };
        let cluster_size = self.geometry.cluster_size() as usize;
        let table = self.tables.entry(l1).or_insert_with(|| vec![0; cluster_size]);
        entry.write(table, index, self.geometry);
    }

    fn index_of(&self, cluster: u64) -> (u64, usize) {
        let entries = self.geometry.l2_entries();
        (cluster / entries, (cluster % entries) as usize)
    }

    /// The table of this number. If the image has the zero flag, clusters that were never stored
    /// get zero entries.
    fn with_zero_entries(&self, number: u64) -> Vec<u8> {
        let geometry = self.geometry;
        let absent = || vec![0; geometry.cluster_size() as usize];
        let mut table = self.tables.get(&number).cloned().unwrap_or_else(absent);
        if self.zero_encoding == ZeroEncoding::ZeroFlag {
            let end = geometry.clusters_for(self.size) - number * geometry.l2_entries();
            for index in 0..end.min(geometry.l2_entries()) as usize {
                if Entry::read(&table, index, geometry) == Ok(Entry::UNALLOCATED) {
                    Entry::ZERO.write(&mut table, index, geometry);
                }
            }
        }
        table
    }

    /// Adds the tables to the L1 table of a snapshot.
    pub(super) async fn put<S: Storage>(
        &self,
        transaction: &mut MetadataTransaction<'_, S>,
        l1: &mut Vec<u64>,
    ) -> Result<()> {
        let entries = self.size.div_ceil(self.geometry.l1_entry_span());
        l1.resize((self.first_l1 + entries) as usize, 0);
        for number in 0..entries {
            let table = self.with_zero_entries(number);
            transaction.count_entries(&table, 0, RefcountDelta::Increment)?;
            let offset = transaction.put(table).await?;
            let reference = Reference { offset, copied: false };
            l1[(self.first_l1 + number) as usize] = l1_word(reference);
        }
        // The references of the entries are counted now, so the references of the reservation are
        // dropped.
        self.reserved.iter().try_for_each(|clusters| transaction.release_clusters(clusters.clone()))
    }
}
