//! Disks over what a person's path or URI leads to.

use blockhouse_engine::HostFile;
use blockhouse_storage::ImageStorage;

use crate::disk::Disk;

/// A disk whose image is a file, or an export of another server.
pub type ImageDisk = Disk<ImageStorage>;

impl ImageDisk {
    /// The image's file; `None` where another server has it.
    pub fn file(&self) -> Option<&HostFile> {
        self.format().storage().storage().as_file()
    }
}
