//! The locks of a layer that a disk reads, while the layer is reopened for writing.

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::HostFile;
use blockhouse_storage::ImageStorage;

use super::image_options::{ImageOptions, Locking};
use super::lock::{lock, lock_in_place_of};
use super::open_location::identity_of;
use crate::layer::Layer;
use crate::options::Access;

/// The files that a layer reads.
fn readers(layer: &Layer<ImageStorage>) -> Vec<&HostFile> {
    let (image, data) = (layer.format().storage(), layer.data());
    let mut files = image.storage().files();
    if !std::ptr::eq(image, data) {
        files.extend(data.storage().files());
    }
    files
}

/// Moves the locks of a layer that is open for reading to `file`, another opening of the image or
/// of its side file. Releases the locks of the layer's other file.
///
/// # Errors
/// As [`check_alone`] and [`lock_in_place_of`]. After an error the caller [locks](lock_readers) the
/// layer's files again.
pub(super) fn take_from_readers(
    layer: &Layer<ImageStorage>,
    file: &HostFile,
    options: &ImageOptions,
) -> Result<()> {
    check_alone(layer)?;
    let wanted = identity_of(file)?;
    for reader in readers(layer).into_iter().filter(|_| options.locking == Locking::Held) {
        if identity_of(reader)? == wanted {
            lock_in_place_of(file, reader)?
        } else {
            // `reader` is the layer's other file: the raw image of a side file, a side file, or a
            // data file. The new opening locks that file next.
            reader.release_locks()
        }
    }
    Ok(())
}

/// Keeps further disks from using a layer that is about to be opened for writing.
///
/// # Errors
/// `Unsupported` if other disks read through it.
pub(super) fn check_alone(layer: &Layer<ImageStorage>) -> Result<()> {
    layer.stands().keep();
    if layer.stands().count() > 1 {
        let what = "is the layer of other disks of this server as well, which it would spoil";
        let error = Error::new(ErrorKind::Unsupported, what).on(layer.image_name());
        return Err(error.hint("close these first, or make them independent (stream)"));
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
