//! The mark of a side file, by which a later opening detects that another program has changed the
//! raw disk.
//!
//! Guarantee: outside of a session, the mark has the time of a stable change of the data file, and
//! the enabled bitmaps have all changes up to that change. If that time is unknown, the mark keeps
//! an older time, and the side file is refused.

use std::time::Duration;

use blockhouse_core::{Result, Storage, SyncMode};

use crate::qcow2::layout::data_file_mark::DataFileMark;
use crate::qcow2::writeback::Metadata;

/// Makes the content of a side file's data file and its time of the last change stable, and returns
/// the time; `None` for other images. No change may be in flight.
pub(super) async fn stable_change<S: Storage>(metadata: &Metadata<S>) -> Result<Option<Duration>> {
    let mark = DataFileMark::of(metadata.lock().tables.headers.disk());
    let (Some(_), Some(data)) = (mark, metadata.writer().data_file()) else { return Ok(None) };
    // A flush of the data alone would not make the time of change stable.
    metadata.sync(SyncMode::Full).await?;
    data.last_change().await
}

/// Updates the mark to the current time of change. Called outside of a session, for an image that
/// is open for writing, if no bitmap is enabled, or if this process has just changed the data file
/// in a way that no bitmap records.
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
