//! The mark of a side file, which shows later whether another program has changed the raw disk
//! since.
//!
//! Guarantee: outside of a session the mark has the time of a stable change of the data file, and
//! the enabled bitmaps have all changes up to that one. If that time is unknown, the mark keeps an
//! older one, and the side file is refused.

use std::time::Duration;

use blockhouse_core::{Result, Storage, SyncMode};

use crate::qcow2::layout::data_file_mark::DataFileMark;
use crate::qcow2::writeback::Metadata;

/// When the data file of a side file was changed for the last time: what it holds now is stable,
/// and its time of change, too. `None` of other images. No change may be in flight.
pub(super) async fn stable_change<S: Storage>(metadata: &Metadata<S>) -> Result<Option<Duration>> {
    let mark = DataFileMark::of(metadata.lock().tables.headers.disk());
    let (Some(_), Some(data)) = (mark, metadata.writer().data_file()) else { return Ok(None) };
    // A flush of the data alone leaves the time behind.
    metadata.sync(SyncMode::Full).await?;
    data.last_change().await
}

/// Outside of a session, of an image that is open for writing, where no bitmap is enabled, or this
/// process has changed the data file just now in a way that no bitmap records.
pub(super) async fn renew_mark<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    let mark = DataFileMark::of(metadata.lock().tables.headers.disk());
    let (Some(mark), Some(data)) = (mark, metadata.writer().data_file()) else { return Ok(()) };
    if data.last_change().await? == Some(mark.changed) {
        return Ok(());
    }
    metadata.check_writable()?;
    let Some(changed) = stable_change(metadata).await? else { return Ok(()) };
    metadata.rewrite_header(|header| DataFileMark::set_changed(header, changed)).await
}
