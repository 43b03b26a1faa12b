//! Reads active tables while guests change them, and writes copies.
//!
//! The bytes read of a part are consistent if the part did not change during the read. Otherwise
//! the part is noted as changed (`tables/change_watch`).

use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage};

use crate::qcow2::layout::table_io;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::tables::SliceKind;
use crate::qcow2::writeback::Metadata;

/// The number of tables that are read, or written, together.
pub(super) const MAX_IN_FLIGHT: usize = 16;
/// The number of slices that are read, or written, together.
pub(super) const MAX_SLICES_IN_FLIGHT: usize = 64;

/// A whole table of one cluster, or one slice of such a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) kind: SliceKind,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// The treatment of the notes of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notes {
    /// The notes of the slices are removed, because the bytes read are copied.
    Take,
    /// The notes stay.
    Leave,
}

/// The present bytes of a part, to be copied. Removes the notes of the part.
pub(super) async fn look_at<S: Storage>(metadata: &Metadata<S>, part: Part) -> Result<Vec<u8>> {
    look(metadata, part, Notes::Take).await
}

/// The present bytes of a part.
pub(super) async fn look<S: Storage>(
    metadata: &Metadata<S>,
    part: Part,
    notes: Notes,
) -> Result<Vec<u8>> {
    let geometry = metadata.geometry();
    let step = geometry.slice_size() as usize;
    let table = part.offset & !(geometry.cluster_size() - 1);
    let (in_memory, is_new) = {
        let mut state = metadata.lock();
        let offsets = (part.offset..part.offset + part.length).step_by(step);
        let look = |offset| {
            let bytes = match notes {
                Notes::Take => state.tables.look_at(offset, part.kind),
                Notes::Leave => state.tables.cache.peek(offset),
            };
            bytes.map(<[u8]>::to_vec)
        };
        let in_memory: Vec<Option<Vec<u8>>> = offsets.map(look).collect();
        (in_memory, state.tables.is_new_table(table))
    };
    let mut bytes = if is_new || in_memory.iter().all(Option::is_some) {
        vec![0; part.length as usize]
    } else {
        read(metadata, part).await?
    };
    for (place, slice) in bytes.chunks_exact_mut(step).zip(in_memory) {
        if let Some(slice) = slice {
            place.copy_from_slice(&slice);
        }
    }
    Ok(bytes)
}

/// The bytes of a part on disk, consistent if the part does not change during the read.
pub(super) async fn read<S: Storage>(metadata: &Metadata<S>, part: Part) -> Result<Vec<u8>> {
    let storage = metadata.storage();
    if part.offset >= storage.size() {
        let what = "a table lies beyond the end of the file";
        return Err(Error::new(ErrorKind::Corrupt, what)
            .on(storage.name())
            .at(part.offset)
            .hint("check the image before using it"));
    }
    table_io::read(storage, part.offset, part.length as usize).await
}

/// Writes to clusters that no active table refers to.
pub(super) async fn write<S: Storage>(metadata: &Metadata<S>, writes: &[TableWrite]) -> Result<()> {
    metadata.writer().write(writes, Durability::None).await?;
    let geometry = metadata.geometry();
    let end = |write: &TableWrite| geometry.clusters_for(write.offset + write.bytes.len() as u64);
    if let Some(end) = writes.iter().map(end).max() {
        metadata.lock().allocator.note_written(end);
    }
    Ok(())
}
