//! Disks and images over a user's path or URI.

use blockhouse_core::Result;
use blockhouse_engine::HostFile;
use blockhouse_storage::ImageStorage;

use crate::disk::{Disk, DiskJobs};
use crate::image::Image;

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

    /// Ends the time limit of opening for the image's own server, not for its backing files. From
    /// now on requests of guests and tools wait for its server without a limit. Commands that only
    /// inspect the image (`is_look`) keep the limit.
    pub(super) fn end_opening(&self, is_look: bool) {
        if !is_look {
            self.format().storage().storage().set_answer_time(None);
        }
    }
}

impl DiskJobs<'_, ImageStorage> {
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
        let files = self.disk().images().left_layers().flat_map(|layer| {
            let format = layer.format();
            [format.storage(), format.data()].map(|tracker| tracker.storage().files())
        });
        // A file that shares its locks with the image in use keeps them.
        let files = files.flatten().filter(|file| !file.shares_locks());
        files.for_each(HostFile::release_locks);
    }
}
