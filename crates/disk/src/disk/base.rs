//! A disk whose backing file is open for writing: a commit copies the image's data into it.
//!
//! Guarantees: the image reads its backing file through the instance that writes to it, so that no
//! read uses stale metadata. A change of the disk never makes a cluster refer to the backing file
//! again. So copying data from the image into its backing file never changes what the disk reads,
//! even after a crash: the image still has that data itself.

use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use super::{Disk, DiskJobs};

impl<'a, S: Storage> DiskJobs<'a, S> {
    /// Makes the image read its backing file through `base` from now on: a disk of the same file
    /// that is open for writing, and at least as long as the image. The caller
    /// [settles](Self::settle_base) the base before changing it. When the disk is closed, it closes
    /// `base`, too.
    ///
    /// # Errors
    /// `InvalidInput` if the image has no backing file, has such a base already, or is longer than
    /// `base`; `Io` if changes in flight take too long. On error nothing has changed.
    pub async fn attach_base(self, base: Arc<Disk<S>>) -> Result<()> {
        let link = self.disk.images.last();
        let image = link.image();
        let refuse = |what: String| Err(Error::new(ErrorKind::InvalidInput, what).on(image.name()));
        if image.backing_file().is_none() {
            return refuse("has no backing file".into());
        }
        if base.size() < image.size() {
            return refuse(format!("is longer than its backing file, of {} bytes", base.size()));
        }
        let layer = Arc::clone(base.image().layer());
        let _guard = self.disk.quiesce().await?;
        if link.base.set(base).is_err() {
            return refuse("has its backing file open for writing already".into());
        }
        // The base may be longer than the backing file was. So zeros past the old end are stored
        // from now on.
        image.format().set_backing_size(u64::MAX);
        image.layer().opened().replace(layer);
        Ok(())
    }

    /// Waits until no read in flight uses an older open instance of the [base](Self::base). Then
    /// the base may be changed.
    ///
    /// # Errors
    /// `Io` if a read takes too long. The base stays, and the caller may wait again.
    pub async fn settle_base(self) -> Result<()> {
        self.disk.patiently(self.disk.image().layer().opened().reads_ended()).await
    }

    /// The disk of the image's backing file, if it is [open for writing](Self::attach_base).
    pub fn base(self) -> Option<&'a Arc<Disk<S>>> {
        self.disk.images.last().base.get()
    }
}
