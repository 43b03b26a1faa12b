//! The space that a disk takes on the host.

use blockhouse_core::Result;
use blockhouse_storage::ImageStorage;

use super::image_disk::StoredImage;

impl StoredImage {
    /// The space that the image takes on the host, in bytes, with its data file and without its
    /// backing file. A block device takes its whole size. `None` if the image is on another server,
    /// or is a part of a file.
    ///
    /// # Errors
    /// The host's error.
    pub fn allocated_bytes(&self) -> Result<Option<u64>> {
        let (image, data) = (self.format().storage().storage(), self.format().data().storage());
        let Some(file) = image.as_file() else {
            return Ok(matches!(image, ImageStorage::Null(_)).then_some(0));
        };
        let mut allocated = file.query_allocated()?;
        if let Some(data) = data.as_file().filter(|_| !std::ptr::eq(image, data)) {
            allocated += data.query_allocated()?;
        }
        Ok(Some(allocated))
    }
}
