//! The length of a data file, which is never shorter than the disk.

use blockhouse_core::{Result, Storage, SyncMode};

use crate::qcow2::layout::data_file_mark::DataFileMark;
use crate::qcow2::layout::header::Header;

use super::ImageMetadata;

/// Makes the data file as long as a disk of `size` bytes, durably, or leaves it longer: it is never
/// shorter than the disk, whatever a crash leaves. Before that `note` changes the header of a
/// sidecar.
pub(super) async fn lengthen_data_file<S: Storage>(
    metadata: &ImageMetadata<S>,
    size: u64,
    note: impl FnOnce(&mut Header),
) -> Result<()> {
    let data = metadata.writer().data_file().filter(|data| data.size() < size);
    let Some(data) = data else { return Ok(()) };
    if is_sidecar(metadata) {
        metadata.write_header(note).await?;
    }
    data.resize(size).await?;
    metadata.sync(SyncMode::Full).await
}

/// Whether the image has the bitmaps of its data file, and nothing else.
pub(super) fn is_sidecar<S: Storage>(metadata: &ImageMetadata<S>) -> bool {
    DataFileMark::of(metadata.lock().tables.headers().disk()).is_some()
}
