//! Opens and closes an image.
//!
//! Opening:
//!
//! 1. The header, L1 table and refcount table are read.
//! 2. A truncated file is detected.
//! 3. For writing: the locations of the active tables are recorded, and the bitmaps are loaded.
//! 4. For writing: a flush makes data of a dead process, which is in the host's page cache,
//!    durable.
//! 5. For writing: the refcounts of an image with the dirty bit are counted anew. Then the caller
//!    replays a redo log, if there is one.
//!
//! Closing:
//!
//! 1. The session of the bitmaps ends.
//! 2. Everything dirty is written, and all frees are processed.
//! 3. The file is truncated after the last cluster in use.
//! 4. A flush; then the marks that the image is open are cleared.
//!
//! Settling, before another process opens the image, is the same as closing, but the file is not
//! truncated, and the image stays open.
//!
//! The file is truncated only at closing, when no I/O is in flight and none follows, so no write
//! can extend past the new end. A cluster is cut off if its refcount is 0 in memory and on disk,
//! and it has no active table. Clusters that existed when the image was opened are cut off only if
//! no table, of the active disk or of a snapshot, refers to any of them. Reason: the refcounts of
//! these clusters may be wrong, and a repair could still correct them. A crash before the
//! truncation leaves a longer file.

use blockhouse_core::{Error, ErrorKind, Result, StateMemory, Storage, SyncMode, rare};

use crate::CacheCounts;

use super::allocator::{Allocator, BackwardScan, MIN_WAITING};
use super::bitmaps::LiveBitmaps;
use super::check::truncation;
use super::header::ImageFacts;
use super::layout::header::{Header, Incompatible};
use super::layout::{table_io, words};
use super::mapping::Mapping;
use super::tables::{ActiveTables, Tables};
use super::transaction::{Transactions, logged_hosts, recount, show_snapshot};
use super::writeback::Metadata;
use super::{Access, BitmapActivity, Discard, Qcow2};

/// The maximum number of repeated searches for refcount blocks to drop at closing. The search is
/// repeated because, after a block was dropped, the block with the refcount of the dropped block
/// may be empty, too.
const MAX_PASSES: u32 = 8;

/// The options for opening an image.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// The access.
    pub access: Access,
    /// Maximum bytes of L2 tables and refcount blocks in memory. The minimum is four tables, and
    /// the refcounts that the allocation of these tables needs.
    pub cache_size: u64,
    /// The treatment of discarded space.
    pub discard: Discard,
    /// Bytes of freed clusters that may wait until a writeback runs for another reason, even if the
    /// file is short.
    pub min_waiting_frees: u64,
    /// How changes are recorded in bitmaps.
    pub bitmap_activity: BitmapActivity,
}

/// The size of the L2 tables and refcounts of 64 GiB of disk, with clusters of 64 KiB.
const DEFAULT_CACHE_SIZE: u64 = 10 << 20;

impl Default for OpenOptions {
    /// For reading and writing, with the tables of 64 GiB of disk in memory.
    fn default() -> Self {
        Self {
            access: Access::ReadWrite,
            cache_size: DEFAULT_CACHE_SIZE,
            discard: Discard::Unmap,
            min_waiting_frees: MIN_WAITING,
            bitmap_activity: BitmapActivity::default(),
        }
    }
}

impl<S: Storage> Qcow2<S> {
    /// Opens the image in `storage`.
    ///
    /// # Errors
    /// `Corrupt` if a structure violates the format, `Unsupported` if the image needs an
    /// unsupported feature or its clusters are smaller than the storage's blocks; both name the
    /// structure and the offset. Or errors of the storage.
    pub async fn open(storage: S, options: OpenOptions) -> Result<Self> {
        Self::open_before_replay(storage, options, None).await
    }

    /// As [`open`](Self::open), for an image whose `log` will be
    /// [replayed](super::ImageRedo::replay): metadata written during the opening is not placed in
    /// host clusters to which the log refers.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_before_replay(
        storage: S,
        options: OpenOptions,
        log: Option<&dyn StateMemory>,
    ) -> Result<Self> {
        let header = table_io::read_header(&storage).await?;
        check_access(&storage, &header, options.access)?;
        let l1_bytes = header.l1_entries as usize * 8;
        let l1 = table_io::read(&storage, header.l1_offset, l1_bytes).await?;
        let table_bytes = (header.refcount_table_clusters as usize) << header.geometry.cluster_bits;
        let table = table_io::read(&storage, header.refcount_table_offset, table_bytes).await?;
        let geometry = header.geometry;
        let (mut l1, refcount_table) = (words::words_of(&l1), words::words_of(&table));
        let tables = (&mut *l1, &*refcount_table);
        let truncation = truncation::find(&storage, &header, tables, options.access).await?;
        // The last cluster of a truncated file is incomplete, and is not counted.
        let clusters = match truncation {
            Some(_) => storage.size() >> geometry.cluster_bits,
            None => geometry.clusters_for(storage.size()),
        };
        let facts = ImageFacts {
            compression: header.compression,
            backing: header.backing.clone(),
            data_file: header.data_file.clone(),
            encryption: header.encryption,
            truncation,
            snapshot: None,
        };
        let slices = (options.cache_size / geometry.slice_size()).max(geometry.min_slices());
        let is_dirty = header.incompatible.contains(Incompatible::DIRTY);
        let mapping = Mapping::new(&header);
        let active = ActiveTables { header, l1, refcount_table, clusters };
        let mut tables = Tables::new(storage.name(), active, slices as usize);
        if !storage.grows_with_zeros() {
            tables.file.expect_stale_growth();
        }
        if options.access == Access::ReadWrite {
            tables.note_active()?;
        }
        let allocator = Allocator::new(clusters, options.min_waiting_frees);
        let components = (tables, allocator, mapping);
        let metadata = Metadata::new(storage, components, options.access, options.discard);
        let bitmaps = LiveBitmaps::new(options.bitmap_activity);
        if options.access == Access::ReadWrite {
            bitmaps.load(&metadata).await?;
        }
        if options.access == Access::ReadWrite {
            // A process that died may have written tables that no flush has covered. After this
            // flush, the tables that are read are durable.
            metadata.sync(SyncMode::Data).await?;
            if is_dirty {
                metadata.autoclear().begin_changes_before_replay().await?;
                rare(recount(&metadata, &logged_hosts(geometry, log))).await?;
            }
        }
        Ok(Self { metadata, transactions: Transactions::new(), bitmaps, facts })
    }

    /// Opens the state of an image in a snapshot, for reading. The machine's state follows the
    /// disk, see [`vm_states`](Self::vm_states).
    ///
    /// # Errors
    /// As [`open`](Self::open); `InvalidInput` for an unknown name.
    pub async fn open_snapshot(storage: S, options: OpenOptions, name: &str) -> Result<Self> {
        let mut image =
            Self::open(storage, OpenOptions { access: Access::ReadOnly, ..options }).await?;
        image.facts.snapshot = Some(show_snapshot(&image.metadata, name).await?);
        Ok(image)
    }

    /// Attaches the image's [data file](ImageFacts::data_file). Without the data file, nothing can
    /// be mapped.
    ///
    /// # Errors
    /// `InvalidInput` if the image has no data file; `Unsupported` if clusters are smaller than the
    /// data file's blocks.
    pub fn with_data(mut self, data: S) -> Result<Self> {
        if self.facts.data_file.is_none() {
            return Err(self.error(ErrorKind::InvalidInput, "the image has no data file"));
        }
        let block = u64::from(data.capabilities().alignment.offset);
        if self.cluster_size() < block {
            let size = self.cluster_size();
            let what = format!("clusters of {size} bytes in a data file of blocks of {block}");
            return Err(Error::new(ErrorKind::Unsupported, what)
                .on(data.name())
                .hint(table_io::SMALL_CLUSTERS));
        }
        self.metadata.lock().mapping.set_data_block(block);
        self.metadata.set_data_file(data);
        Ok(self)
    }

    /// As [`Format::settle`](crate::Format::settle).
    pub async fn settle(&self) -> Result<()> {
        rare(self.bitmaps.end(&self.metadata)).await?;
        self.metadata.write_everything().await?;
        self.metadata.settle().await
    }

    /// As [`Format::flush_all`](crate::Format::flush_all).
    pub async fn flush_all(&self, sync: SyncMode) -> Result<()> {
        // The first flush covers the data of writes in flight, but not late refcounts, which are
        // written below.
        self.metadata.flush(sync).await?;
        let are_late = self.metadata.lock().tables.headers.disk().has_late_refcounts();
        if are_late { self.metadata.write_back_all().await } else { Ok(()) }
    }

    /// As [`Format::close`](crate::Format::close).
    pub async fn close(&self) -> Result<()> {
        // If the end of the session fails, bitmaps have at most bits set in excess; the rest of the
        // image is closed nevertheless.
        let ended = match self.metadata.check_writable() {
            Ok(()) => rare(self.bitmaps.end(&self.metadata)).await,
            Err(_) => Ok(()),
        };
        self.metadata.write_everything().await?;
        if self.metadata.check_writable().is_ok() {
            truncate_file(&self.metadata).await?;
        }
        self.metadata.finish().await?;
        ended
    }

    /// The number of lookups that found metadata in memory, and of lookups that had to read
    /// metadata.
    pub fn cache_counts(&self) -> CacheCounts {
        self.metadata.lock().tables.cache.counts()
    }
}

fn check_access<S: Storage>(storage: &S, header: &Header, access: Access) -> Result<()> {
    if access == Access::ReadWrite && header.incompatible.contains(Incompatible::CORRUPT) {
        let what = "the image is marked as corrupt and can only be read";
        return Err(Error::new(ErrorKind::Corrupt, what)
            .on(storage.name())
            .at(72)
            .hint("repair it first (check --repair all)"));
    }
    if access == Access::ReadWrite
        && let Some(fault) = &header.snapshot_fault
    {
        return Err(Error::new(ErrorKind::Corrupt, fault.what.clone())
            .on(storage.name())
            .at(fault.offset)
            .hint("check --repair all removes the snapshots that cannot be used; it can be read as it is"));
    }
    Ok(())
}

/// Truncates the file after the last cluster in use. All changes are durable, and nothing is in
/// flight.
///
/// # Errors
/// Only errors of writing and of reading tables. If the storage cannot be truncated, its length is
/// not changed and no error is returned.
async fn truncate_file<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    metadata.writer().check_failure()?;
    if !metadata.lock().tables.has_counted() {
        return Ok(());
    }
    let mut scan = scan_backwards(metadata, BackwardScan::new).await?;
    for _ in 0..MAX_PASSES {
        if !scan.has_dropped() {
            break;
        }
        metadata.write_everything().await?;
        scan = scan_backwards(metadata, |below| scan.again(below)).await?;
    }
    if scan.has_dropped() {
        metadata.write_everything().await?;
    }
    let (clusters, is_sure, header, l1) = {
        let state = metadata.lock();
        let clusters = scan.clusters_in_use(&state.tables);
        let is_sure = state.tables.file.is_unwritten(clusters);
        (clusters, is_sure, state.tables.header().clone(), state.tables.l1().to_vec())
    };
    let storage = metadata.storage();
    let length = metadata.geometry().offset_of(clusters);
    if storage.size() <= length
        || (!is_sure && truncation::refers_past(storage, &header, &l1, length).await?)
    {
        return Ok(());
    }
    if storage.resize(length).await.is_ok() {
        let mut state = metadata.lock();
        let state = &mut *state;
        state.allocator.note_cut(&mut state.tables, clusters);
    }
    Ok(())
}

async fn scan_backwards<S: Storage>(
    metadata: &Metadata<S>,
    begin: impl FnOnce(u64) -> BackwardScan,
) -> Result<BackwardScan> {
    let in_file = metadata.geometry().clusters_for(metadata.storage().size());
    let mut scan = begin(metadata.lock().tables.file.bound().max(in_file));
    let scanned =
        metadata.step(|state| state.allocator.scan_backwards(&mut state.tables, &mut scan)).await;
    metadata.marking(scanned).await?;
    Ok(scan)
}
