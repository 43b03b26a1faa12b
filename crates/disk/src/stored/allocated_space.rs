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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use blockhouse_engine::{EngineChoice, EventLoop, HostFile, OpenMode, PageCache};

    use crate::{Disk, Options};

    #[test]
    fn a_hole_takes_no_space() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(64 << 20).unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let storage = HostFile::open(file.path(), OpenMode::ReadWrite, PageCache::Used);
            let disk = Disk::raw(storage.unwrap().into(), Options::default()).unwrap();
            assert!(disk.image().allocated_bytes().unwrap().unwrap() < 1 << 20);
            std::fs::write(file.path(), vec![1; 4 << 20]).unwrap();
            let blocks = file.as_file().metadata().unwrap().blocks();
            assert!(blocks > 0);
            assert_eq!(disk.image().allocated_bytes().unwrap(), Some(blocks * 512));
        });
    }
}
