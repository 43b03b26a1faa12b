//! Changes the size of a disk.
//!
//! To grow, the L1 entries are added first and the size is changed last. In between, the caller can
//! zero the bytes that would become visible. All steps that may fail with ENOSPC come before the
//! data file is extended. During the change, the header of a side file has a second size that its
//! data file may have. After a crash during the change, the data file is truncated to the disk's
//! size. To shrink, the clusters beyond the new end are removed first. After a crash before the
//! size changes, the disk has the old size, and old data does not reappear when the disk grows
//! again. The size and the number of L1 entries change with one write of the header. If the image
//! has bitmaps, this write is the write of a transaction that also changes the bitmaps' tables.

use std::ops::Range;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage, SyncMode, WorkBudget};

use crate::qcow2::Qcow2;
use crate::qcow2::layout::data_file_mark::DataFileMark;
use crate::qcow2::layout::limits::MAX_L1_BYTES;
use crate::qcow2::layout::options::DataFile;
use crate::qcow2::layout::table_io;
use crate::qcow2::writeback::Metadata;

use super::bitmaps::resize_with_bitmaps;
use super::data_file::{lengthen_data_file, note_in_side_file};

/// Maximum number of clusters that are removed before a writeback frees them, so that the list of
/// pending frees stays short.
const MAX_CLUSTERS_PER_WRITEBACK: u64 = 1 << 19;

/// Changes of the size of an image's disk.
pub struct Qcow2SizeChange<'a, S: Storage> {
    image: &'a Qcow2<S>,
}

impl<S: Storage> Qcow2<S> {
    /// Changes of the disk's size.
    pub fn size_change(&self) -> Qcow2SizeChange<'_, S> {
        Qcow2SizeChange { image: self }
    }

    /// As [`Format::make_empty`](crate::Format::make_empty).
    pub async fn make_empty(&self) -> Result<()> {
        let metadata = &self.metadata;
        metadata.check_writable()?;
        metadata.check_intact()?;
        metadata.autoclear().begin_changes().await?;
        let tables = metadata.geometry().l1_entries_for(metadata.size()) as usize;
        drop_l2_tables(metadata, 0..tables).await?;
        if let Some(data) = metadata.writer().data_file() {
            // No entry refers to the range. The discard is only a hint, so its errors are ignored.
            let end = metadata.size().next_multiple_of(metadata.geometry().cluster_size());
            if let Some(range) = table_io::whole_blocks(data, ByteRange::between(0, end)) {
                let _ = data.discard(range).await;
            }
        }
        Ok(())
    }
}

impl<S: Storage> Qcow2SizeChange<'_, S> {
    /// Checks that the disk may have this size, as far as this is known without a change.
    ///
    /// # Errors
    /// An error if the image must not be changed; `InvalidInput` for a size that the format does
    /// not allow.
    pub fn check(&self, size: u64) -> Result<()> {
        check_size(&self.image.metadata, size)?;
        let data = self.image.metadata.writer().data_file();
        data.filter(|data| data.size() < size).map_or(Ok(()), |data| data.check_size(size))
    }

    /// Adds the entries for a disk of `size` bytes without changing the disk's size. Entries up to
    /// `from` exist already. VM state that lies after the disk is removed before the first entry is
    /// added.
    pub async fn prepare(&self, from: u64, size: u64) -> Result<()> {
        let metadata = &self.image.metadata;
        check_size(metadata, size)?;
        metadata.autoclear().begin_changes().await?;
        if from <= metadata.size() {
            // Nothing is prepared yet.
            drop_vm_state(metadata).await?;
        }
        let prepared = make_entries(metadata, from, size).await;
        metadata.marking(prepared).await
    }

    /// Makes the disk longer. Bytes past the old end in the last cluster or in the backing file
    /// become visible, unless the caller has zeroed them before.
    pub async fn grow(&self, size: u64) -> Result<()> {
        let Qcow2 { metadata, bitmaps: live, .. } = self.image;
        check_size(metadata, size)?;
        if size < metadata.size() {
            let what = format!("cannot make a disk of {} bytes shorter: {size}", metadata.size());
            return Err(invalid(metadata, what));
        }
        metadata.autoclear().begin_changes().await?;
        if live.has_any() {
            resize_with_bitmaps(self.image, size).await?;
            return live.note_resize(metadata).await;
        }
        let grown = metadata.step(|state| state.thawed_mapper()?.grow_l1(size)).await;
        metadata.marking(grown).await?;
        lengthen_data_file(metadata, size, |header| DataFileMark::set_other_size(header, size))
            .await?;
        metadata.lock().tables.set_size(size);
        metadata.publish_size(size);
        live.note_resize(metadata).await
    }

    /// Makes the disk shorter, and cuts off its data file.
    ///
    /// # Errors
    /// `Unsupported`, without a change, if the data file is longer than `size` and has a fixed
    /// size. If a data file cannot be cut for another reason, the disk is shorter nevertheless.
    pub async fn shrink(&self, size: u64) -> Result<()> {
        let Qcow2 { metadata, bitmaps: live, .. } = self.image;
        check_size(metadata, size)?;
        if size > metadata.size() {
            let what = format!("cannot shrink a disk of {} bytes to {size}", metadata.size());
            return Err(invalid(metadata, what));
        }
        let data = metadata.writer().data_file();
        let longer_data = data.filter(|data| data.size() > size);
        longer_data.map_or(Ok(()), |data| data.check_size(size))?;
        metadata.autoclear().begin_changes().await?;
        let emptied = empty_last_table(metadata, size).await;
        metadata.marking(emptied).await?;
        let kept = metadata.geometry().l1_entries_for(size) as usize;
        let tables = metadata.lock().tables.l1().len();
        drop_l2_tables(metadata, kept..tables).await?;
        if live.has_any() {
            resize_with_bitmaps(self.image, size).await?;
        } else {
            let old = metadata.size();
            note_in_side_file(metadata, |header| DataFileMark::set_other_size(header, old)).await?;
            metadata.step(|state| state.thawed_mapper()?.cut(size)).await?;
        }
        metadata.publish_size(size);
        if data.is_some() {
            // The data file must not be cut off before the disk is durably shorter.
            metadata.flush(SyncMode::Data).await?;
        }
        if let Some(data) = longer_data {
            data.resize(size).await?;
        }
        live.note_resize(metadata).await
    }
}

/// Adds the entries; in a raw disk every cluster needs an entry.
async fn make_entries<S: Storage>(metadata: &Metadata<S>, from: u64, size: u64) -> Result<()> {
    metadata.step(|state| state.thawed_mapper()?.grow_l1(size)).await?;
    let is_raw = |file: &DataFile| file.is_raw_disk();
    if !metadata.lock().tables.header().data_file.as_ref().is_some_and(is_raw) {
        return Ok(());
    }
    let geometry = metadata.geometry();
    let (mut cluster, end) = (geometry.clusters_for(from), geometry.clusters_for(size));
    let budget = WorkBudget::new();
    while cluster < end {
        let first = cluster;
        cluster = metadata.step(|state| state.thawed_mapper()?.map_raw_slice(first, end)).await?;
        // Lets other tasks of the loop run, because a step that finds its slice in memory never
        // waits.
        budget.spend((cluster - first) * WorkBudget::LOOK_UP).await;
    }
    Ok(())
}

/// Removes clusters of the active tables after the disk's end, because a guest would read them
/// after the disk has grown.
async fn drop_vm_state<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    let of_disk = metadata.geometry().l1_entries_for(metadata.size()) as usize;
    let (has_any, entries) = {
        let state = metadata.lock();
        let l1 = state.tables.l1();
        (l1.iter().skip(of_disk).any(|&word| word != 0), l1.len())
    };
    if has_any { drop_l2_tables(metadata, of_disk..entries).await } else { Ok(()) }
}

/// Durably removes these L2 tables from the L1 table, and frees the clusters that they refer to.
async fn drop_l2_tables<S: Storage>(metadata: &Metadata<S>, indexes: Range<usize>) -> Result<()> {
    // Everything dirty is written first, because tables that are about to be freed must not be
    // written later.
    metadata.flush(SyncMode::Data).await?;
    let entries = metadata.geometry().l2_entries();
    let together = (MAX_CLUSTERS_PER_WRITEBACK / entries).max(1) as usize;
    for (count, index) in indexes.enumerate() {
        let dropped = metadata.step(|state| state.thawed_mapper()?.drop_l2_table(index)).await;
        metadata.marking(dropped).await?;
        if count % together == together - 1 {
            metadata.lock().allocator.frees.join_pending();
            metadata.flush(SyncMode::Data).await?;
        }
    }
    metadata.lock().allocator.frees.join_pending();
    metadata.flush(SyncMode::Data).await
}

/// Removes the clusters beyond `size` from the L2 table that is kept in part.
async fn empty_last_table<S: Storage>(metadata: &Metadata<S>, size: u64) -> Result<()> {
    let geometry = metadata.geometry();
    let first = geometry.clusters_for(size);
    let end = geometry.l1_entries_for(size) * geometry.l2_entries();
    let mut cluster = first;
    while cluster < end {
        cluster = metadata.step(|state| state.thawed_mapper()?.empty_slice(cluster)).await?;
    }
    Ok(())
}

/// Checks that the image may have a disk of this size.
///
/// # Errors
/// `ReadOnly`; the recorded error of an image that was found to be corrupt; `InvalidInput`.
fn check_size<S: Storage>(metadata: &Metadata<S>, size: u64) -> Result<()> {
    metadata.check_writable()?;
    metadata.check_intact()?;
    let geometry = metadata.geometry();
    let refused = if !size.is_multiple_of(512) {
        format!("a disk of {size} bytes is no multiple of 512")
    } else if geometry.l1_entries_for(size) * 8 > MAX_L1_BYTES {
        format!("a disk of {size} bytes is too large for its cluster size")
    } else if metadata.lock().tables.header().snapshots > 0 && geometry.version < 3 {
        "version 2 snapshots do not say how large the disk was".into()
    } else {
        return Ok(());
    };
    Err(invalid(metadata, refused))
}

fn invalid<S: Storage>(metadata: &Metadata<S>, what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what).on(metadata.storage().name())
}
