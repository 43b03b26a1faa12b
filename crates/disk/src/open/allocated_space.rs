//! The space that a disk takes on the host.

use blockhouse_core::Result;
use blockhouse_engine::HostFile;

use crate::disk::Disk;

impl Disk<HostFile> {
    /// The space that the image takes on the host in bytes, its data file included, its backing file not. A block device
    /// takes all that it has.
    ///
    /// # Errors
    /// The host's.
    pub fn allocated_bytes(&self) -> Result<u64> {
        let (image, data) = (self.format().storage().storage(), self.format().data().storage());
        let mut allocated = image.query_allocated()?;
        if !std::ptr::eq(image, data) {
            allocated += data.query_allocated()?;
        }
        Ok(allocated)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use blockhouse_engine::{EngineChoice, EventLoop, OpenMode, PageCache};

    use super::*;
    use crate::Options;

    #[test]
    fn a_hole_takes_no_space() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(64 << 20).unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let storage = HostFile::open(file.path(), OpenMode::ReadWrite, PageCache::Used);
            let disk = Disk::raw(storage.unwrap(), Options::default()).unwrap();
            assert!(disk.allocated_bytes().unwrap() < 1 << 20);
            std::fs::write(file.path(), vec![1; 4 << 20]).unwrap();
            let blocks = file.as_file().metadata().unwrap().blocks();
            assert!(blocks > 0);
            assert_eq!(disk.allocated_bytes().unwrap(), blocks * 512);
        });
    }
}
