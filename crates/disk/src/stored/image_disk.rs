//! Disks and images over a user's path or URI.

use blockhouse_core::{Error, Result};
use blockhouse_engine::HostFile;
use blockhouse_storage::ImageStorage;

use crate::disk::{Disk, DiskJobs};
use crate::image::Image;
use crate::layer::Layer;
use crate::options::Access;

/// A disk whose image is a file, or an export of another server.
pub type ImageDisk = Disk<ImageStorage>;

/// An image that is a file, or an export of another server.
pub type StoredImage = Image<ImageStorage>;

impl StoredImage {
    /// The image's file; `None` if the image is on another server, or is a part of a file.
    pub fn file(&self) -> Option<&HostFile> {
        self.format().storage().storage().as_file()
    }

    /// The file with the byte at offset `host` of an image's data, and the byte's offset in that
    /// file. The image is at `depth` of the chain; its data may be in many files.
    pub fn locate(&self, depth: usize, host: u64) -> (&str, u64) {
        match self.layer().layers().nth(depth) {
            Some(layer) => layer.data().storage().locate(host),
            None => (self.name(), host),
        }
    }

    /// The space, in bytes, that the [files](Self::extent_files) with the image's data take on the
    /// host; 0 if the image names no such files.
    ///
    /// # Errors
    /// The host's error.
    pub fn query_extents_allocated(&self) -> Result<u64> {
        if self.extent_files().is_empty() {
            Ok(0)
        } else {
            let files = self.format().data().storage().files();
            files.into_iter().map(HostFile::query_allocated).sum()
        }
    }

    /// Whether this is a raw image whose changes are recorded in a side file.
    pub fn has_side_file(&self) -> bool {
        self.format().side_file().is_some()
    }

    /// Renews the voucher of the side file, if there is one. An error is only logged here. If its
    /// cause lasts, the next bitmap change reports it. After a host crash, the side file is refused
    /// if the image was changed after the voucher's end.
    pub async fn renew_voucher(&self) {
        if let Some(side_file) = self.format().side_file()
            && let Err(error) = side_file.bitmaps().renew_voucher().await
        {
            tracing::debug!("{error}");
        }
    }

    /// Brings the image to a state in which another process can open it, with all acknowledged
    /// changes: metadata is written, and the in-use marks are cleared. No request may be in flight.
    /// The disk stays open, and may continue.
    ///
    /// # Errors
    /// Errors of the storage; a remembered failure to write metadata.
    pub async fn settle(&self) -> Result<()> {
        match self.access() {
            Access::ReadWrite => self.format().settle().await,
            Access::ReadOnly => Ok(()),
        }
    }

    /// The errno of the remembered flush failure, of the image and of its data file.
    pub fn flush_failures(&self) -> [Option<i32>; 2] {
        let format = self.format();
        [format.storage(), format.data()].map(|storage| storage.failure().map(Error::errno))
    }
}

impl DiskJobs<'_, ImageStorage> {
    /// The number of replaced images whose files are still open.
    pub fn count_replaced(self) -> usize {
        self.disk().images().count_replaced()
    }

    /// Waits until no read is in flight at a backing file that was
    /// [detached](Self::detach_backing).
    pub async fn detached_reads_ended(self) {
        self.disk().image().layer().opened().reads_ended().await;
    }

    /// Releases the resources of backing files that were [detached](Self::detach_backing): locks,
    /// and connections to other servers. No read may be in flight there.
    pub fn release_detached(self) {
        let layer = self.disk().image().layer();
        for layer in layer.opened().left_alone() {
            layer.format().storage().storage().disconnect();
        }
        layer.opened().leave_detached();
        self.unlock_former();
    }

    /// Releases the locks of images that were [replaced](crate::QuiescedDisk::switch_to) or
    /// [detached](Self::detach_backing), so that other programs may use them again.
    pub fn unlock_former(self) {
        self.disk().images().former_layers().for_each(|layer| layer.stands().keep());
        self.disk().images().leave_replaced();
        self.disk().images().left_layers().for_each(unlock);
    }

    /// Releases the locks of the images of a closed disk that is still in memory, so that other
    /// programs may use them again. The caller ensures that no job writes to the images. An image
    /// that another disk reads from stays locked, with its backing files.
    pub fn unlock_closed(self) {
        let all = self.disk().image().layer().opened().all_counted().enumerate();
        for (depth, (layer, own)) in all {
            let own = if depth == 0 { 0 } else { own };
            if layer.stands().count() > own {
                return;
            }
            // Then the count no longer grows.
            layer.stands().keep();
            if layer.stands().count() > own {
                return;
            }
            unlock(layer);
        }
    }
}

/// Releases the locks of a layer's files. A file that shares its locks with the image in use keeps
/// them.
fn unlock(layer: &Layer<ImageStorage>) {
    let format = layer.format();
    let files = [format.storage(), format.data()].map(|tracker| tracker.storage().files());
    let files = files.into_iter().flatten().filter(|file| !file.shares_locks());
    files.for_each(HostFile::release_locks);
}
