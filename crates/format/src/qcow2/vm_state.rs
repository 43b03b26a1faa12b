//! The tables of a machine's state that is being stored.
//!
//! They are nobody's until a snapshot is taken with them: the clusters are held by a refcount of one and
//! nothing on disk refers to them, so that a state that is never finished leaks clusters at most. All
//! of the tables are in memory, 8 or 16 bytes for each cluster of the state.

use std::collections::BTreeMap;
use std::ops::Range;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

use super::Qcow2;
use super::draft::{Counting, Draft};
use super::entry::{CompressedPlace, Entry, Ownership, Reference, l1_word};
use super::geometry::Geometry;

/// The largest L1 table, in bytes.
const MAX_L1_BYTES: u64 = 32 << 20;

/// See the module's page. Offsets of the state count from its own beginning.
pub struct VmStateTables {
    geometry: Geometry,
    /// L1 entries before those of the state.
    first_l1: u64,
    says_zero: SaysZero,
    /// By number of the L1 entry.
    tables: BTreeMap<u64, Vec<u8>>,
    /// Host clusters that are held.
    held: Vec<Range<u64>>,
    size: u64,
}

/// Whether clusters that are not there read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SaysZero {
    /// By an entry that says so.
    Entry,
    /// By no entry: nothing is behind.
    Absence,
    /// They cannot.
    Nothing,
}

/// Where a cluster of the state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmStateCluster {
    /// Nowhere; it reads as zeros.
    Zero,
    /// At this offset of the storage.
    Data(u64),
    /// Compressed: from this offset on, in at most so many bytes.
    Compressed(ByteRange),
}

impl<S: Storage> Qcow2<S> {
    /// Where the machine's state begins in the tables of a snapshot of this disk: behind the disk, at
    /// a whole L1 entry.
    pub fn vm_state_offset(&self) -> u64 {
        self.geometry.l1_entries_for(self.size()) * self.geometry.l1_entry_span()
    }

    /// Where the state is of the snapshot that the image was opened on; empty for a snapshot without one.
    ///
    /// # Errors
    /// `InvalidInput` for an image that was not opened on a snapshot; `Corrupt` where the snapshot's tables
    /// do not reach so far; `Unsupported` for an image with a data file.
    pub fn vm_state(&self) -> Result<ByteRange> {
        self.check_sharing()?;
        let Some(snapshot) = self.snapshot.get() else {
            let what = "was not opened on a snapshot";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage.name()));
        };
        let reach = self.state.lock().l1.len() as u64 * self.geometry.l1_entry_span();
        let place = ByteRange::new(self.vm_state_offset(), snapshot.vm_state_size);
        place.filter(|place| place.is_empty() || place.end() <= reach).ok_or_else(|| {
            let name = &snapshot.name;
            let what = format!("the VM state of the snapshot '{name}' is larger than its tables");
            Error::new(ErrorKind::Corrupt, what).on(self.storage.name())
        })
    }

    /// Tables for a state of which nothing is stored yet.
    pub fn new_vm_state(&self) -> VmStateTables {
        let says_zero = match &self.backing {
            _ if self.geometry.version >= 3 => SaysZero::Entry,
            None => SaysZero::Absence,
            Some(_) => SaysZero::Nothing,
        };
        VmStateTables {
            geometry: self.geometry,
            first_l1: self.geometry.l1_entries_for(self.size()),
            says_zero,
            tables: BTreeMap::new(),
            held: Vec::new(),
            size: 0,
        }
    }

    /// Takes one to `most` free clusters in a row for a machine's state. Nothing refers to them: they
    /// are to be [reserved](VmStateTables::reserve) or given back.
    ///
    /// # Errors
    /// `NoSpace`, `ReadOnly`, or why tables cannot be written; `Unsupported` for an image with a data file.
    pub async fn take_clusters(&self, most: u64) -> Result<ByteRange> {
        self.check_writable()?;
        self.check_sharing()?;
        let taken = self.step(|state| {
            state.check_thawed()?;
            state.check_room()?;
            state.allocate(most)
        });
        Ok(self.geometry.bytes_of(taken.await?))
    }

    /// Gives clusters back that nothing refers to and nothing writes to. Never waits.
    pub fn give_clusters_back(&self, place: ByteRange) {
        self.state.lock().free_unlinked(self.geometry.clusters_of(place));
    }
}

impl VmStateTables {
    /// Bytes of the state so far.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether zeros need no place.
    pub fn has_zero_encoding(&self) -> bool {
        self.says_zero != SaysZero::Nothing
    }

    /// The state reaches at least up to here.
    ///
    /// # Errors
    /// `NoSpace` when it would be larger than the format allows.
    pub fn extend(&mut self, end: u64) -> Result<()> {
        let entries = end.div_ceil(self.geometry.l1_entry_span());
        if self.first_l1.saturating_add(entries) > MAX_L1_BYTES / 8 {
            let what = format!("a VM state of {end} bytes is too large for the image's clusters");
            return Err(Error::new(ErrorKind::NoSpace, what));
        }
        self.size = self.size.max(end);
        Ok(())
    }

    /// These clusters belong to the state from now on.
    pub fn reserve(&mut self, place: ByteRange) {
        let clusters = self.geometry.clusters_of(place);
        match self.held.last_mut() {
            Some(last) if last.end == clusters.start => last.end = clusters.end,
            _ => self.held.push(clusters),
        }
    }

    /// All that is held, to be given back; the tables are empty then.
    pub fn release_all(&mut self) -> Vec<ByteRange> {
        self.tables.clear();
        let held = std::mem::take(&mut self.held);
        held.into_iter().map(|clusters| self.geometry.bytes_of(clusters)).collect()
    }

    /// Where a cluster of the state is; `None` where nothing was stored.
    pub fn get(&self, cluster: u64) -> Option<VmStateCluster> {
        let (l1, index) = self.place(cluster);
        match Entry::read(self.tables.get(&l1)?, index, self.geometry).ok()? {
            Entry::Standard { place: Some(place), .. } => Some(VmStateCluster::Data(place.offset)),
            Entry::Standard { place: None, units } if units.zero != 0 => Some(VmStateCluster::Zero),
            Entry::Standard { .. } => None,
            Entry::Compressed(place) => {
                let place = ByteRange::new(place.offset, place.length)?;
                Some(VmStateCluster::Compressed(place))
            }
        }
    }

    /// Says where a cluster of the state is from now on.
    pub fn set(&mut self, cluster: u64, content: VmStateCluster) {
        let (l1, index) = self.place(cluster);
        let entry = match content {
            VmStateCluster::Zero if self.says_zero == SaysZero::Entry => Entry::ZERO,
            VmStateCluster::Zero => Entry::UNALLOCATED,
            VmStateCluster::Data(offset) => Entry::data(offset),
            VmStateCluster::Compressed(place) => Entry::Compressed(CompressedPlace {
                offset: place.offset(),
                length: place.length(),
            }),
        };
        let cluster_size = self.geometry.cluster_size() as usize;
        let table = self.tables.entry(l1).or_insert_with(|| vec![0; cluster_size]);
        entry.write(table, index, self.geometry);
    }

    fn place(&self, cluster: u64) -> (u64, usize) {
        let entries = self.geometry.l2_entries();
        (cluster / entries, (cluster % entries) as usize)
    }

    /// A table in which zeros are said for what was never stored.
    fn without_gaps(&self, number: u64) -> Vec<u8> {
        let geometry = self.geometry;
        let absent = || vec![0; geometry.cluster_size() as usize];
        let mut table = self.tables.get(&number).cloned().unwrap_or_else(absent);
        if self.says_zero == SaysZero::Entry {
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
        draft: &mut Draft<'_, S>,
        l1: &mut Vec<u64>,
    ) -> Result<()> {
        let entries = self.size.div_ceil(self.geometry.l1_entry_span());
        l1.resize((self.first_l1 + entries) as usize, 0);
        for number in 0..entries {
            let table = self.without_gaps(number);
            draft.count_entries(&table, 0, Counting::Add)?;
            let offset = draft.put(table).await?;
            let reference = Reference { offset, ownership: Ownership::Shared };
            l1[(self.first_l1 + number) as usize] = l1_word(reference);
        }
        // Held once, and counted by its entries now.
        self.held.iter().try_for_each(|clusters| draft.ledger.remove_all(clusters.clone()))
    }
}
