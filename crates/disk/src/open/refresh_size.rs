//! Images that another program has made longer while they are open: a raw file by `truncate`, a
//! block device by its volume manager, an image in Ceph by `rbd resize`.

use super::image_disk::ImageDisk;
use blockhouse_core::{Error, ErrorKind, Result, Storage as _};

/// Bytes of a sector: the size of a guest's disk is a multiple of it.
const SECTOR: u64 = 512;

impl ImageDisk {
    /// Updates the disk's size if the image's file (or the image in Ceph) became longer; returns
    /// the new size, or `None` if the size is unchanged. The size of a qcow2 disk is in its header,
    /// and does not follow the size of the file; a longer device has more space for clusters. An
    /// export of another server, and a raw disk with a side file, keep their size.
    ///
    /// # Errors
    /// Host errors, or `InvalidInput` if the file became shorter, because the missing part can be
    /// neither read nor kept; the disk stays as it is.
    pub async fn refresh_size(&self) -> Result<Option<u64>> {
        let image = self.begin_use();
        let storage = image.format().storage().storage();
        if !image.format().is_raw() {
            // A device has free space after the image; a file grows with writes.
            if !storage.grows_with_zeros()
                && let Some(size) = storage.query_size().await?
            {
                storage.set_min_size(size);
            }
            return Ok(None);
        }
        let Some(size) = storage.query_size().await? else {
            return Ok(None);
        };
        let (old, new) = (self.size(), size.next_multiple_of(SECTOR));
        if new < old {
            let what = format!("the image has {size} bytes now, fewer than the disk's {old}");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.name()));
        }
        if new == old {
            return Ok(None);
        }
        // No request may be in flight to a last partial block, which becomes an ordinary block.
        let _claim = image.layer().claims().claim_end(self.size()).await;
        storage.set_min_size(size);
        Ok(Some(new))
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::{EngineChoice, EventLoop, HostFile, OpenMode, PageCache};

    use crate::{Disk, Options};

    #[test]
    fn a_disk_follows_its_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let storage =
                HostFile::open(file.path(), OpenMode::ReadWrite, PageCache::Used).unwrap();
            let disk = Disk::raw(storage.into(), Options::default()).unwrap();
            assert_eq!(disk.refresh_size().await.unwrap(), None);
            file.as_file().set_len(3 << 20).unwrap();
            assert_eq!(disk.refresh_size().await.unwrap(), Some(3 << 20));
            assert_eq!(disk.size(), 3 << 20);
            file.as_file().set_len(1 << 20).unwrap();
            assert!(disk.refresh_size().await.is_err());
            assert_eq!(disk.size(), 3 << 20);
            file.as_file().set_len((3 << 20) + 1).unwrap();
            assert_eq!(disk.refresh_size().await.unwrap(), Some((3 << 20) + 512));
            assert_eq!(disk.refresh_size().await.unwrap(), None);
        });
    }
}
