//! The length of a data file, which is never shorter than the disk.

use blockhouse_core::{Result, Storage, SyncMode};

use crate::qcow2::layout::data_file_mark::DataFileMark;
use crate::qcow2::layout::header::Header;
use crate::qcow2::writeback::Metadata;

/// Makes the data file as long as a disk of `size` bytes, durably, or leaves it longer: it is never
/// shorter than the disk, even after a crash. Before that `note` changes the header of a side file.
pub(super) async fn lengthen_data_file<S: Storage>(
    metadata: &Metadata<S>,
    size: u64,
    note: impl FnOnce(&mut Header),
) -> Result<()> {
    let data = metadata.writer().data_file().filter(|data| data.size() < size);
    let Some(data) = data else { return Ok(()) };
    note_in_side_file(metadata, note).await?;
    data.resize(size).await?;
    metadata.sync(SyncMode::Full).await
}

/// Changes the header of a side file, durably: that of an image with a mark of its data file.
/// Others stay as they are.
pub(super) async fn note_in_side_file<S: Storage>(
    metadata: &Metadata<S>,
    note: impl FnOnce(&mut Header),
) -> Result<()> {
    let mark = DataFileMark::of(metadata.lock().tables.headers.disk());
    if mark.is_some() {
        metadata.write_header(note).await?;
    }
    Ok(())
}
