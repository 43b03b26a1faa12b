//! Completes the layer of a fork whose server has died, when an image over the layer is opened for
//! writing.
//!
//! Guarantee: the layer has, durably, all changes that the server acknowledged before the fork.
//! Reason: the server may have died before it settled the layer. Only this way of opening completes
//! the layer, because the record beside it forbids opening the layer itself for writing.

use std::path::Path;

use blockhouse_core::{Result, Storage, SyncMode};
use blockhouse_disk::{Access, EarlierWrites};
use blockhouse_engine::HostFile;
use blockhouse_storage::ImageStorage;

use crate::disk_over::disk_over;
use crate::image_options::{ImageOptions, StateUse};
use crate::lock::is_being_written;
use crate::moved_record::{end_rollback, forked_to};
use crate::restore::find_state;

/// Replays to a layer the state that its server left, and makes the layer durable. Other backing
/// files stay unchanged. The layer is open for reading with these options, and not locked yet.
///
/// # Errors
/// The host's error; if a program reads a layer that must be replayed, the error of opening it for
/// writing. If a program writes to the layer, nothing is done, and the caller's lock fails.
pub(crate) async fn restore_layer(
    layer: &ImageStorage,
    path: &Path,
    options: &ImageOptions,
) -> Result<()> {
    let Some(file) = layer.as_file() else { return Ok(()) };
    if forked_to(path)?.is_none() || is_being_written(file) {
        return Ok(());
    }
    end_rollback(path)?;
    let dir = options.state.directory();
    // A state without changes is replayed, too, because it may record a failed flush.
    if find_state(file, dir)?.is_some() {
        let state = StateUse::Replay(dir.cloned());
        let options = ImageOptions { access: Access::ReadWrite, state, ..options.clone() };
        let (mode, cache) = (options.open_mode(), options.cache.page_cache());
        let file = HostFile::open_found(file.descriptor(), path, mode, cache)?;
        let opened = disk_over(file.into(), path, &options, EarlierWrites::Unknown, None).await;
        let (disk, restore) = opened?;
        restore.finish(disk).await?.close().await?;
    }
    // The layer's last writes may be only in the page cache, and flushes of its overlays do not
    // flush it.
    file.flush(SyncMode::Data).await
}
