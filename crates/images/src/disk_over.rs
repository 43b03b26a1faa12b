//! Opens and locks the image over one file, and restores the state that an earlier process left.

use std::borrow::Cow;
use std::path::Path;
use std::time::Duration;

use blockhouse_core::Result;
use blockhouse_disk::{Access, EarlierWrites, Image, StoredImage};
use blockhouse_format::ImageFormat;
use blockhouse_storage::ImageStorage;

use crate::image_options::{ImageOptions, Locking};
use crate::lock::{Locked, lock};
use crate::partial_block::has_small_clusters;
use crate::probe_check::{check_not_probed, format_by_name, probe_supported};
use crate::restore::Restore;

/// Maximum time for a server to reply to a request while an image is opened.
const OPEN_TIME: Duration = Duration::from_secs(30);

/// The options with the probed format of an export, if they request probing. The image may then
/// name only allowed paths.
///
/// # Errors
/// Errors of the server.
pub(crate) async fn with_probed<'a>(
    storage: &ImageStorage,
    options: Cow<'a, ImageOptions>,
) -> Result<Cow<'a, ImageOptions>> {
    if !matches!(storage, ImageStorage::Nbd(_))
        || options.format.is_some()
        || !options.probes_exports
    {
        return Ok(options);
    }
    storage.set_answer_time(Some(OPEN_TIME));
    let Some(format) = probe_supported(storage).await? else { return Ok(options) };
    let options = options.into_owned();
    let allowed_paths = options.allowed_paths.and_nothing_else();
    Ok(Cow::Owned(ImageOptions { format: Some(format), allowed_paths, ..options }))
}

/// Opens the image over a file. The returned [`Restore`] completes the opening; the caller uses it
/// once the image has its data file and its backing file.
pub(crate) async fn disk_over(
    mut storage: ImageStorage,
    path: &Path,
    options: &ImageOptions,
    earlier: EarlierWrites,
    snapshot: Option<&str>,
) -> Result<(StoredImage, Restore)> {
    let restore = match storage.as_file() {
        Some(file) => {
            let locked = match options.locking {
                Locking::Held => lock(file, options.access)?,
                Locking::None | Locking::Inactive => Locked::No,
            };
            Restore::begin(file, path, options, locked)?
        }
        None => Restore::of_remote(),
    };
    storage.set_answer_time(Some(OPEN_TIME));
    let disk_options = options.of_disk();
    let format = options.format.unwrap_or_else(|| match &storage {
        // A disk of several files, or of a part of a file, has no suffix of its own.
        ImageStorage::Concat(_) => ImageFormat::Raw,
        _ => format_by_name(path),
    });
    // A format that the caller gives is not checked against the content.
    if options.format.is_none() {
        check_not_probed(&storage, path, format).await?;
    }
    if let ImageStorage::File(file) = &mut storage
        && format == ImageFormat::Qcow2
        && options.access == Access::ReadWrite
        && has_small_clusters(file, path, options).await?
    {
        restore.stamp_change();
        file.fill_last_block()?;
    }
    let disk = match snapshot {
        None => {
            Image::open_with_state(storage, format, disk_options, earlier, restore.found()).await?
        }
        Some(name) => Image::open_snapshot(storage, format, disk_options, name).await?,
    };
    Ok((disk, restore))
}
