//! The length of a data file, which is never shorter than the disk.

use blockhouse_core::{Result, Storage, SyncMode};

use crate::qcow2::layout::data_file_mark::DataFileMark;
use crate::qcow2::layout::header::Header;
use crate::qcow2::writeback::Metadata;

/// Durably extends the data file to a disk of `size` bytes, unless the file is longer already. So
/// the data file is never shorter than the disk, even after a crash. Before the data file is
/// extended, `note` changes the header of a side file.
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

/// Durably changes the header of a side file, which is an image with a mark of its data file. The
/// headers of other images remain as they are.
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
