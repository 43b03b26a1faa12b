//! Opens the image of a disk in use again, in another mode: an active disk becomes
//! [inactive](blockhouse_disk::is_inactive), and the other way round.
//!
//! Guarantees: changes are held off meanwhile. When an image is opened again, all changes through
//! the old opening are durable and its in-use marks are cleared, so the new opening reads current
//! metadata from the storage. The old opening releases its locks. On failure the disk continues
//! with the old opening.

use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result, SyncMode};
use blockhouse_disk::{Access, ImageDisk, flush_ahead, is_inactive};

use crate::open_location::check_same_file;
use crate::start_recording::MAX_REPLACED;

/// Replaces the opening of a disk's image by a new opening, that of the separate disk that `open`
/// returns. Needs the event loop of the current thread.
///
/// # Errors
/// Errors of `open` and of the flush; `InvalidInput` if the image is another file or has another
/// size now; `Unsupported` if an active disk was opened again too often.
pub async fn reopen<E: From<Error>>(
    disk: &ImageDisk,
    open: impl Future<Output = Result<ImageDisk, E>>,
) -> Result<(), E> {
    if disk.jobs().count_replaced() >= MAX_REPLACED && !is_inactive(disk) {
        let what = "has had too many images while it is open";
        let error = Error::new(ErrorKind::Unsupported, what).on(disk.name());
        return Err(error.hint("close it and open it again").into());
    }
    flush_ahead(&[disk], SyncMode::Full).await?;
    let quiesced = disk.quiesced().await?;
    disk.image().layer().flush(SyncMode::Full).await?;
    disk.image().settle().await?;
    let opened = open.await?;
    let files = disk.image().file().zip(opened.image().file());
    let checked = files
        .map_or(Ok(()), |(before, now)| check_same_file(before, now, opened.image().image_name()));
    let reopened = checked.and_then(|()| quiesced.reopen_in(Arc::clone(opened.image())));
    let replaced = match reopened {
        Ok(replaced) => replaced,
        Err(error) => {
            if let Err(error) = opened.close().await {
                tracing::warn!("{error}");
            }
            return Err(error.into());
        }
    };
    if opened.image().access() == Access::ReadWrite {
        // Another program may have changed the image, and bitmaps in memory lack that change.
        disk.bitmaps().mark_transient();
    }
    if let Err(error) = replaced.close().await {
        // All changes were flushed before.
        tracing::warn!("{error}");
    }
    disk.jobs().unlock_former();
    Ok(())
}
