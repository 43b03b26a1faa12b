//! The work on a disk while none of its changes is in flight: adding observers, and replacing its
//! image ([`images`](super::images)).
//!
//! A replaced image is closed, which makes it durable. If its storage fails operations after it is
//! closed (such as Ceph, because of a lock), the image is closed after its operations in flight
//! ([`Image`]'s uses).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhouse_core::{ByteRange, Error, ErrorKind, ExtentState, Result, Storage, WriteCache};
use blockhouse_format::Intent;

use super::Disk;
use super::images::Link;
use super::quiesce::QuiescedGuard;
use crate::image::{Image, close_as_layer};
use crate::observers::ChangeObserver;
use crate::options::Access;

/// A disk without changes in flight. Until this is dropped, no change begins; reads and flushes
/// continue.
pub struct QuiescedDisk<'a, S: Storage> {
    disk: &'a Disk<S>,
    guard: QuiescedGuard<'a>,
}

impl<S: Storage> Disk<S> {
    /// Waits for the changes in flight, and holds off later ones.
    ///
    /// # Errors
    /// `Io` if a change takes too long: then changes continue.
    pub async fn quiesced(&self) -> Result<QuiescedDisk<'_, S>> {
        Ok(QuiescedDisk { disk: self, guard: self.quiesce().await? })
    }

    /// Fails if `image` cannot replace this disk's image: its size differs, it is read-only, or it
    /// has a volatile write cache and the guest was offered a disk without one. An overlay of the
    /// disk's image may be longer.
    ///
    /// # Errors
    /// `InvalidInput`, `ReadOnly` or `Unsupported`.
    pub fn check_replacement(&self, image: &Image<S>) -> Result<()> {
        if image.access() == Access::ReadOnly {
            let what = "the disk is open for reading only";
            return Err(Error::new(ErrorKind::ReadOnly, what).on(image.name()));
        }
        check_same_disk(self, image)
    }

    /// Refuses changes of snapshots while a job is about to replace the disk's image, or to detach
    /// its backing file.
    pub fn check_stays(&self) -> Result<()> {
        let what = match self.populating.load(Ordering::SeqCst) > 0 {
            true => {
                "its backing file is about to be detached, and a snapshot would need it as well"
            }
            false if self.observers.forbid_snapshots() => {
                "a mirror of the disk is being made, which gets no snapshots of it"
            }
            false => return Ok(()),
        };
        Err(Error::new(ErrorKind::Unsupported, what)
            .on(self.name())
            .hint("wait for the end of the job, or cancel it ('job.list' names it)"))
    }

    /// Whether another image has replaced the one that the disk was opened with. A [side
    /// file](QuiescedDisk::record_in) of that image does not count.
    pub fn is_replaced(&self) -> bool {
        self.images.is_replaced()
    }
}

impl<'a, S: Storage> QuiescedDisk<'a, S> {
    /// The disk.
    pub(crate) fn disk(&self) -> &'a Disk<S> {
        self.disk
    }

    /// As [`DiskJobs::observe`](super::DiskJobs::observe), from this moment on.
    pub fn observe(&self, observer: Arc<dyn ChangeObserver>) {
        self.disk.observers.attach(observer);
    }

    /// Replaces this disk's image by `image`: from now on all requests go to `image`, also requests
    /// that wait for the end of the quiesce. `image` must have the disk's whole content, durably,
    /// or be an overlay [over](Image::over) the disk's image, and nothing else may change `image`.
    /// The disk is no longer quiesced when this returns.
    ///
    /// # Errors
    /// As [`Disk::check_replacement`]; then nothing has changed.
    pub fn switch_to(self, image: Arc<Image<S>>) -> Result<ReplacedImage<'a, S>> {
        self.switch(image, false).map(|(replaced, _guard)| replaced)
    }

    /// As [`switch_to`](Self::switch_to), but the disk stays quiesced until the guard is dropped.
    fn switch(
        self,
        image: Arc<Image<S>>,
        is_same_file: bool,
    ) -> Result<(ReplacedImage<'a, S>, QuiescedGuard<'a>)> {
        self.disk.check_replacement(&image)?;
        Ok(self.replace(image, is_same_file))
    }

    fn replace(
        self,
        image: Arc<Image<S>>,
        is_same_file: bool,
    ) -> (ReplacedImage<'a, S>, QuiescedGuard<'a>) {
        let disk = self.disk;
        if let Some(observer) = disk.failures.bitmaps.get()
            && let Ok(bitmaps) = image.format().bitmaps()
        {
            bitmaps.observe_losses(Arc::clone(observer));
        }
        let link = disk.images.replace(image, is_same_file);
        (ReplacedImage { disk, link }, self.guard)
    }

    /// As [`switch_to`](Self::switch_to), to another opening of the disk's image, perhaps for
    /// reading only.
    ///
    /// # Errors
    /// As [`switch_to`](Self::switch_to), but not `ReadOnly`.
    pub fn reopen_in(self, image: Arc<Image<S>>) -> Result<ReplacedImage<'a, S>> {
        check_same_disk(self.disk, &image)?;
        Ok(self.replace(image, true).0)
    }

    /// As [`switch_to`](Self::switch_to), for an image over the same file that begins or ends the
    /// recording of changes in a side file. The disk's location stays the same.
    ///
    /// # Errors
    /// As [`switch_to`](Self::switch_to).
    pub fn record_in(self, image: Arc<Image<S>>) -> Result<ReplacedImage<'a, S>> {
        self.switch(image, true).map(|(replaced, _guard)| replaced)
    }

    /// Marks the ranges that the disk's image has itself as changed: durably in the enabled bitmaps
    /// of `lower`, the image's backing file, and in the disk's bitmaps in memory. So these bitmaps
    /// are correct when the disk returns to `lower`.
    ///
    /// # Errors
    /// Storage errors: bitmaps may then mark some ranges as changed already.
    pub async fn note_own_parts_in(&self, lower: &Image<S>) -> Result<()> {
        let transient = self.disk.transient_bitmaps.get();
        let bitmaps = match lower.format().has_bitmaps() {
            true => Some(lower.format().bitmaps()?),
            false if transient.is_empty() => return Ok(()),
            false => None,
        };
        let mut rest = ByteRange::between(0, self.disk.size());
        while !rest.is_empty() {
            let extent = self.disk.format().map(rest, Intent::Read).await?;
            let part = rest.truncate(extent.guest.length());
            if extent.state != ExtentState::Backing {
                transient.mark(part);
                if let Some(bitmaps) = &bitmaps {
                    bitmaps.record(part).await?;
                }
            }
            rest = rest.skip(part.length());
        }
        Ok(())
    }

    /// As [`switch_to`](Self::switch_to), to an image that the replaced one is based on (see
    /// *Rollback* in README.md of crates/images): `lower` is changed only after reads through the
    /// replaced image have ended, or after a time limit if its storage hangs.
    ///
    /// # Errors
    /// As [`switch_to`](Self::switch_to).
    pub async fn go_back_to(self, lower: Arc<Image<S>>) -> Result<ReplacedImage<'a, S>> {
        let disk = self.disk;
        let (replaced, guard) = self.switch(lower, false)?;
        let reads = replaced.image().layer().opened().reads_ended();
        if let Err(error) = disk.patiently(reads).await {
            tracing::warn!("{error}; they may read what is written from now on");
        }
        drop(guard);
        Ok(replaced)
    }

    /// Refuses all changes from now on, also those that wait: the disk has moved to `moved_to`, a
    /// name for messages. Reads continue.
    pub fn retire(self, moved_to: String) {
        self.disk.protection.retire(moved_to);
    }
}

/// As [`Disk::check_replacement`], but the image may be read-only.
fn check_same_disk<S: Storage>(disk: &Disk<S>, image: &Image<S>) -> Result<()> {
    let own = disk.image().layer();
    match image.layer().backing_layer() {
        Some(layer) if Arc::ptr_eq(layer, own) => check_overlay_size(disk, image)?,
        _ if image.size() == disk.size() => {}
        _ => return Err(wrong_size(disk, image)),
    }
    let cache = |image: &Image<S>| image.capabilities().write_cache;
    if cache(disk.image()) == WriteCache::None && cache(image) != WriteCache::None {
        let what = "has a volatile write cache, but the guest was offered a disk without one";
        return Err(Error::new(ErrorKind::Unsupported, what)
            .on(image.name())
            .hint("open it with the cache mode writethrough or directsync"));
    }
    Ok(())
}

/// Fails if an image with the size of `overlay` cannot be an overlay in which the disk goes on. A
/// longer one makes the disk longer, and its new part reads as zeros. A disk with bitmaps keeps its
/// size, because they have that size.
///
/// # Errors
/// `InvalidInput`.
pub fn check_overlay_size<S: Storage>(disk: &Disk<S>, overlay: &Image<S>) -> Result<()> {
    let (old, new) = (disk.size(), overlay.size());
    let has_bitmaps = disk.format().has_bitmaps() || !disk.transient_bitmaps.get().is_empty();
    let may_grow = new > old && new.is_multiple_of(disk.logical_block_size()) && !has_bitmaps;
    if new == old || may_grow { Ok(()) } else { Err(wrong_size(disk, overlay)) }
}

fn wrong_size<S: Storage>(disk: &Disk<S>, image: &Image<S>) -> Error {
    let what = format!("has {} bytes, and {} has {}", image.size(), disk.name(), disk.size());
    Error::new(ErrorKind::InvalidInput, what).on(image.name())
}

/// An image that was replaced: no new request goes to it.
#[must_use = "close the image that is replaced"]
pub struct ReplacedImage<'a, S: Storage> {
    disk: &'a Disk<S>,
    link: &'a Link<S, Arc<Disk<S>>>,
}

impl<S: Storage> ReplacedImage<'_, S> {
    /// The image.
    pub fn image(&self) -> &Arc<Image<S>> {
        self.link.image()
    }

    /// Makes the image durable, as [`Disk::close`] does. If the close releases a resource of its
    /// storage, such as a lock, this first waits for the image's operations in flight.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn close(self) -> Result<()> {
        self.image().uses.ended().await;
        self.disk.close_image(self.link).await
    }

    /// Makes an image durable that other images still read as a layer. Its storage stays open.
    ///
    /// # Errors
    /// Errors of the storage. Then flushes of the images over this one fail, because they flush it
    /// as well.
    pub async fn close_as_layer(&self) -> Result<()> {
        close_as_layer(self.image()).await
    }
}
