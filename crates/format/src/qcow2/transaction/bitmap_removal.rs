//! Removes a bitmap when the host has no space for new tables.
//!
//! A transaction writes new tables beside the old tables. A full host has no space for the new
//! tables, but users remove bitmaps to get space. So the directory is changed in place, and each
//! step is durable before the next:
//!
//! 1. the bitmap's entry becomes the last entry of the directory, whose length stays;
//! 2. one write of the header's first sector makes the directory end before this entry;
//! 3. the clusters of the bitmap are freed.
//!
//! A crash leaves all old bitmaps or all new bitmaps, and at most leaks clusters. Step 1 must write
//! one sector only, so in a larger directory only the last bitmap can be removed.

use blockhouse_core::{Durability, Error, Result, Storage, SyncMode};

use crate::qcow2::Qcow2;
use crate::qcow2::layout::bitmap_directory::{
    self, BITMAPS_CONSISTENT, DirectoryLocation, index_of,
};
use crate::qcow2::layout::extensions::{self, Extension};
use crate::qcow2::layout::header::SECTOR;
use crate::qcow2::layout::table_io;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::writeback::Metadata;

/// Ends the bitmaps' session, and removes a bitmap, durably and without new space. The caller loads
/// the bitmaps again, also after an error. `no_space` is the error of the transaction tried before.
///
/// # Errors
/// `no_space` if the directory is too long; an earlier failure to write metadata; storage errors.
pub(super) async fn remove_in_place<S: Storage>(
    Qcow2 { metadata, transactions, bitmaps: live, .. }: &Qcow2<S>,
    name: &str,
    no_space: Error,
) -> Result<()> {
    metadata.check_writable()?;
    metadata.check_intact()?;
    // If the transaction failed at its last step, it is unknown which directory is on disk.
    metadata.writer().check_failure()?;
    live.end(metadata).await?;
    metadata.autoclear().begin_changes_beside_guest_data().await?;
    let _alone = transactions.begin().await;
    let (storage, geometry) = (metadata.storage(), metadata.geometry());
    let header = metadata.lock().tables.headers.disk().clone();
    let mut entries = bitmap_directory::read(storage, &header).await?;
    let index = index_of(storage.name(), name, &entries)?;
    let Ok(Some(old)) = DirectoryLocation::of(&header) else { return Err(no_space) };
    let removed = entries.remove(index);
    if index < entries.len() && old.length > SECTOR as u64 {
        return Err(no_space);
    }
    let mut freed = removed.clusters(storage, geometry).await?;
    let kept = bitmap_directory::to_bytes(&entries).len() as u64;
    freed.push(
        geometry.cluster_of(old.offset) + geometry.clusters_for(kept)
            ..geometry.cluster_of(old.offset) + geometry.clusters_for(old.length),
    );
    live.forget();
    let count = entries.len() as u32;
    if index < entries.len() {
        entries.push(removed);
        write_directory(metadata, old.offset, &bitmap_directory::to_bytes(&entries)).await?;
    }
    let new = (count > 0).then_some(DirectoryLocation { count, length: kept, ..old });
    switch(metadata, new).await?;
    let state = &mut *metadata.lock();
    freed.into_iter().filter(|run| !run.is_empty()).for_each(|run| {
        state.allocator.frees.defer_unlinked(run);
    });
    Ok(())
}

/// Durably overwrites a directory by a directory of the same length, at most a sector.
async fn write_directory<S: Storage>(
    metadata: &Metadata<S>,
    offset: u64,
    directory: &[u8],
) -> Result<()> {
    let storage = metadata.storage();
    let block = (storage.capabilities().alignment.offset as usize).max(SECTOR);
    let mut bytes = table_io::read(storage, offset, block).await?;
    bytes[..directory.len()].copy_from_slice(directory);
    metadata.writer().write(&[TableWrite { offset, bytes }], Durability::None).await?;
    metadata.sync(SyncMode::Data).await
}

/// Writes the directory's new location to the header, durably.
async fn switch<S: Storage>(metadata: &Metadata<S>, new: Option<DirectoryLocation>) -> Result<()> {
    let switched = metadata.rewrite_header(|header| {
        let is_directory = |extension: &Extension| extension.kind == extensions::BITMAPS;
        match (new, header.extensions.iter_mut().find(|extension| is_directory(extension))) {
            (Some(location), Some(extension)) => extension.data = location.to_bytes(),
            _ => {
                header.extensions.retain(|extension| !is_directory(extension));
                header.autoclear &= !BITMAPS_CONSISTENT;
            }
        }
    });
    let switched = switched.await;
    if let Err(error) = &switched {
        // It is unknown which header is on disk, and which clusters are free.
        metadata.writer().fail(error);
    }
    switched
}
