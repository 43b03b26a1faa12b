//! Makes a disk in use independent of its backing file, or of the backing files above a given base.
//!
//! Guarantees: the disk's content never changes. After a crash each cluster either has its data or
//! still refers to the backing file. One write of the header detaches the backing file, or replaces
//! it by the base, when the image durably has all data of the files that are dropped. No snapshot
//! is taken meanwhile, because a snapshot would also need the backing file.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage, SyncMode, rare};
use blockhouse_format::Backing;

use super::access::check_writable_at;
use super::{Disk, DiskJobs, flush_ahead, quiesce_flushed};
use crate::layer::{BlockStatusCache, Layer};
use crate::write::BackedRange;

/// Marks a disk whose image is populated from its backing file, until the guard is dropped. The
/// guards are counted: a job with a hanging backing file may drop its guard after another job has
/// begun.
pub struct PopulatingGuard(Arc<AtomicUsize>);

impl Drop for PopulatingGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A *base*, further down the backing chain of a disk, and an *image above* it. The base can become
/// that image's backing file once one of the two has the data of the images between them.
#[derive(Clone, Debug)]
pub struct FurtherBase {
    /// The number of steps from the disk's image down to the image above.
    above: usize,
    /// The number of steps from the image above down to the base.
    steps: usize,
    /// The name of the base in the header of the image above.
    name: Backing,
}

impl FurtherBase {
    /// The base is `steps` (at least 2) below the image above, which is `above` steps below the
    /// disk's own image. `name` is the base's name in the header of the image above.
    ///
    /// # Errors
    /// `InvalidInput`: the base is the backing file already, the chain is shorter, or the base is
    /// longer than an image between, which hides the base's end.
    pub fn new<S: Storage>(
        disk: &Disk<S>,
        above: usize,
        steps: usize,
        name: Backing,
    ) -> Result<Self> {
        let layers: Vec<_> = disk.image().layer().layers().skip(above).take(steps + 1).collect();
        let refuse = |what: String| Err(Error::new(ErrorKind::InvalidInput, what).on(disk.name()));
        let [_, between @ .., base] = &layers[..] else {
            return refuse("its chain of backing files is shorter".into());
        };
        if layers.len() <= steps {
            return refuse("its chain of backing files is shorter".into());
        }
        if between.is_empty() {
            return refuse(format!("{} is its backing file already", base.image_name()));
        }
        if let Some(shorter) = between.iter().find(|layer| layer.size() < base.size()) {
            return refuse(format!(
                "{} is longer than {}, which hides its end",
                base.image_name(),
                shorter.image_name()
            ));
        }
        Ok(Self { above, steps, name })
    }

    /// The number of steps from the disk's image down to the image above.
    pub fn above(&self) -> usize {
        self.above
    }

    /// The number of steps from the image above down to the base.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The base's name in the header of the image above.
    pub fn name(&self) -> &Backing {
        &self.name
    }

    /// The images between the image above and the base, the highest one first, and then the base.
    pub(crate) fn chain_of<'a, S: Storage>(
        &self,
        disk: &'a Disk<S>,
    ) -> impl Iterator<Item = &'a Arc<Layer<S>>> {
        disk.image().layer().opened().now().skip(self.above).take(self.steps)
    }

    /// Makes the base the backing file of the image above, whose header names it already.
    pub(crate) async fn pass_over<S: Storage>(&self, disk: &Disk<S>) {
        let Some(above) = disk.image().layer().layers().nth(self.above) else { return };
        // Earlier reads may have looked up the range past the end of the backing file, and must end
        // first.
        above.format().reads_ended().await;
        above.opened().pass_over(self.steps, self.name.clone());
    }
}

impl<S: Storage> DiskJobs<'_, S> {
    /// Prepares a disk in use for [`populate`](Self::populate): from now on all changes of the disk
    /// claim their range. While the guard exists, the disk's snapshots cannot change.
    ///
    /// # Errors
    /// `ReadOnly`; `InvalidInput` for an image without a backing file; `Unsupported` for an image
    /// with snapshots, because they also need the backing file; `Io` if changes in flight take too
    /// long.
    pub async fn begin_populating(self) -> Result<PopulatingGuard> {
        self.disk.check_writable()?;
        self.disk.populating.fetch_add(1, Ordering::SeqCst);
        let guard = PopulatingGuard(Arc::clone(&self.disk.populating));
        let _quiesced = self.disk.quiesce().await?;
        self.check_detachable().await?;
        self.disk.image().layer().claims().set_all(true);
        Ok(guard)
    }

    /// The first range from `offset` on that the image leaves to its backing file, at most as long
    /// as one [`populate`](Self::populate) copies. With a `base`, only ranges of the layers above
    /// the base count. `None`: no such range is left. `cache` is for this disk alone, and may be
    /// kept until the backing file is [detached](Self::detach_backing).
    ///
    /// # Errors
    /// Errors of the lookup.
    pub async fn next_backed(
        self,
        offset: u64,
        base: Option<&FurtherBase>,
        cache: &mut BlockStatusCache,
    ) -> Result<Option<BackedRange>> {
        let (end, base) = (self.disk.size(), base.map(|base| base.steps));
        if offset >= end {
            return Ok(None);
        }
        let rest = ByteRange::between(offset, end);
        self.disk.image().writer().next_backed(rest, base, cache).await
    }

    /// Copies the bytes of `part` that the image lacks into the image; returns their number. They
    /// are durable with the next flush. If `go_on` returns false after the read of the backing
    /// file, nothing is written, because the disk may be closed by then.
    ///
    /// # Errors
    /// Errors of the backing file or the image; `ReadOnly`. The disk's content is the same as
    /// before.
    pub async fn populate(self, part: BackedRange, go_on: &dyn Fn() -> bool) -> Result<u64> {
        check_writable_at(self.disk, part.range.offset())?;
        let begin_change = || go_on().then(|| self.disk.quiesce.try_begin_write()).flatten();
        loop {
            match self.disk.image().writer().populate(part, &begin_change).await? {
                Some(filled) => return Ok(filled),
                None if !go_on() => return Ok(0),
                // A change of the whole image is in progress, and must not wait for a backing file.
                // So this waits for the end of that change without a claim.
                None => drop(self.disk.quiesce.begin_write().await),
            }
        }
    }

    /// Makes the populated ranges durable, so that little is left to flush when the backing file is
    /// [detached](Self::detach_backing).
    ///
    /// # Errors
    /// `InvalidInput` if the image still leaves a range to its backing file or, with a `base`, to a
    /// backing file above `base`; storage errors.
    pub async fn check_populated(self, base: Option<&FurtherBase>) -> Result<()> {
        if let Some(part) = self.next_backed(0, base, &mut BlockStatusCache::default()).await? {
            let what = "is still left to the backing file";
            let error = Error::new(ErrorKind::InvalidInput, what);
            return Err(error.on(self.disk.name()).at(part.range.offset()));
        }
        flush_ahead(&[self.disk], SyncMode::Data).await.map(drop)
    }

    /// Detaches the backing file durably; the image must [leave nothing](Self::check_populated) to
    /// it. The header then names no backing file, and none is read. With a `base`, the header names
    /// the base, which takes the place of the images above it. The files of the chain stay open
    /// until the disk is dropped. No change of the disk makes a range refer to the backing file
    /// again, so nothing is checked here.
    ///
    /// # Errors
    /// `ReadOnly`; `InvalidInput` for an image without a backing file; `Unsupported` if the image
    /// has snapshots; `Io` if changes in flight take too long; storage errors. The image then still
    /// names its backing file or, if the header write failed and could not be undone, perhaps not:
    /// it reads the same in both cases.
    pub async fn detach_backing(self, base: Option<&FurtherBase>) -> Result<()> {
        {
            let _guard = self.disk.quiesce().await?;
            self.disk.check_writable()?;
            self.check_detachable().await?;
            let name = base.map(|base| base.name.clone());
            rare(self.disk.image().format().header().set_backing(name)).await?;
            // Over a base, reads may still copy into the image.
            let copies_on_read = base.is_some() && self.disk.image().options.copy_on_read;
            self.disk.image().layer().claims().set_all(copies_on_read);
        }
        if let Some(base) = base {
            base.pass_over(self.disk).await;
        } else {
            // Earlier reads may have looked up the range past the end of the backing file, and must
            // end first.
            self.disk.image().format().reads_ended().await;
            self.disk.image().layer().opened().detach();
        }
        Ok(())
    }

    /// Writes `name` to the image's header as the name of the backing file, durably. Until the disk
    /// is reopened, it reads the same backing file.
    ///
    /// # Errors
    /// `InvalidInput` for an image without a backing file, or a name too long for its header;
    /// `ReadOnly`; `Io` if changes in flight take too long; storage errors.
    pub async fn name_backing(self, name: &[u8]) -> Result<()> {
        let _guard = rare(quiesce_flushed(self.disk, SyncMode::Data)).await?;
        self.disk.check_writable()?;
        let image = self.disk.image();
        let Some(backing) = image.backing_file() else {
            let what = "has no backing file";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.disk.name()));
        };
        let named = Backing { name: name.to_vec(), ..backing.clone() };
        let outcome = rare(image.format().header().set_backing(Some(named))).await;
        // The backing size stays that of the backing file that is open.
        let size = image.layer().backing_layer().map_or(0, |layer| layer.size());
        image.format().set_backing_size(size);
        outcome
    }

    async fn check_detachable(self) -> Result<()> {
        if self.disk.image().backing_file().is_none() {
            let what = "has no backing file";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.disk.name()));
        }
        if self.disk.image().format().snapshots()?.list().await?.is_empty() {
            return Ok(());
        }
        let what = "has snapshots, which need its backing file as well";
        Err(Error::new(ErrorKind::Unsupported, what)
            .on(self.disk.name())
            .hint("delete them first ('blockhouse ctl SOCKET snapshot delete')"))
    }
}
