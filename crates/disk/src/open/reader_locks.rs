//! The locks of a layer that a disk reads, while the layer is reopened for writing.

use blockhouse_core::Result;
use blockhouse_engine::HostFile;
use blockhouse_storage::ImageStorage;

use super::image_options::{ImageOptions, Locking};
use super::lock::{lock, lock_in_place_of};
use super::open_location::identity_of;
use crate::layer::Layer;
use crate::options::Access;

/// The files of a layer that is read.
fn readers(layer: &Layer<ImageStorage>) -> Vec<&HostFile> {
    let (image, data) = (layer.format().storage(), layer.data());
    let mut files = image.storage().files();
    if !std::ptr::eq(image, data) {
        files.extend(data.storage().files());
    }
    files
}

/// Gives the locks of a layer that is read to `file`, which is the same image or the file of its
/// bitmaps, or gives them back.
///
/// # Errors
/// As [`lock_in_place_of`]: the caller [locks](lock_readers) the others again.
pub(super) fn take_from_readers(
    layer: &Layer<ImageStorage>,
    file: &HostFile,
    options: &ImageOptions,
) -> Result<()> {
    layer.stands().keep();
    let wanted = identity_of(file)?;
    for reader in readers(layer).into_iter().filter(|_| options.locking == Locking::Held) {
        if identity_of(reader)? == wanted {
            lock_in_place_of(file, reader)?
        } else {
            // The other of the two files, raw image and side file, is locked next.
            reader.release_locks()
        }
    }
    Ok(())
}

/// Locks a layer for reading again.
///
/// # Errors
/// As [`lock`].
pub(super) fn lock_readers(layer: &Layer<ImageStorage>, options: &ImageOptions) -> Result<()> {
    if options.locking == Locking::Held {
        for file in readers(layer) {
            lock(file, Access::ReadOnly)?;
        }
    }
    Ok(())
}
