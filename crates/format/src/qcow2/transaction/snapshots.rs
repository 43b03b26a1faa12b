//! Snapshots of the disk, with or without the machine's state: taken, applied, deleted, renamed.
//!
//! Taking a snapshot reads and writes only the image's tables, never its data: the refcounts of all
//! clusters are incremented, and a cluster is copied at its next write. Each of these changes is
//! atomic, even in a crash (see the folder's `mod.rs`). The snapshot's tables map the machine's
//! state after the disk, at the size of the disk rounded up to the range of an L1 entry. As in
//! QEMU, a snapshot without its own VM state gets the active tables' data after the disk, and
//! reverting to the snapshot restores this data.

use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::qcow2::Qcow2;
use crate::qcow2::layout::bitmap_directory::BitmapEntry;
use crate::qcow2::layout::limits::MAX_SNAPSHOT_NAME;
use crate::qcow2::layout::snapshot_table::{self, EntryFacts, Snapshot, SnapshotEntry};
use crate::qcow2::layout::{names, table_io, words};
use crate::qcow2::writeback::Metadata;

use super::VmStateTables;
use super::bitmaps::{change_directory, mark_all, prepare_directory};
use super::metadata_transaction::{
    L1Users, MetadataTransaction, RefcountDelta, check_no_data_file,
};

/// The description of a new snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSnapshot {
    /// The name: 1 to 255 bytes, different from all other names in the image.
    pub name: String,
    /// Time at which the snapshot is taken, since 1970-01-01 UTC.
    pub created: Duration,
    /// Time that the virtual machine has run.
    pub vm_clock: Duration,
}

/// The snapshots of an image. A change is atomic, and durable when its method returns. The caller
/// ensures that no change of the guest's data is in flight.
pub struct InternalSnapshots<'a, S: Storage> {
    pub(super) image: &'a Qcow2<S>,
}

impl<S: Storage> Qcow2<S> {
    /// The image's snapshots.
    pub fn snapshots(&self) -> InternalSnapshots<'_, S> {
        InternalSnapshots { image: self }
    }
}

impl<S: Storage> InternalSnapshots<'_, S> {
    /// The image's name, for errors.
    pub(crate) fn image_name(&self) -> &str {
        self.image.storage().name()
    }

    /// Refuses an image with a data file: snapshots share clusters, and each guest cluster has one
    /// fixed host offset in a data file.
    ///
    /// # Errors
    /// `Unsupported` for an image with a data file.
    pub fn check_possible(&self) -> Result<()> {
        check_no_data_file(&self.image.metadata)
    }

    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// `Corrupt` if the table is invalid; the earlier error if a change of the table failed at its
    /// last step, because it is unknown which table is active.
    pub async fn list(&self) -> Result<Vec<Snapshot>> {
        let metadata = &self.image.metadata;
        // A concurrent change of the snapshots must not give a cluster of the old table to the
        // guest.
        let _read = metadata.begin_read();
        let header = {
            let state = metadata.lock();
            state.tables.freeze.check_known()?;
            state.tables.headers.disk().clone()
        };
        let table = snapshot_table::read(metadata.storage(), &header).await?;
        Ok(table.entries.iter().map(|entry| entry.described(header.size)).collect())
    }

    /// Takes a snapshot of the guest's disk, with a machine's state if `vm_state` is given.
    ///
    /// # Errors
    /// `InvalidInput` for a name that exists, is empty or too long; `Unsupported` if a refcount
    /// would exceed its maximum, or for an image with a data file; `NoSpace`; storage errors. On an
    /// error nothing has changed, unless the write of the header failed; `vm_state` is as before.
    pub async fn create(
        &self,
        new: &NewSnapshot,
        vm_state: Option<&VmStateTables>,
    ) -> Result<Snapshot> {
        let Qcow2 { metadata, transactions, .. } = self.image;
        let name = metadata.storage().name();
        let change = async |transaction: &mut MetadataTransaction<'_, S>| {
            check_new_name(name, &new.name, transaction.snapshots())?;
            if vm_state.is_some() {
                drop_active_vm_state(transaction).await?;
            }
            let mut l1 = transaction.l1().to_vec();
            transaction.count_tree(&l1, RefcountDelta::Increment).await?;
            transaction.update_copied_flags(L1Users::ActiveAndSnapshot).await?;
            l1.clear();
            l1.extend(transaction.l1());
            if let Some(vm_state) = vm_state {
                vm_state.put(transaction, &mut l1).await?;
            }
            let l1_offset =
                if l1.is_empty() { 0 } else { transaction.put(words::bytes_of(&l1)).await? };
            let facts = EntryFacts {
                name: &new.name,
                created: new.created,
                vm_clock: new.vm_clock,
                vm_state_size: vm_state.map_or(0, VmStateTables::size),
                disk_size: transaction.size(),
            };
            let id = next_id(transaction.snapshots());
            let entry = SnapshotEntry::new(id, l1_offset, l1.len() as u32, &facts);
            let described = entry.described(transaction.size());
            transaction.snapshots_mut().push(entry);
            check_table(name, transaction.snapshots())?;
            Ok(described)
        };
        transactions.run(metadata, change).await
    }

    /// Reverts the disk and its size to the snapshot. Later writes are lost. Enabled bitmaps mark
    /// the whole disk as changed.
    ///
    /// # Errors
    /// As [`create`](Self::create); `InvalidInput` for an unknown name, or in an image with bitmaps
    /// for a snapshot of another size.
    pub async fn apply(&self, name: &str) -> Result<()> {
        let Qcow2 { metadata, transactions, bitmaps: live, .. } = self.image;
        let image = metadata.storage().name();
        let has_bitmaps = live.has_any();
        let change = async |transaction: &mut MetadataTransaction<'_, S>| {
            let index = index_of(image, name, transaction.snapshots())?;
            let entry = transaction.snapshots()[index].clone();
            let size = entry.disk_size().unwrap_or(transaction.size());
            if has_bitmaps {
                check_size(image, name, size, transaction.size())?;
                let mark =
                    async |entries: &mut Vec<BitmapEntry>,
                           transaction: &mut MetadataTransaction<'_, S>| {
                        mark_all(entries, metadata.storage(), transaction).await
                    };
                change_directory(metadata, transaction, live, mark).await?;
            }
            let entries = transaction.geometry().l1_entries_for(size);
            let mut l1 = transaction.l1_of(&entry).await?;
            if (l1.len() as u64) < entries {
                let what = format!("the snapshot '{name}' has {} L1 entries", l1.len());
                return Err(Error::new(ErrorKind::Corrupt, what).on(image));
            }
            // A VM state whose size is in the snapshot belongs only to the snapshot.
            if entry.vm_state_size() > 0 {
                l1.truncate(entries as usize);
            }
            transaction.count_tree(&l1, RefcountDelta::Increment).await?;
            let old = transaction.l1().to_vec();
            transaction.count_tree(&old, RefcountDelta::Decrement).await?;
            transaction.set_l1(l1, size);
            transaction.update_copied_flags(L1Users::Active).await
        };
        if !has_bitmaps {
            return transactions.run(metadata, change).await;
        }
        prepare_directory(metadata, live).await?;
        let outcome = transactions.run(metadata, change).await;
        // If `load` fails, the next change retries it.
        let _ = live.load(metadata).await;
        outcome
    }

    /// Deletes a snapshot.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub async fn delete(&self, name: &str) -> Result<()> {
        let Qcow2 { metadata, transactions, .. } = self.image;
        let image = metadata.storage().name();
        let change = async |transaction: &mut MetadataTransaction<'_, S>| {
            let index = index_of(image, name, transaction.snapshots())?;
            let entry = transaction.snapshots_mut().remove(index);
            let l1 = transaction.l1_of(&entry).await?;
            transaction.count_tree(&l1, RefcountDelta::Decrement).await?;
            if !l1.is_empty() {
                transaction.release(entry.l1_offset, l1.len() as u64 * 8)?;
            }
            transaction.update_copied_flags(L1Users::Active).await
        };
        transactions.run(metadata, change).await
    }

    /// Gives a snapshot another name.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub async fn rename(&self, name: &str, new_name: &str) -> Result<()> {
        let Qcow2 { metadata, transactions, .. } = self.image;
        let image = metadata.storage().name();
        let change = async |transaction: &mut MetadataTransaction<'_, S>| {
            let index = index_of(image, name, transaction.snapshots())?;
            check_new_name(image, new_name, transaction.snapshots())?;
            transaction.snapshots_mut()[index].name = new_name.as_bytes().to_vec();
            check_table(image, transaction.snapshots())
        };
        transactions.run(metadata, change).await
    }

    /// Frees clusters that finished or dropped changes no longer need. Without this call, the next
    /// flushes free them.
    pub async fn give_back(&self) {
        let metadata = &self.image.metadata;
        // A failure is recorded as usual; the rest is freed later.
        if metadata.reclaim().await.is_ok() {
            let _ = metadata.write_back_all().await;
        }
    }
}

/// Refuses a snapshot of another size than the disk, because the bitmaps have the disk's size.
fn check_size(image: &str, name: &str, of_snapshot: u64, of_disk: u64) -> Result<()> {
    if of_snapshot == of_disk {
        return Ok(());
    }
    let what = format!(
        "the snapshot '{name}' is of a disk of {of_snapshot} bytes, and the bitmaps are of one of {of_disk}"
    );
    Err(Error::new(ErrorKind::InvalidInput, what)
        .on(image)
        .hint("remove the bitmaps first, and add others afterwards"))
}

/// Makes a read-only image show the disk of a snapshot.
pub(crate) async fn show_snapshot<S: Storage>(
    metadata: &Metadata<S>,
    name: &str,
) -> Result<Snapshot> {
    let storage = metadata.storage();
    let header = metadata.lock().tables.headers.disk().clone();
    let table = snapshot_table::read(storage, &header).await?;
    let entry = &table.entries[index_of(storage.name(), name, &table.entries)?];
    let bytes = entry.l1_entries as usize * 8;
    if entry.l1_offset.saturating_add(bytes as u64) > storage.size() {
        let what = format!("the L1 table of the snapshot '{name}' lies past the end of the file");
        let error = Error::new(ErrorKind::Corrupt, what).on(storage.name());
        return Err(error.at(entry.l1_offset));
    }
    let l1 = table_io::read(storage, entry.l1_offset, bytes).await?;
    let size = entry.disk_size().unwrap_or(header.size);
    if header.geometry.l1_entries_for(size) * 8 > bytes as u64 {
        let what = format!("the snapshot '{name}' of {size} bytes has a short L1 table");
        return Err(Error::new(ErrorKind::Corrupt, what).on(storage.name()));
    }
    metadata.lock().tables.show_l1(words::words_of(&l1));
    metadata.publish_size(size);
    Ok(entry.described(header.size))
}

pub(super) fn index_of(image: &str, name: &str, entries: &[SnapshotEntry]) -> Result<usize> {
    let by_name = names::index_of(entries.iter().map(|entry| &entry.name[..]), name);
    let by_id = || names::index_of(entries.iter().map(|entry| &entry.id[..]), name);
    by_name.or_else(by_id).ok_or_else(|| {
        let error = Error::new(ErrorKind::InvalidInput, format!("has no snapshot '{name}'"));
        error.on(image).hint("'snapshot list' names those that it has")
    })
}

pub(super) fn check_new_name(image: &str, name: &str, entries: &[SnapshotEntry]) -> Result<()> {
    let refuse = |what: String, hint: &'static str| {
        Err(Error::new(ErrorKind::InvalidInput, what).on(image).hint(hint))
    };
    if name.is_empty() || name.len() > MAX_SNAPSHOT_NAME {
        let what =
            format!("a snapshot's name has 1 to {MAX_SNAPSHOT_NAME} bytes, not {}", name.len());
        return refuse(what, "choose another name");
    }
    if entries.iter().any(|entry| entry.name == name.as_bytes()) {
        let hint = "choose another name, or delete that snapshot first";
        return refuse(format!("has a snapshot '{name}' already"), hint);
    }
    Ok(())
}

pub(super) fn check_table(image: &str, entries: &[SnapshotEntry]) -> Result<()> {
    if snapshot_table::fits(entries) {
        return Ok(());
    }
    let what = format!("{} snapshots are more than the format allows", entries.len());
    Err(Error::new(ErrorKind::InvalidInput, what).on(image).hint("delete some of them first"))
}

/// Drops the clusters of the active tables past the disk's end: another program's VM state. Called
/// if the new snapshot has its own VM state.
async fn drop_active_vm_state<S: Storage>(
    transaction: &mut MetadataTransaction<'_, S>,
) -> Result<()> {
    let size = transaction.size();
    let entries = transaction.geometry().l1_entries_for(size) as usize;
    if transaction.l1().len() > entries {
        let mut l1 = transaction.l1().to_vec();
        let past_the_end = l1.split_off(entries);
        transaction.set_l1(l1, size);
        transaction.count_tree(&past_the_end, RefcountDelta::Decrement).await?;
    }
    Ok(())
}

/// The entry of a new snapshot of a disk of `disk_size` bytes, without a machine's state and
/// without the offset of its L1 table.
pub(super) fn draft_entry(
    new: &NewSnapshot,
    disk_size: u64,
    entries: &[SnapshotEntry],
    l1_entries: u32,
) -> SnapshotEntry {
    let NewSnapshot { name, created, vm_clock } = new;
    let (created, vm_clock) = (*created, *vm_clock);
    let facts = EntryFacts { name, created, vm_clock, vm_state_size: 0, disk_size };
    SnapshotEntry::new(next_id(entries), 0, l1_entries, &facts)
}

/// The id of a new snapshot: one more than the largest numeric id.
fn next_id(entries: &[SnapshotEntry]) -> Vec<u8> {
    let number = |entry: &SnapshotEntry| std::str::from_utf8(&entry.id).ok()?.parse::<u64>().ok();
    let largest = entries.iter().filter_map(number).max().unwrap_or(0);
    largest.saturating_add(1).to_string().into_bytes()
}
