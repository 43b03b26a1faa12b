//! Images that another program has made longer while they are open: a raw file by `truncate`, a
//! block device by its volume manager, an image in Ceph by `rbd resize`.

use super::image_disk::ImageDisk;
use crate::disk::Resize;
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
    /// Host errors; `InvalidInput` if the file became shorter, because the missing part can be
    /// neither read nor kept, or if the disk would grow and `has_job`, because jobs keep the size
    /// that they began with; `Io` if requests in flight take too long. The disk stays as it is.
    pub async fn refresh_size(&self, has_job: bool) -> Result<Option<u64>> {
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
        let grown = async || match storage.query_size().await? {
            Some(size) => self.check_grown(size, has_job),
            None => Ok(None),
        };
        if grown().await?.is_none() {
            return Ok(None);
        }
        // If the disk has bitmaps in memory, no change is in flight.
        let _change = Resize(self).begin().await?;
        // No request may be in flight to a last partial block, which becomes an ordinary block.
        let claims = image.layer().claims();
        let _claim = self.patiently(claims.claim_end(self.size())).await?;
        // The file may have grown further during the waits.
        let Some((size, new)) = grown().await? else { return Ok(None) };
        let bitmaps = self.transient_bitmaps.get().resized(new)?;
        storage.set_min_size(size);
        Resize(self).set_transient_bitmaps(bitmaps, new);
        Ok(Some(new))
    }

    /// The bytes of the file and of its disk, if the file of `size` bytes is longer than the disk.
    fn check_grown(&self, size: u64, has_job: bool) -> Result<Option<(u64, u64)>> {
        let (old, new) = (self.size(), size.next_multiple_of(SECTOR));
        let refuse = |what| Err(Error::new(ErrorKind::InvalidInput, what).on(self.name()));
        match new {
            _ if new < old => {
                refuse(format!("the image has {size} bytes now, fewer than the disk's {old}"))
            }
            _ if new == old => Ok(None),
            _ if has_job => refuse(format!(
                "the image has {size} bytes now, and a job works on the disk of {old}: refresh it after the job"
            )),
            _ => Ok(Some((size, new))),
        }
    }
}
