//! The locks of a layer that a disk reads, while the layer is reopened for writing.

use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::{Access, Layer, StoredImage};
use blockhouse_engine::HostFile;
use blockhouse_storage::ImageStorage;

use crate::image_options::{ImageOptions, Locking};
use crate::lock::{become_reader, lock_in_place_of, take_bytes};
use crate::open_location::identity_of;

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
/// As [`check_alone`] and [`lock_in_place_of`]. The caller has a [`ReaderLocksGuard`], which locks
/// the layer's files again.
pub(crate) fn take_from_readers(
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
pub(crate) fn check_alone(layer: &Layer<ImageStorage>) -> Result<()> {
    layer.stands().keep();
    if layer.stands().count() > 1 {
        let what = "is the layer of other disks of this server as well, which it would spoil";
        let error = Error::new(ErrorKind::Unsupported, what).on(layer.image_name());
        return Err(error.hint("close these first, or make them independent (stream)"));
    }
    Ok(())
}

/// Locks a layer for reading again, in place of another opening of its files. Does not wait for the
/// end of this opening, whose last operations may still hold its locks. Errors are logged.
pub(crate) fn lock_readers(layer: &Layer<ImageStorage>, locking: Locking) {
    if locking == Locking::Held {
        for file in readers(layer) {
            if let Err(error) = take_bytes(file, Access::ReadOnly) {
                tracing::warn!("{error}");
            }
        }
    }
}

/// The locks of a layer that a disk reads, while another opening of its files takes them. When this
/// is dropped, the layer's files are locked for reading again, unless the other opening
/// [keeps](Self::keep) the locks. So an error or a dropped future leaves no layer unlocked.
#[must_use]
pub struct ReaderLocksGuard {
    layer: Arc<Layer<ImageStorage>>,
    locking: Locking,
    /// The other opening, once it is complete.
    opened: Option<Arc<StoredImage>>,
    is_kept: bool,
}

impl ReaderLocksGuard {
    /// The guard must be made before anything can fail, or be dropped, while the layer's files are
    /// not locked.
    pub(crate) fn new(layer: &Arc<Layer<ImageStorage>>, locking: Locking) -> Self {
        Self { layer: Arc::clone(layer), locking, opened: None, is_kept: false }
    }

    /// The guard while `opened` has the locks.
    pub(crate) fn of_opened(mut self, opened: &Arc<StoredImage>) -> Self {
        self.opened = Some(Arc::clone(opened));
        self
    }

    /// Leaves the locks to the other opening.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for ReaderLocksGuard {
    fn drop(&mut self) {
        if self.is_kept || self.locking != Locking::Held {
            return;
        }
        let opened = self.opened.iter().flat_map(|opened| readers(opened.layer()));
        opened.for_each(become_reader);
        lock_readers(&self.layer, self.locking);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use blockhouse_disk::ImageFormat;
    use blockhouse_engine::{EngineChoice, EventLoop};
    use blockhouse_format::qcow2::{Backing, CreateOptions};
    use futures_util::poll;

    use super::*;
    use crate::create::{create, create_qcow2};
    use crate::lock::lock_for_writing;
    use crate::open_image::{open, open_base};

    /// A base that is opened for writing, and not attached, leaves the layer of the disk locked.
    #[test]
    fn a_layer_that_is_opened_again_in_vain_stays_locked() {
        let folder = tempfile::tempdir().unwrap();
        let (base, path) = (folder.path().join("base"), folder.path().join("disk"));
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            create(&base, 1 << 20, ImageFormat::Qcow2).await.unwrap();
            let backing = Backing { name: b"base".to_vec(), format: Some("qcow2".into()) };
            let new = CreateOptions { backing: Some(backing), ..CreateOptions::new(1 << 20) };
            create_qcow2(&path, &new, Default::default()).await.unwrap();
            let format = Some(ImageFormat::Qcow2);
            let options = ImageOptions { format, ..ImageOptions::default() };
            let is_locked = |base: &Path| lock_for_writing(base).is_err();
            assert!(!is_locked(&base));
            let disk = open(&path, options.clone()).await.unwrap();
            assert!(is_locked(&base));
            for round in 0_u32.. {
                let steps = (2 + round % 2) << (round / 2);
                let mut opening = open_base(&disk, &path, options.clone());
                let mut is_ready = false;
                for _ in 0..steps {
                    is_ready |= !is_ready && poll!(&mut opening).is_ready();
                    blockhouse_core::yield_now().await;
                }
                drop(opening);
                assert!(is_locked(&base), "dropped after {steps} steps");
                if is_ready {
                    break;
                }
            }
            let (opened, guard) = open_base(&disk, &path, options.clone()).await.unwrap();
            opened.close().await.unwrap();
            drop((opened, guard));
            assert!(is_locked(&base));
        });
    }
}
