//! A metadata transaction writes new tables to free clusters, then makes them active by one write
//! of the header.

use std::mem;
use std::ops::Range;

use async_lock::{Semaphore, SemaphoreGuard};
use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage, SyncMode, rare};
use futures_util::stream::{self, StreamExt};

use crate::qcow2::layout::bitmap_directory::{BITMAPS_CONSISTENT, DirectoryLocation, LIVE_BITMAPS};
use crate::qcow2::layout::data_file_mark::{DataFileMark, Voucher};
use crate::qcow2::layout::entry::{self, Entry, Reference, l1_word};
use crate::qcow2::layout::extensions::{self, Extension};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::snapshot_table::{self, SnapshotEntry, Table};
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::layout::{table_io, words};
use crate::qcow2::tables::ActiveTables;
use crate::qcow2::writeback::Metadata;

use super::data_file::lengthen_data_file;
use super::freeze::FreezeGuard;
use super::shadow_refcounts::{NewRefcounts, ShadowRefcounts};

/// Maximum number of L2 tables that are read in parallel, and of new tables that are collected for
/// one batch of writes.
const MAX_IN_FLIGHT: usize = 16;

/// Whether references are added or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RefcountDelta {
    Increment,
    Decrement,
}

/// The L1 tables that refer to the active L2 tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum L1Users {
    /// Only the active L1 table.
    Active,
    /// The active L1 table, and the L1 table of a snapshot that is being taken.
    ActiveAndSnapshot,
}

/// Serializes changes of the image as a whole.
pub(crate) struct Transactions {
    lock: Semaphore,
    /// Held while a change of the snapshots is prepared. Other transactions do not wait for this
    /// lock.
    preparation: Semaphore,
}

/// The metadata of the image as it will be after the transaction.
pub(super) struct MetadataTransaction<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    geometry: Geometry,
    /// The header after the transaction; offsets of tables are filled in at the end.
    header: Header,
    /// The active L1 table after the transaction.
    l1: Vec<u64>,
    old_l1: Vec<u64>,
    refcounts: ShadowRefcounts,
    snapshots: Vec<SnapshotEntry>,
    old_snapshots_length: u64,
    waiting: Vec<TableWrite>,
    /// The data file is extended to this length before the tables become active.
    data_length: u64,
}

impl Transactions {
    pub(crate) fn new() -> Self {
        Self { lock: Semaphore::new(1), preparation: Semaphore::new(1) }
    }

    /// Waits for the running transaction. No other transaction begins until the result is dropped.
    pub(super) async fn begin(&self) -> SemaphoreGuard<'_> {
        self.lock.acquire().await
    }

    /// Waits until no other change of the snapshots is being prepared. No other preparation begins
    /// until the result is dropped.
    pub(super) async fn begin_preparation(&self) -> SemaphoreGuard<'_> {
        self.preparation.acquire().await
    }

    /// Makes a change of the whole image durably. The caller ensures that no guest write is in
    /// flight; guest writes that begin during the change wait.
    pub(super) async fn run<S: Storage, T>(
        &self,
        metadata: &Metadata<S>,
        change: impl AsyncFnOnce(&mut MetadataTransaction<'_, S>) -> Result<T>,
    ) -> Result<T> {
        metadata.check_writable()?;
        check_no_data_file(metadata)?;
        metadata.check_intact()?;
        metadata.autoclear().begin_changes().await?;
        self.run_begun(metadata, change).await
    }

    /// As [`run`](Self::run), for a change that affects neither the guest's data nor its clusters.
    /// Therefore the bitmaps remain consistent, and the image may have a data file.
    pub(super) async fn run_beside_guest_data<S: Storage, T>(
        &self,
        metadata: &Metadata<S>,
        change: impl AsyncFnOnce(&mut MetadataTransaction<'_, S>) -> Result<T>,
    ) -> Result<T> {
        metadata.check_writable()?;
        metadata.check_intact()?;
        metadata.autoclear().begin_changes_beside_guest_data().await?;
        self.run_begun(metadata, change).await
    }

    async fn run_begun<S: Storage, T>(
        &self,
        metadata: &Metadata<S>,
        change: impl AsyncFnOnce(&mut MetadataTransaction<'_, S>) -> Result<T>,
    ) -> Result<T> {
        let _alone = self.begin().await;
        let mut freeze = FreezeGuard::freeze(metadata).await?;
        let mut transaction = rare(MetadataTransaction::begin(metadata)).await?;
        let outcome = change(&mut transaction).await?;
        let freed = rare(transaction.commit(&mut freeze)).await?;
        // A read may have looked up a freed cluster; if the cluster were reallocated before the
        // read ends, the read would return another owner's data.
        metadata.reads_ended().await;
        drop(freeze);
        metadata.give_to_host(&freed).await;
        Ok(outcome)
    }
}

/// Refuses snapshots for an image with a data file. Snapshots share clusters with the active disk,
/// but in a data file each guest cluster has one fixed host offset.
///
/// # Errors
/// `Unsupported`.
pub(crate) fn check_no_data_file<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    if !metadata.geometry().has_data_file {
        return Ok(());
    }
    let what = "an image with a data file has no snapshots and no VM states";
    Err(Error::new(ErrorKind::Unsupported, what)
        .on(metadata.storage().name())
        .hint("convert it to an image without one"))
}

impl<'a, S: Storage> MetadataTransaction<'a, S> {
    async fn begin(metadata: &'a Metadata<S>) -> Result<Self> {
        let (header, l1, table, active, quarantined) = {
            let state = metadata.lock();
            let tables = &state.tables;
            let (l1, table) = (tables.l1().to_vec(), tables.refcount_table().to_vec());
            let quarantined = state.allocator.quarantined().clone();
            let header = tables.headers.disk().clone();
            (header, l1, table, tables.active.clone(), quarantined)
        };
        let storage = metadata.storage();
        let Table { entries, length } = snapshot_table::read(storage, &header).await?;
        let refcounts =
            ShadowRefcounts::read(storage, &header, &table, active, quarantined).await?;
        Ok(Self {
            metadata,
            geometry: header.geometry,
            header,
            old_l1: l1.clone(),
            l1,
            refcounts,
            snapshots: entries,
            old_snapshots_length: length,
            waiting: Vec::new(),
            data_length: 0,
        })
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of the guest's disk.
    pub(super) fn size(&self) -> u64 {
        self.header.size
    }

    /// The header as it is on disk.
    pub(super) fn old_header(&self) -> Header {
        self.metadata.lock().tables.headers.disk().clone()
    }

    /// The header after the transaction, except the locations of tables that the transaction
    /// writes.
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Sets the location of the bitmap directory. `sector` is the present first sector of the
    /// header.
    ///
    /// # Errors
    /// `InvalidInput` if the header has no space.
    pub(super) fn set_bitmaps(
        &mut self,
        location: Option<DirectoryLocation>,
        sector: &[u8],
    ) -> Result<()> {
        let change = |header: &mut Header| {
            header.extensions.retain(|extension| extension.kind != extensions::BITMAPS);
            header.autoclear &= !BITMAPS_CONSISTENT;
            if let Some(location) = location {
                let data = location.to_bytes();
                header.extensions.insert(0, Extension { kind: extensions::BITMAPS, data });
                header.autoclear |= BITMAPS_CONSISTENT;
            }
        };
        self.change_header(change, sector)
    }

    /// Changes fields of the header that [`Header::patch`] stores, and its extensions. `sector` is
    /// the present first sector of the header.
    ///
    /// # Errors
    /// `InvalidInput` if the header has no space.
    pub(super) fn change_header(
        &mut self,
        change: impl FnOnce(&mut Header),
        sector: &[u8],
    ) -> Result<()> {
        change(&mut self.header);
        if self.header.fit_extensions(sector) {
            return Ok(());
        }
        let what = "the header has no room for that in its first sector";
        Err(Error::new(ErrorKind::InvalidInput, what)
            .on(self.metadata.storage().name())
            .hint("convert the image into one with larger clusters"))
    }

    /// Changes the active L1 table, and the size of the disk that it maps.
    pub(super) fn set_l1(&mut self, l1: Vec<u64>, size: u64) {
        self.l1 = l1;
        self.header.size = size;
    }

    /// Sets the length to which the data file is extended. In a side file, also sets the second
    /// size that the data file may have beside the disk's size: `larger`, the larger of the old and
    /// new size. The side file's header also gets the mark of a session, so that changes are
    /// attributed to this process even if it is killed.
    pub(super) fn set_data_size(&mut self, size: u64, larger: u64, voucher: Option<Voucher>) {
        self.data_length = size;
        if DataFileMark::of(&self.header).is_some() {
            self.header.autoclear |= LIVE_BITMAPS;
            DataFileMark::set_other_size(&mut self.header, larger);
            if let Some(voucher) = voucher {
                DataFileMark::set_voucher(&mut self.header, voucher);
            }
        }
    }

    /// The active L1 table.
    pub(super) fn l1(&self) -> &[u64] {
        &self.l1
    }

    pub(super) fn snapshots(&self) -> &[SnapshotEntry] {
        &self.snapshots
    }

    pub(super) fn snapshots_mut(&mut self) -> &mut Vec<SnapshotEntry> {
        &mut self.snapshots
    }

    /// The L1 table of a snapshot.
    pub(super) async fn l1_of(&self, snapshot: &SnapshotEntry) -> Result<Vec<u64>> {
        let bytes = snapshot.l1_entries as usize * 8;
        let table = table_io::read(self.metadata.storage(), snapshot.l1_offset, bytes).await?;
        Ok(words::words_of(&table))
    }

    /// Increments or decrements the refcount of each cluster in the tree under an L1 table, once
    /// for each reference.
    pub(super) async fn count_tree(&mut self, l1: &[u64], how: RefcountDelta) -> Result<()> {
        let tables: Vec<Reference> = references(self.metadata, l1)?.into_iter().flatten().collect();
        for some in tables.chunks(MAX_IN_FLIGHT) {
            let contents = self.read_tables(some).await?;
            for (table, bytes) in some.iter().zip(contents) {
                self.count_one(self.geometry.cluster_of(table.offset), how)?;
                self.count_entries(&bytes, table.offset, how)?;
            }
        }
        Ok(())
    }

    /// Increments or decrements the refcounts of the clusters that an L2 table refers to. `offset`
    /// is for error messages.
    pub(super) fn count_entries(
        &mut self,
        l2: &[u8],
        offset: u64,
        how: RefcountDelta,
    ) -> Result<()> {
        for index in 0..self.geometry.l2_entries() as usize {
            let clusters = match self.entry(l2, index, offset)? {
                Entry::Standard { host: None, .. } => continue,
                Entry::Standard { host: Some(host), .. } => {
                    let cluster = self.geometry.cluster_of(host.offset);
                    cluster..cluster + 1
                }
                Entry::Compressed(data) => data.host_clusters(self.geometry),
            };
            for cluster in clusters {
                self.count_one(cluster, how)?;
            }
        }
        Ok(())
    }

    /// Increments or decrements the refcount of a cluster.
    pub(super) fn count_one(&mut self, cluster: u64, how: RefcountDelta) -> Result<()> {
        match how {
            RefcountDelta::Increment => self.refcounts.increment(cluster),
            RefcountDelta::Decrement => self.refcounts.decrement(cluster),
        }
    }

    /// An entry of an L2 table. `offset` is for error messages.
    pub(super) fn entry(&self, l2: &[u8], index: usize, offset: u64) -> Result<Entry> {
        Entry::read(l2, index, self.geometry).map_err(|violation| {
            let offset = offset + index as u64 * self.geometry.l2_entry_size();
            self.corrupt(format!("an L2 entry {violation}"), offset)
        })
    }

    fn corrupt(&self, what: String, offset: u64) -> Error {
        let error =
            Error::new(ErrorKind::Corrupt, what).on(self.metadata.storage().name()).at(offset);
        error.hint("check the image before using it")
    }

    /// The L2 table at `offset`.
    pub(super) async fn read_table(&self, offset: u64) -> Result<Vec<u8>> {
        let mut tables = self.read_tables(&[Reference { offset, copied: false }]).await?;
        tables.pop().ok_or_else(|| self.corrupt("an L2 table is missing".to_owned(), offset))
    }

    async fn read_tables(&self, tables: &[Reference]) -> Result<Vec<Vec<u8>>> {
        let (storage, length) = (self.metadata.storage(), self.geometry.cluster_size());
        let read = async |table: &Reference| {
            if table.offset >= storage.size() {
                let what = "an L2 table lies beyond the end of the file".to_owned();
                return Err(self.corrupt(what, table.offset));
            }
            table_io::read(storage, table.offset, length as usize).await
        };
        let reads = stream::iter(tables.iter().map(read)).buffered(MAX_IN_FLIGHT);
        reads.collect::<Vec<_>>().await.into_iter().collect()
    }

    /// Makes the copied flags of the active tables agree with the new refcounts. If a flag in an L2
    /// table changes, the table is written to a new cluster.
    pub(super) async fn update_copied_flags(&mut self, users: L1Users) -> Result<()> {
        let mut l1 = mem::take(&mut self.l1);
        let tables = references(self.metadata, &l1)?;
        let tables: Vec<(usize, Reference)> =
            (0..).zip(tables).filter_map(|(index, table)| Some((index, table?))).collect();
        for some in tables.chunks(MAX_IN_FLIGHT) {
            let references: Vec<Reference> = some.iter().map(|&(_, table)| table).collect();
            let contents = self.read_tables(&references).await?;
            for (&(index, table), bytes) in some.iter().zip(contents) {
                let offset = self.update_copied_flags_of(table.offset, bytes, users).await?;
                l1[index] = l1_word(self.reference_to(offset));
            }
        }
        self.l1 = l1;
        Ok(())
    }

    /// Returns the offset of the L2 table with the right flags: the old table if no flag changed,
    /// otherwise a copy.
    async fn update_copied_flags_of(
        &mut self,
        old: u64,
        mut l2: Vec<u8>,
        users: L1Users,
    ) -> Result<u64> {
        let mut has_changed = false;
        for index in 0..self.geometry.l2_entries() as usize {
            if let Entry::Standard { host: Some(host), subclusters } =
                self.entry(&l2, index, old)?
            {
                let marked = self.reference_to(host.offset);
                if marked != host {
                    has_changed = true;
                    Entry::Standard { host: Some(marked), subclusters }.write(
                        &mut l2,
                        index,
                        self.geometry,
                    );
                }
            }
        }
        if !has_changed {
            return Ok(old);
        }
        let new = self.put(l2).await?;
        let cluster = self.geometry.cluster_of(old);
        self.refcounts.decrement(cluster)?;
        if users == L1Users::ActiveAndSnapshot {
            self.refcounts.decrement(cluster)?;
            self.refcounts.increment(self.geometry.cluster_of(new))?;
        }
        Ok(new)
    }

    /// The reference to a cluster, with the copied flag for the cluster's new refcount.
    pub(super) fn reference_to(&self, offset: u64) -> Reference {
        let copied = self.refcounts.new_refcount(self.geometry.cluster_of(offset)) == 1;
        Reference { offset, copied }
    }

    /// Allocates free clusters for bytes, and returns their offset. The bytes are written later, in
    /// a batch.
    pub(super) async fn put(&mut self, bytes: Vec<u8>) -> Result<u64> {
        let first = self.refcounts.allocate(self.geometry.clusters_for(bytes.len() as u64))?;
        let offset = self.geometry.offset_of(first);
        self.waiting.push(TableWrite { offset, bytes });
        if self.waiting.len() >= MAX_IN_FLIGHT {
            self.write_waiting().await?;
        }
        Ok(offset)
    }

    /// Writes all bytes that were [put](Self::put), so that they can be read from the file.
    pub(super) async fn write_waiting(&mut self) -> Result<()> {
        let writes = mem::take(&mut self.waiting);
        write_beside(self.metadata, &writes).await
    }

    /// Releases these clusters: lowers the refcount of each by one.
    pub(super) fn release_clusters(&mut self, clusters: Range<u64>) -> Result<()> {
        self.refcounts.decrement_all(clusters)
    }

    /// Releases the clusters of the `length` bytes at `offset`.
    pub(super) fn release(&mut self, offset: u64, length: u64) -> Result<()> {
        let first = self.geometry.cluster_of(offset);
        self.refcounts.decrement_all(first..first + self.geometry.clusters_for(length))
    }

    /// Writes the remaining tables durably, then makes all new tables active by a write of the
    /// header. Returns the freed clusters.
    async fn commit(mut self, freeze: &mut FreezeGuard<'_, S>) -> Result<Vec<Range<u64>>> {
        self.put_l1().await?;
        self.put_snapshots().await?;
        let Self { metadata, mut header, l1, refcounts, waiting, data_length, .. } = self;
        write_beside(metadata, &waiting).await?;
        let NewRefcounts { writes, table, table_offset, table_clusters, freed } =
            refcounts.finalize()?;
        write_beside(metadata, &writes).await?;
        drop(writes);
        metadata.sync(SyncMode::Data).await?;
        // The space of all new tables is allocated and durable, so the remaining steps need no new
        // space in the image.
        lengthen_data_file(metadata, data_length, |disk_header| {
            disk_header.autoclear |= header.autoclear & LIVE_BITMAPS;
            DataFileMark::copy(&header, disk_header);
        })
        .await?;
        header.refcount_table_offset = table_offset;
        header.refcount_table_clusters = table_clusters;
        freeze.begin_switch();
        metadata.switch_header(header.clone()).await?;
        activate(
            metadata,
            ActiveTables {
                clusters: header.geometry.clusters_for(metadata.storage().size()),
                header,
                l1,
                refcount_table: table,
            },
        )?;
        freeze.end_switch();
        Ok(freed)
    }

    async fn put_l1(&mut self) -> Result<()> {
        if self.l1 == self.old_l1 {
            return Ok(());
        }
        let old_length = self.old_l1.len() as u64 * 8;
        if old_length > 0 {
            self.release(self.header.l1_offset, old_length)?;
        }
        self.header.l1_entries = self.l1.len() as u32;
        self.header.l1_offset =
            if self.l1.is_empty() { 0 } else { self.put(words::bytes_of(&self.l1)).await? };
        Ok(())
    }

    async fn put_snapshots(&mut self) -> Result<()> {
        if self.header.snapshots > 0 {
            self.release(self.header.snapshots_offset, self.old_snapshots_length)?;
        }
        self.header.snapshots = self.snapshots.len() as u32;
        self.header.snapshots_offset = if self.snapshots.is_empty() {
            0
        } else {
            self.put(snapshot_table::to_bytes(&self.snapshots)).await?
        };
        Ok(())
    }
}

/// Writes tables that are not active. The known end of the file advances before the writes. Reason:
/// clusters past the old end may no longer read as zeros, even if the transaction is dropped while
/// its writes are in flight.
async fn write_beside<S: Storage>(metadata: &Metadata<S>, writes: &[TableWrite]) -> Result<()> {
    let end = |write: &TableWrite| write.offset + write.bytes.len() as u64;
    if let Some(end) = writes.iter().map(end).max() {
        let end = metadata.geometry().clusters_for(end);
        metadata.lock().tables.file.advance(end);
    }
    metadata.writer().write(writes, Durability::None).await
}

/// Replaces the tables in memory by the tables that the header on disk now refers to.
fn activate<S: Storage>(metadata: &Metadata<S>, active: ActiveTables) -> Result<()> {
    let (size, clusters) = (active.header.size, active.clusters);
    let outcome = {
        let mut state = metadata.lock();
        state.allocator.replace_tables(clusters);
        state.tables.replace(active)
    };
    metadata.publish_size(size);
    outcome.inspect_err(|error| metadata.writer().record(error))
}

/// The L2 tables that the entries of an L1 table refer to.
pub(super) fn references<S: Storage>(
    metadata: &Metadata<S>,
    l1: &[u64],
) -> Result<Vec<Option<Reference>>> {
    let reference = |(index, &word): (usize, &u64)| {
        entry::l1_reference(word, metadata.geometry()).map_err(|violation| {
            let what = format!("entry {index} of an L1 table {violation}");
            Error::new(ErrorKind::Corrupt, what).on(metadata.storage().name())
        })
    };
    l1.iter().enumerate().map(reference).collect()
}
