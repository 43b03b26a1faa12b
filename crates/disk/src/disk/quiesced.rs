//! The work on a disk while none of its changes is in flight: observing it, and putting another
//! image in its place.
//!
//! A [`Disk`] stays what its users hold; the image below it can be replaced. The image that takes
//! over is a disk of its own, the *successor*. From then on every request of the disk goes to the
//! successor's image. What was replaced stays in memory and its files stay open until the disk is
//! dropped, because requests that read from it may still be in flight; it is closed, so that it is
//! durable and complete, and where that fails requests ([`image_use`](super::image_use)) after
//! those in flight.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhouse_core::{Error, ErrorKind, Result, Storage, WriteCache};

use super::Disk;
use super::quiesce::QuiescedGuard;
use crate::observers::ChangeObserver;

/// A disk no change of which is in flight, and none begins, until this is dropped. Reads and
/// flushes go on.
pub struct QuiescedDisk<'a, S: Storage> {
    disk: &'a Disk<S>,
    guard: QuiescedGuard<'a>,
}

impl<S: Storage> Disk<S> {
    /// Waits for the changes in flight, and holds off later ones.
    ///
    /// # Errors
    /// `Io` where one of them takes too long: then changes go on.
    pub async fn quiesced(&self) -> Result<QuiescedDisk<'_, S>> {
        Ok(QuiescedDisk { disk: self, guard: self.quiesce().await? })
    }

    /// Has `observer` told of all changes that are made from now on.
    ///
    /// # Errors
    /// As [`quiesced`](Self::quiesced).
    pub async fn observe(&self, observer: Arc<dyn ChangeObserver>) -> Result<()> {
        let _guard = self.quiesce().await?;
        self.observers.attach(observer);
        Ok(())
    }

    /// Has it told of no more. Of changes that are in flight it is still told.
    pub fn stop_observing(&self, observer: &Arc<dyn ChangeObserver>) {
        self.observers.detach(observer);
    }

    /// Why another disk cannot take this one's place, if so: it has another size, may not be
    /// changed, or loses in a crash what this one has told its users that they need not flush.
    ///
    /// # Errors
    /// `InvalidInput`, `ReadOnly` or `Unsupported`.
    pub fn check_successor(&self, successor: &Self) -> Result<()> {
        successor.check_access(0)?;
        if successor.size() != self.size() {
            let what =
                format!("has {} bytes, and {} has {}", successor.size(), self.name(), self.size());
            return Err(Error::new(ErrorKind::InvalidInput, what).on(successor.name()));
        }
        let cache = |disk: &Self| disk.capabilities().write_cache;
        if cache(self) == WriteCache::None && cache(successor) != WriteCache::None {
            let what = "has a volatile write cache, but the guest was offered a disk without one";
            return Err(Error::new(ErrorKind::Unsupported, what)
                .on(successor.name())
                .hint("open it with the cache mode writethrough or directsync"));
        }
        Ok(())
    }

    /// Refuses to change snapshots while a job is about to put another image in the place of this
    /// one, or to detach its backing file.
    pub(crate) fn check_stays(&self) -> Result<()> {
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

    /// The disks whose images were replaced, this one first; none where it has its own image.
    pub(crate) fn replaced(&self) -> impl Iterator<Item = &Self> {
        let has_successor = |disk: &&Self| disk.successor.get().is_some();
        std::iter::successors(Some(self), |disk| disk.successor.get().map(|next| &**next))
            .take_while(has_successor)
    }

    /// Whether another image has taken the place of the one that it was opened with. A
    /// [sidecar](QuiescedDisk::record_in) of it is none.
    pub fn is_replaced(&self) -> bool {
        self.replaced().any(|disk| !disk.is_recorded.load(Ordering::Acquire))
    }

    /// The disk whose image requests go to.
    pub(crate) fn current(&self) -> &Self {
        let mut disk = self;
        while let Some(successor) = disk.successor.get() {
            disk = successor;
        }
        disk
    }
}

impl<'a, S: Storage> QuiescedDisk<'a, S> {
    /// The disk.
    pub(crate) fn disk(&self) -> &'a Disk<S> {
        self.disk
    }

    /// As [`Disk::observe`], from this moment on.
    pub fn observe(&self, observer: Arc<dyn ChangeObserver>) {
        self.disk.observers.attach(observer);
    }

    /// Puts the image of `successor` in the place of this disk's: all requests go to it from now
    /// on, also those that wait for the end of this. `successor` has everything that the disk
    /// has, durably, or is [over](Disk::over) its image, and nothing else uses it or is going
    /// to. The disk is no longer quiesced when this returns.
    ///
    /// # Errors
    /// As [`Disk::check_successor`]; nothing has changed then.
    pub fn switch_to(self, successor: Arc<Disk<S>>) -> Result<ReplacedImage<'a, S>> {
        self.switch(successor).map(|(replaced, _guard)| replaced)
    }

    /// As [`switch_to`](Self::switch_to), but the disk stays quiesced as long as the guard.
    pub(super) fn switch(
        self,
        successor: Arc<Disk<S>>,
    ) -> Result<(ReplacedImage<'a, S>, QuiescedGuard<'a>)> {
        self.disk.check_successor(&successor)?;
        let replaced = self.disk.current();
        self.disk.pass_bitmap_observer(&successor);
        // It has none: this is the end of the chain, and no other task can have the disk quiesced.
        let _ = replaced.successor.set(successor);
        Ok((ReplacedImage(replaced), self.guard))
    }

    /// As [`switch_to`](Self::switch_to), for a successor over the same file, which records its
    /// changes beside it, or does so no longer: the disk stays where it is.
    ///
    /// # Errors
    /// As there.
    pub fn record_in(self, successor: Arc<Disk<S>>) -> Result<ReplacedImage<'a, S>> {
        self.disk.check_successor(&successor)?;
        self.disk.current().is_recorded.store(true, Ordering::Release);
        self.switch_to(successor)
    }

    /// Refuses all changes from now on, also those that wait: the disk lives on at `successor`, a
    /// name for messages. Reads go on.
    pub fn retire(self, successor: String) {
        self.disk.protection.retire(successor);
    }
}

/// An image that no request goes to.
#[must_use = "close the image that is replaced"]
pub struct ReplacedImage<'a, S: Storage>(pub(super) &'a Disk<S>);

impl<S: Storage> ReplacedImage<'_, S> {
    /// Waits for what is in flight on it, where its storage gives something back. Makes everything
    /// of it durable, as [`Disk::close`] does.
    ///
    /// # Errors
    /// What the storage answers.
    pub async fn close(self) -> Result<()> {
        self.0.uses.ended().await;
        self.0.close_image().await
    }
}
