//! Adds, removes, clears, enables, disables and merges persistent bitmaps.
//!
//! Each change is a transaction, so that after a crash the image has either all old bitmaps or all
//! new ones. New tables, bits and a new directory are written beside the old ones. Then one write
//! of the header's first sector changes the header extension that has the directory's location.
//! Therefore the extension must be in this sector. If the extension is elsewhere, or the backing
//! file's name occupies the space, both are moved first.

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

use crate::qcow2::Qcow2;
use crate::qcow2::bitmaps::{
    BitRuns, BitmapExtent, BitmapLossObserver, Bits, BitsReader, LiveBitmaps, MAX_LIVE, clear_bits,
    extents_of, set_bits,
};
use crate::qcow2::layout::bitmap_directory::{
    self, Bitmap, BitmapEntry, BitmapFlags, BitsCluster, DirectoryLocation, index_of,
};
use crate::qcow2::layout::data_file_mark::Voucher;
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::{Header, SECTOR};
use crate::qcow2::layout::limits::{
    MAX_BITMAP_BYTES, MAX_BITMAP_DIRECTORY, MAX_BITMAP_NAME, MAX_BITMAPS, MAX_GRANULARITY_BITS,
    MIN_GRANULARITY_BITS,
};
use crate::qcow2::layout::{table_io, words};
use crate::qcow2::writeback::Metadata;

use super::bitmap_removal::remove_in_place;
use super::metadata_transaction::MetadataTransaction;

/// A bitmap to be added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBitmap {
    /// The name: 1 to 1023 bytes, different from all other names in the image.
    pub name: String,
    /// Bytes of the disk that one bit covers: a power of two, 512 B to 2 GiB. `None`: the size of a
    /// cluster, but at least 4 KiB and at most 64 KiB.
    pub granularity: Option<u64>,
    /// Whether changes of the disk are recorded in the bitmap.
    pub is_enabled: bool,
}

/// The change of one bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapAction {
    /// The bitmap is removed.
    Remove,
    /// All bits of the bitmap are cleared.
    Clear,
    /// Changes are recorded in the bitmap from now on.
    Enable,
    /// Changes are not recorded in the bitmap from now on.
    Disable,
}

/// A change of one bitmap. Several such changes can be made together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// A bitmap is added, with all bits clear.
    Add(NewBitmap),
    /// A bitmap is changed.
    Change {
        /// The name of the bitmap.
        name: String,
        /// The change of this bitmap.
        action: BitmapAction,
    },
    /// The changes in another bitmap of the image are merged into a bitmap.
    Merge {
        /// The name of the bitmap.
        name: String,
        /// The name of the other bitmap.
        source: String,
    },
}

/// The persistent bitmaps of an image. A change of bitmaps is durable when its method returns, and
/// happens as a whole or not at all. No change of the guest's data may be in flight during the
/// method.
pub struct Bitmaps<'a, S: Storage> {
    pub(super) image: &'a Qcow2<S>,
}

impl<S: Storage> Qcow2<S> {
    /// The image's persistent bitmaps.
    pub fn bitmaps(&self) -> Bitmaps<'_, S> {
        Bitmaps { image: self }
    }
}

impl<S: Storage> Bitmaps<'_, S> {
    /// Whether an image that is open for writing has bitmaps that are consistent with the disk.
    pub fn has_any(&self) -> bool {
        self.image.bitmaps.has_any()
    }

    /// All bitmaps, in the order in which they were added. The list is empty if another program has
    /// changed the disk without recording its changes in the bitmaps.
    ///
    /// # Errors
    /// `Corrupt` if the directory contradicts the format.
    pub async fn list(&self) -> Result<Vec<Bitmap>> {
        let Qcow2 { metadata, bitmaps: live, .. } = self.image;
        // Without the read guard, a concurrent change of the bitmaps could free clusters of the old
        // bitmaps, and the guest's data could be written to these clusters.
        let _read = metadata.begin_read();
        let header = metadata.lock().tables.headers.disk().clone();
        let entries = bitmap_directory::read(metadata.storage(), &header).await?;
        let described = entries.iter().map(|entry| {
            let bitmap = entry.described(&header);
            let lacks_since = if bitmap.is_inconsistent {
                live.lost_at(&bitmap.name)
            } else {
                bitmap.lacks_since
            };
            Bitmap { lacks_since, ..bitmap }
        });
        Ok(described.collect())
    }

    /// The bits of the bitmap of this name for `range`, which lies inside the disk: adjacent
    /// extents, at least `max` unless there are fewer. For an enabled bitmap of a writable image,
    /// the extents include all changes up to now.
    ///
    /// # Errors
    /// `InvalidInput` if no bitmap has this name; `LacksChanges` if the bitmap is inconsistent;
    /// `Corrupt`; storage errors.
    pub async fn extents(
        &self,
        name: &str,
        range: ByteRange,
        max: usize,
    ) -> Result<Vec<BitmapExtent>> {
        let Qcow2 { metadata, bitmaps: live, .. } = self.image;
        let image = metadata.storage().name();
        loop {
            // As in `list`.
            let read = metadata.begin_read();
            let header = metadata.lock().tables.headers.disk().clone();
            let entries = bitmap_directory::read(metadata.storage(), &header).await?;
            let entry = &entries[index_of(image, name, &entries)?];
            check_consistent(image, entry, &header)?;
            if let Some(extents) = extents_of(metadata, live, entry, range, max).await? {
                return Ok(extents);
            }
            // The task that replaces the bitmap may wait for reads, to allocate a cluster.
            drop(read);
            live.settled().await;
        }
    }

    /// From now on, calls `observer` for each bitmap that becomes coarser or is lost because a
    /// change could not be recorded in the bitmap. Later observers of an image are ignored.
    pub fn observe_losses(&self, observer: BitmapLossObserver) {
        self.image.bitmaps.observe_losses(observer);
    }

    /// Makes each session begin with a voucher from `vouch`. The method is only for a side file
    /// whose raw image no other process uses. This process must [renew](Self::renew_voucher) the
    /// voucher in time.
    pub fn vouch_by(&self, vouch: fn() -> Option<Voucher>) {
        self.image.bitmaps.vouch_by(vouch);
    }

    /// Writes a new voucher durably, if the session has one.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn renew_voucher(&self) -> Result<()> {
        self.image.bitmaps.renew_voucher(&self.image.metadata).await
    }

    /// For an image that is open for writing: the maximum number of unchanged bytes that each
    /// enabled bitmap may report as changed; 0 if the header has no mark of a session. Reason for
    /// such bytes: a process that recorded changes in the bitmap was killed.
    pub fn excess(&self) -> u64 {
        self.image.bitmaps.excess(&self.image.metadata)
    }

    /// Marks `range` as changed in the enabled bitmaps, without a write to `range`. The marks are
    /// durable when the method returns. A bitmap that cannot record `range` is lost, as with a
    /// change of the disk.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn record(&self, range: ByteRange) -> Result<()> {
        let Qcow2 { metadata, bitmaps: live, .. } = self.image;
        let mut rest = range;
        while !rest.is_empty() {
            let recorded = live.record(metadata, rest).await?;
            rest = rest.skip(recorded.length());
        }
        Ok(())
    }

    /// Adds a bitmap with all bits clear.
    ///
    /// # Errors
    /// `InvalidInput` for a name that exists, is empty or too long, a granularity that is
    /// unsupported or makes the bitmap too large, too many bitmaps, or a full header; `Unsupported`
    /// for version 2; `NoSpace`; storage errors. On error nothing has changed, unless the write of
    /// the header failed.
    pub async fn add(&self, new: &NewBitmap) -> Result<()> {
        let change = async |entries: &mut Vec<BitmapEntry>,
                            transaction: &mut MetadataTransaction<'_, S>| {
            add_entry(&self.image.metadata, entries, transaction, new).await
        };
        run(self.image, change).await
    }

    /// Changes the bitmap of this name.
    ///
    /// # Errors
    /// `InvalidInput` if no bitmap has this name; `LacksChanges` if the bitmap is inconsistent and
    /// `action` does not remove it; or as [`add`](Self::add).
    pub async fn change(&self, name: &str, action: BitmapAction) -> Result<()> {
        let Qcow2 { metadata, bitmaps: live, .. } = self.image;
        let change = async |entries: &mut Vec<BitmapEntry>,
                            transaction: &mut MetadataTransaction<'_, S>| {
            change_entry(metadata, entries, transaction, name, action).await
        };
        match run(self.image, change).await {
            Err(error) if action == BitmapAction::Remove && error.kind() == ErrorKind::NoSpace => {
                let removed = remove_in_place(self.image, name, error).await;
                let _ = live.load(metadata).await;
                removed?;
                // The bitmap is removed even if its clusters cannot be freed.
                let _ = metadata.reclaim().await;
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Makes changes of bitmaps, all of them or none. `prepared` is awaited when all changes are
    /// prepared, before the remaining tables are written and one write makes the changes effective.
    /// If `prepared` fails, no change is made.
    ///
    /// # Errors
    /// As [`add`](Self::add) and [`change`](Self::change), or the error of `prepared`.
    pub async fn change_all(
        &self,
        changes: &[BitmapChange],
        prepared: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let metadata = &self.image.metadata;
        let change = async |entries: &mut Vec<BitmapEntry>,
                            transaction: &mut MetadataTransaction<'_, S>| {
            for change in changes {
                // A change may read tables that an earlier change has stored.
                transaction.write_waiting().await?;
                match change {
                    BitmapChange::Add(new) => {
                        add_entry(metadata, entries, transaction, new).await?
                    }
                    BitmapChange::Change { name, action } => {
                        change_entry(metadata, entries, transaction, name, *action).await?;
                    }
                    BitmapChange::Merge { name, source } => {
                        let (storage, size) = (metadata.storage(), metadata.size());
                        let from = &entries[index_of(storage.name(), source, entries)?];
                        check_consistent(storage.name(), from, transaction.header())?;
                        let from =
                            BitsReader::open(storage, metadata.geometry(), from, size).await?;
                        merge_entry(metadata, entries, transaction, name, &from).await?;
                    }
                }
            }
            Ok(())
        };
        run_prepared(self.image, change, prepared).await
    }

    /// Merges the bitmap `source_name` of `source`, which may be this image, into the bitmap
    /// `name`, whose granularity may differ.
    ///
    /// # Errors
    /// `InvalidInput` for disks of different sizes; or as [`change`](Self::change).
    pub async fn merge(
        &self,
        name: &str,
        source: &Bitmaps<'_, S>,
        source_name: &str,
    ) -> Result<()> {
        let (metadata, source) = (&self.image.metadata, &source.image.metadata);
        let image = metadata.storage().name();
        if metadata.size() != source.size() {
            let what = format!(
                "bitmaps of disks of {} and {} bytes cannot be merged",
                metadata.size(),
                source.size()
            );
            return Err(Error::new(ErrorKind::InvalidInput, what)
                .on(image)
                .hint("resize one of the disks first"));
        }
        let source_header = source.lock().tables.headers.disk().clone();
        let of_source = bitmap_directory::read(source.storage(), &source_header).await?;
        let from = &of_source[index_of(source.storage().name(), source_name, &of_source)?];
        check_consistent(source.storage().name(), from, &source_header)?;
        let reader =
            BitsReader::open(source.storage(), source.geometry(), from, source.size()).await?;
        let change = async |entries: &mut Vec<BitmapEntry>,
                            transaction: &mut MetadataTransaction<'_, S>| {
            merge_entry(metadata, entries, transaction, name, &reader).await
        };
        run(self.image, change).await
    }
}

async fn add_entry<S: Storage>(
    metadata: &Metadata<S>,
    entries: &mut Vec<BitmapEntry>,
    transaction: &mut MetadataTransaction<'_, S>,
    new: &NewBitmap,
) -> Result<()> {
    let image = metadata.storage().name();
    let granularity_bits = granularity_bits(image, new.granularity, metadata.geometry())?;
    let flags = if new.is_enabled { BitmapFlags::AUTO } else { BitmapFlags::empty() };
    let mut entry = BitmapEntry::new(new.name.as_bytes(), granularity_bits, flags);
    check_new(image, &entry, entries)?;
    if new.is_enabled {
        check_live(image, entries, transaction.header())?;
    }
    place_empty_table(&mut entry, image, transaction).await?;
    entries.push(entry);
    Ok(())
}

async fn change_entry<S: Storage>(
    metadata: &Metadata<S>,
    entries: &mut Vec<BitmapEntry>,
    transaction: &mut MetadataTransaction<'_, S>,
    name: &str,
    action: BitmapAction,
) -> Result<()> {
    let image = metadata.storage().name();
    let index = index_of(image, name, entries)?;
    if action == BitmapAction::Remove {
        let removed = entries.remove(index);
        return release_bitmap(&removed, metadata.storage(), transaction).await;
    }
    check_consistent(image, &entries[index], transaction.header())?;
    if action == BitmapAction::Enable && !entries[index].flags.contains(BitmapFlags::AUTO) {
        check_live(image, entries, transaction.header())?;
    }
    let entry = &mut entries[index];
    match action {
        BitmapAction::Remove | BitmapAction::Clear => {
            release_bitmap(entry, metadata.storage(), transaction).await?;
            place_empty_table(entry, image, transaction).await?;
        }
        BitmapAction::Enable => entry.flags.insert(BitmapFlags::AUTO),
        BitmapAction::Disable => entry.flags.remove(BitmapFlags::AUTO),
    }
    Ok(())
}

async fn merge_entry<S: Storage>(
    metadata: &Metadata<S>,
    entries: &mut [BitmapEntry],
    transaction: &mut MetadataTransaction<'_, S>,
    name: &str,
    reader: &BitsReader<'_, S>,
) -> Result<()> {
    let image = metadata.storage().name();
    let entry = &mut entries[index_of(image, name, entries)?];
    check_consistent(image, entry, transaction.header())?;
    let old = BitsReader::open(metadata.storage(), metadata.geometry(), entry, metadata.size());
    let merged = Merge::run(&old.await?, reader, None, transaction).await?;
    release_bitmap(entry, metadata.storage(), transaction).await?;
    place_table(entry, merged, transaction).await
}

/// Runs a change of the directory in a transaction. `change` receives the old entries.
pub(super) async fn run<S: Storage>(
    image: &Qcow2<S>,
    change: impl AsyncFnOnce(&mut Vec<BitmapEntry>, &mut MetadataTransaction<'_, S>) -> Result<()>,
) -> Result<()> {
    run_prepared(image, change, async || Ok(())).await
}

/// As [`run`]; `prepared` is awaited before the change becomes effective.
async fn run_prepared<S: Storage>(
    Qcow2 { metadata, transactions, bitmaps: live, .. }: &Qcow2<S>,
    change: impl AsyncFnOnce(&mut Vec<BitmapEntry>, &mut MetadataTransaction<'_, S>) -> Result<()>,
    prepared: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    if metadata.geometry().version < 3 {
        let what = "an image of version 2 has no bitmaps";
        return Err(Error::new(ErrorKind::Unsupported, what)
            .on(metadata.storage().name())
            .hint("convert it to compat=1.1"));
    }
    let transaction = async |transaction: &mut MetadataTransaction<'_, S>| {
        change_directory(metadata, transaction, live, change).await?;
        prepared().await
    };
    prepare_directory(metadata, live).await?;
    let outcome = transactions.run_beside_guest_data(metadata, transaction).await;
    // If loading fails, the next change retries it.
    let _ = live.load(metadata).await;
    outcome
}

/// Prepares for a transaction that changes the directory: ends the session, because its marks
/// belong to the bitmaps of the old directory, and makes space in the first sector.
pub(super) async fn prepare_directory<S: Storage>(
    metadata: &Metadata<S>,
    live: &LiveBitmaps,
) -> Result<()> {
    live.end(metadata).await?;
    super::backing::free_first_sector(metadata).await
}

/// Changes the directory in a transaction. The caller [loads](LiveBitmaps::load) the bitmaps again,
/// also after an error.
pub(super) async fn change_directory<S: Storage>(
    metadata: &Metadata<S>,
    transaction: &mut MetadataTransaction<'_, S>,
    live: &LiveBitmaps,
    change: impl AsyncFnOnce(&mut Vec<BitmapEntry>, &mut MetadataTransaction<'_, S>) -> Result<()>,
) -> Result<()> {
    live.forget();
    let header = transaction.old_header();
    let mut entries = bitmap_directory::read(metadata.storage(), &header).await?;
    let location = DirectoryLocation::of(&header).unwrap_or_default();
    change(&mut entries, transaction).await?;
    if let Some(DirectoryLocation { offset, length, .. }) = location {
        transaction.release(offset, length)?;
    }
    let bytes = bitmap_directory::to_bytes(&entries);
    let (count, length) = (entries.len(), bytes.len() as u64);
    if count > MAX_BITMAPS as usize || length > MAX_BITMAP_DIRECTORY {
        let what = format!("{count} bitmaps are more than the format allows");
        let error = Error::new(ErrorKind::InvalidInput, what).on(metadata.storage().name());
        return Err(error.hint("remove some of them first"));
    }
    let location = if entries.is_empty() {
        None
    } else {
        let offset = transaction.put(bytes).await?;
        Some(DirectoryLocation { count: count as u32, length, offset })
    };
    let sector = table_io::read(metadata.storage(), 0, SECTOR).await?;
    transaction.set_bitmaps(location, &sector)
}

fn granularity_bits(image: &str, asked: Option<u64>, geometry: Geometry) -> Result<u32> {
    let granularity = asked.unwrap_or(geometry.cluster_size().clamp(4 << 10, 64 << 10));
    let bits = granularity.trailing_zeros();
    let is_possible = (MIN_GRANULARITY_BITS..=MAX_GRANULARITY_BITS).contains(&bits);
    if granularity.is_power_of_two() && is_possible {
        return Ok(bits);
    }
    let what =
        format!("a bitmap's granularity is a power of two, 512 B to 2 GiB, not {granularity}");
    Err(Error::new(ErrorKind::InvalidInput, what).on(image).hint("64K suits most disks"))
}

fn check_new(image: &str, new: &BitmapEntry, entries: &[BitmapEntry]) -> Result<()> {
    if new.name.is_empty() || new.name.len() > MAX_BITMAP_NAME {
        let length = new.name.len();
        let what = format!("a bitmap's name has 1 to {MAX_BITMAP_NAME} bytes, not {length}");
        return Err(Error::new(ErrorKind::InvalidInput, what)
            .on(image)
            .hint("choose another name"));
    }
    if entries.iter().any(|entry| entry.name == new.name) {
        let what = format!("{} is there already", new.called());
        let error = Error::new(ErrorKind::InvalidInput, what).on(image);
        return Err(error.hint("choose another name, or remove that bitmap first"));
    }
    Ok(())
}

/// Fails if no further bitmap can be enabled: with too many enabled bitmaps, no change of the disk
/// could be made.
pub(super) fn check_live(image: &str, entries: &[BitmapEntry], header: &Header) -> Result<()> {
    let is_live = |entry: &&BitmapEntry| {
        entry.flags.contains(BitmapFlags::AUTO) && !entry.is_inconsistent(header)
    };
    let count = entries.iter().filter(is_live).count();
    if count < MAX_LIVE {
        return Ok(());
    }
    let what = format!("{count} bitmaps are enabled, and no more than {MAX_LIVE} can be");
    let error = Error::new(ErrorKind::InvalidInput, what).on(image);
    Err(error.hint("disable or remove one of them first"))
}

pub(super) fn check_consistent(image: &str, entry: &BitmapEntry, header: &Header) -> Result<()> {
    if !entry.is_inconsistent(header) {
        return Ok(());
    }
    let what = format!(
        "{} could not be kept or saved by its last writer, and lacks changes",
        entry.called()
    );
    Err(Error::new(ErrorKind::LacksChanges, what)
        .on(image)
        .hint("it can only be removed; the next backup has to be a full one"))
}

/// Frees the clusters of a removed bitmap.
pub(super) async fn release_bitmap<S: Storage>(
    entry: &BitmapEntry,
    storage: &S,
    transaction: &mut MetadataTransaction<'_, S>,
) -> Result<()> {
    let clusters = entry.clusters(storage, transaction.geometry()).await?;
    clusters.into_iter().try_for_each(|run| transaction.release_clusters(run))
}

async fn place_empty_table<S: Storage>(
    entry: &mut BitmapEntry,
    image: &str,
    transaction: &mut MetadataTransaction<'_, S>,
) -> Result<()> {
    let geometry = transaction.geometry();
    let clusters = entry.clusters_for(transaction.size(), geometry);
    check_bounds(image, entry, clusters, geometry)?;
    place_table(entry, vec![BitsCluster::Zeros; clusters as usize], transaction).await
}

/// Fails if this many clusters are too many for a bitmap: QEMU opens no image with a larger bitmap.
pub(super) fn check_bounds(
    image: &str,
    entry: &BitmapEntry,
    clusters: u64,
    geometry: Geometry,
) -> Result<()> {
    if clusters <= MAX_BITMAP_BYTES >> geometry.cluster_bits {
        return Ok(());
    }
    let what = format!(
        "{} would take more than 512 MiB with a granularity of {}",
        entry.called(),
        1_u64 << entry.granularity_bits
    );
    let hint = "one of a larger granularity can be added, this one be merged into it, and removed";
    Err(Error::new(ErrorKind::InvalidInput, what).on(image).hint(hint))
}

pub(super) async fn place_table<S: Storage>(
    entry: &mut BitmapEntry,
    mut table: Vec<BitsCluster>,
    transaction: &mut MetadataTransaction<'_, S>,
) -> Result<()> {
    if table.is_empty() {
        // QEMU refuses a bitmap without a table, even of an empty disk.
        table.push(BitsCluster::Zeros);
    }
    let table: Vec<u64> = table.into_iter().map(BitsCluster::word).collect();
    entry.table_entries = table.len() as u32;
    entry.table_offset = transaction.put(words::bytes_of(&table)).await?;
    Ok(())
}

/// Changes the size of the disk, and with it the tables of all consistent bitmaps: a table has
/// exactly as many entries as the disk needs. If the disk grows, enabled bitmaps mark the new part
/// as changed: the part may have had other content before a shrink. If the disk shrinks, no cluster
/// past its new end may be in use.
pub(super) async fn resize_with_bitmaps<S: Storage>(image: &Qcow2<S>, size: u64) -> Result<()> {
    let Qcow2 { metadata, bitmaps: live, .. } = image;
    let storage = metadata.storage();
    let voucher = live.voucher();
    let change = async |entries: &mut Vec<BitmapEntry>,
                        transaction: &mut MetadataTransaction<'_, S>| {
        let old_size = transaction.size();
        transaction.set_data_size(size, size.max(old_size), voucher);
        for entry in entries.iter_mut() {
            resize_table(entry, (old_size, size), storage, transaction).await?;
        }
        let mut l1 = transaction.l1().to_vec();
        let needed = transaction.geometry().l1_entries_for(size).max(1) as usize;
        if size < old_size {
            l1.truncate(needed);
        } else if l1.len() < needed {
            l1.resize(needed, 0);
        }
        transaction.set_l1(l1, size);
        Ok(())
    };
    live.disable_lost(metadata).await?;
    run(image, change).await
}

async fn resize_table<S: Storage>(
    entry: &mut BitmapEntry,
    (old_size, size): (u64, u64),
    storage: &S,
    transaction: &mut MetadataTransaction<'_, S>,
) -> Result<()> {
    let geometry = transaction.geometry();
    if entry.is_inconsistent(transaction.header()) {
        // The bits of an inconsistent bitmap are meaningless, and its table may have any length.
        return Ok(());
    }
    check_bounds(storage.name(), entry, entry.clusters_for(size, geometry), geometry)?;
    let reader = BitsReader::open(storage, geometry, entry, old_size).await?;
    // The last bit of the old size may cover new bytes as well.
    let (old_bits, bits) = (old_size >> entry.granularity_bits, entry.bits_for(size));
    let in_cluster = reader.cluster_bits();
    let is_recorded = entry.flags.contains(BitmapFlags::AUTO);
    // The cluster of bits in which the bits of the smaller size end.
    let border = old_bits.min(bits) / in_cluster;
    let mut table = reader.table().to_vec();
    for gone in table.iter().skip(entry.clusters_for(size, geometry) as usize) {
        if let BitsCluster::Stored(offset) = gone {
            transaction.release(*offset, geometry.cluster_size())?;
        }
    }
    let added = if is_recorded { BitsCluster::Ones } else { BitsCluster::Zeros };
    table.resize(entry.clusters_for(size, geometry) as usize, added);
    if let Some(old) = table.get(border as usize).copied().filter(|_| border < reader.clusters()) {
        let mut bytes = match reader.read(border).await? {
            Bits::Zeros => vec![0; in_cluster as usize / 8],
            Bits::Ones => vec![0xff; in_cluster as usize / 8],
            Bits::Some(bytes) => bytes,
        };
        let first = border * in_cluster;
        let end = |bits: u64| bits.saturating_sub(first).min(in_cluster);
        clear_bits(&mut bytes, end(entry.bits_for(old_size.min(size)))..in_cluster);
        if is_recorded {
            set_bits(&mut bytes, end(old_bits)..end(bits));
        }
        if let BitsCluster::Stored(offset) = old {
            transaction.release(offset, geometry.cluster_size())?;
        }
        table[border as usize] = if bytes.iter().all(|&byte| byte == 0) {
            BitsCluster::Zeros
        } else {
            BitsCluster::Stored(transaction.put(bytes).await?)
        };
    }
    transaction.release(entry.table_offset, entry.table_length())?;
    place_table(entry, table, transaction).await
}

/// Marks the whole disk as changed in the enabled bitmaps.
pub(super) async fn mark_all<S: Storage>(
    entries: &mut [BitmapEntry],
    storage: &S,
    transaction: &mut MetadataTransaction<'_, S>,
) -> Result<()> {
    for entry in entries {
        if entry.flags.contains(BitmapFlags::AUTO) && !entry.is_inconsistent(transaction.header()) {
            release_bitmap(entry, storage, transaction).await?;
            let clusters = entry.clusters_for(transaction.size(), transaction.geometry());
            place_table(entry, vec![BitsCluster::Ones; clusters as usize], transaction).await?;
        }
    }
    Ok(())
}

/// Finds the first changed bytes at an offset or after it.
pub type NextChange<'a> = &'a (dyn Fn(u64) -> Option<ByteRange> + Sync);

/// Merges the bits of two bitmaps, with the granularity of the first bitmap. One cluster of merged
/// bits is in memory at a time, because the bits of the other bitmap are passed in order.
pub(super) struct Merge<'a, S: Storage> {
    old: &'a BitsReader<'a, S>,
    /// Further changes to merge.
    more: Option<NextChange<'a>>,
    table: Vec<BitsCluster>,
    /// The cluster in memory.
    at: u64,
    bytes: Vec<u8>,
}

impl<'a, S: Storage> Merge<'a, S> {
    /// Stores the merged bits, and returns their table.
    pub(super) async fn run(
        old: &'a BitsReader<'a, S>,
        other: &BitsReader<'_, S>,
        more: Option<NextChange<'a>>,
        transaction: &mut MetadataTransaction<'_, S>,
    ) -> Result<Vec<BitsCluster>> {
        let mut merge = Self { old, more, table: Vec::new(), at: 0, bytes: Vec::new() };
        merge.load(0).await?;
        for cluster in 0..other.clusters() {
            let bits = match other.read(cluster).await? {
                Bits::Zeros => continue,
                Bits::Ones => vec![0xff; other.cluster_bits() as usize / 8],
                Bits::Some(bits) => bits,
            };
            let first = cluster * other.cluster_bits();
            for run in BitRuns::new(&bits, other.bits_in(cluster)) {
                let [from, to] =
                    [run.start, run.end].map(|bit| (first + bit) << other.granularity_bits());
                let from = from >> old.granularity_bits();
                let to = to.div_ceil(1 << old.granularity_bits()).min(old.bits());
                merge.set(from, to, transaction).await?;
            }
        }
        merge.advance_to(old.clusters(), transaction).await?;
        Ok(merge.table)
    }

    /// Sets bits. `from` must not be before the `from` of the last call.
    async fn set(
        &mut self,
        mut from: u64,
        to: u64,
        transaction: &mut MetadataTransaction<'_, S>,
    ) -> Result<()> {
        let in_cluster = self.old.cluster_bits();
        while from < to {
            self.advance_to(from / in_cluster, transaction).await?;
            let first = self.at * in_cluster;
            let end = to.min(first + in_cluster);
            set_bits(&mut self.bytes, from - first..end - first);
            from = end;
        }
        Ok(())
    }

    /// Stores the clusters before `cluster`, and loads `cluster` into memory.
    async fn advance_to(
        &mut self,
        cluster: u64,
        transaction: &mut MetadataTransaction<'_, S>,
    ) -> Result<()> {
        while self.at < cluster {
            let bytes = std::mem::take(&mut self.bytes);
            let stored = if bytes.iter().all(|&byte| byte == 0) {
                BitsCluster::Zeros
            } else {
                BitsCluster::Stored(transaction.put(bytes).await?)
            };
            self.table.push(stored);
            self.load(self.at + 1).await?;
        }
        Ok(())
    }

    async fn load(&mut self, cluster: u64) -> Result<()> {
        self.at = cluster;
        let length = self.old.cluster_bits() as usize / 8;
        self.bytes = if cluster < self.old.clusters() {
            match self.old.read(cluster).await? {
                Bits::Zeros => vec![0; length],
                Bits::Ones => vec![0xff; length],
                Bits::Some(bytes) => bytes,
            }
        } else {
            Vec::new()
        };
        self.set_more();
        Ok(())
    }

    /// Sets the bits of the further changes in the cluster that is in memory.
    fn set_more(&mut self) {
        let Some(more) = self.more.filter(|_| !self.bytes.is_empty()) else { return };
        let (shift, in_cluster) = (self.old.granularity_bits(), self.old.cluster_bits());
        let first = self.at * in_cluster;
        let end = self.old.bits().min(first + in_cluster);
        let mut from = first << shift;
        while let Some(changed) = more(from).filter(|changed| changed.offset() >> shift < end) {
            let last = changed.end().div_ceil(1 << shift).min(end);
            let start = (changed.offset() >> shift).max(first);
            set_bits(&mut self.bytes, start - first..last - first);
            from = changed.end();
        }
    }
}
