//! Dirty bitmaps of an open disk. A bitmap records which parts of the disk have changed since the
//! bitmap was added or cleared.
//!
//! A persistent bitmap is stored in the image. A transient bitmap ([`TransientBitmaps`]) is only in
//! memory and ends with the disk; disks of any format can have one, also read-only disks. All
//! bitmaps of a disk share one list of names.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use blockhouse_core::sync::Condvar;
use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage, SyncMode, rare};
use blockhouse_format::{
    Bitmap, BitmapAction, BitmapChange as ImageChange, BitmapExtent, Bitmaps, NewBitmap,
};
use futures_util::future::join_all;
use parking_lot::Mutex;

use crate::dirty_map::DirtyMap;
use crate::disk::{Disk, QuiescedDisk, flush_ahead};
use crate::durability::FlushTracker;
use crate::snapshots::Pause;
use crate::transient_bitmaps::{TransientBitmaps, is_there};

/// Minimum number of extents read together.
const EXTENTS: usize = 4096;
/// Maximum bytes of memory for the copy of a stored bitmap that is merged into a bitmap in memory.
/// A larger copy gets a coarser granularity.
const MAX_COPY: u64 = 16 << 20;

/// A change of a bitmap: one of several changes that are made together.
#[derive(Clone)]
pub enum BitmapChange {
    /// A bitmap without dirty ranges is added to the image.
    Add(NewBitmap),
    /// A bitmap without dirty ranges is added in memory.
    AddTransient(NewBitmap),
    /// A bitmap is changed.
    Change {
        /// The bitmap's name.
        name: String,
        /// The action.
        action: BitmapAction,
    },
    /// Another bitmap of the disk is merged into a bitmap.
    Merge {
        /// The name of the bitmap that gets the changes.
        name: String,
        /// The name of the other bitmap, which does not change.
        source: String,
    },
    /// Dirty ranges are merged into a bitmap in memory.
    MergeChanges {
        /// The bitmap's name.
        name: String,
        /// The dirty ranges.
        changes: Arc<DirtyMap>,
    },
}

impl BitmapChange {
    /// The name of the bitmap that is added or changed.
    pub fn name(&self) -> &str {
        match self {
            Self::Add(new) | Self::AddTransient(new) => &new.name,
            Self::Change { name, .. }
            | Self::Merge { name, .. }
            | Self::MergeChanges { name, .. } => name,
        }
    }
}

impl<S: Storage> Disk<S> {
    /// The disk's bitmaps.
    pub fn bitmaps(&self) -> DiskBitmaps<'_, S> {
        DiskBitmaps { disk: self }
    }
}

/// The bitmaps of an open disk. Each change happens as a whole or not at all. A change of a
/// persistent bitmap is durable when the call returns. The disk is quiesced while a change is made.
pub struct DiskBitmaps<'a, S: Storage> {
    disk: &'a Disk<S>,
}

impl<S: Storage> DiskBitmaps<'_, S> {
    /// All bitmaps: first the image's bitmaps, then the bitmaps in memory, both in the order in
    /// which they were added. The image's bitmaps are missing if another program has changed the
    /// disk without recording its changes in them.
    ///
    /// # Errors
    /// `Unsupported` for a format without bitmaps, if no bitmap is in memory; `Corrupt` if the
    /// image's directory of bitmaps contradicts the format.
    pub async fn list(&self) -> Result<Vec<Bitmap>> {
        let transient = self.disk.transient_bitmaps.get();
        let mut all = match self.disk.begin_use().format().bitmaps() {
            Err(_) if !transient.is_empty() => Vec::new(),
            bitmaps => rare(bitmaps?.list()).await?,
        };
        all.extend(transient.described());
        Ok(all)
    }

    /// Whether a bitmap of this name is in memory.
    pub fn is_transient(&self, name: &str) -> bool {
        self.disk.transient_bitmaps.get().has(name)
    }

    /// Marks the whole disk in the bitmaps in memory: another program may have changed the image.
    pub fn mark_transient(&self) {
        self.disk.transient_bitmaps.get().mark(ByteRange::between(0, self.disk.size()));
    }

    /// The dirty and clean parts of `range` in the bitmap of this name: adjacent extents. An
    /// image's bitmap returns at least `max` extents, a bitmap in memory exactly `max`, unless
    /// `range` has fewer. If the bitmap is enabled and the disk is writable, the extents include
    /// all changes so far.
    ///
    /// # Errors
    /// `InvalidInput` if there is no such bitmap, if the bitmap is inconsistent, or if the range is
    /// past the end of the disk; else as [`list`](Self::list).
    pub async fn extents(
        &self,
        name: &str,
        range: ByteRange,
        max: usize,
    ) -> Result<Vec<BitmapExtent>> {
        self.disk.image().check_inside(range)?;
        if let Some(map) = self.disk.transient_bitmaps.get().map_of(name) {
            return Ok(map.extents(range, max));
        }
        self.disk.begin_use().format().bitmaps()?.extents(name, range, max).await
    }

    /// As [`extents`](Self::extents), for the nearest image of the chain that has a bitmap of this
    /// name. A backing file's bitmap has the changes of the backing file, but not the changes of
    /// the images above it.
    ///
    /// # Errors
    /// As [`extents`](Self::extents); `InvalidInput` if the size of the backing file with the
    /// bitmap differs from the disk's.
    pub async fn extents_in_chain(
        &self,
        name: &str,
        range: ByteRange,
        max: usize,
    ) -> Result<Vec<BitmapExtent>> {
        let has_it = |listed: &[Bitmap]| listed.iter().any(|bitmap| bitmap.name == name);
        if self.list().await.is_ok_and(|own| has_it(&own)) {
            return rare(self.extents(name, range, max)).await;
        }
        let image = self.disk.begin_use();
        for layer in image.layer().layers().skip(1) {
            let Ok(bitmaps) = layer.format().bitmaps() else { continue };
            if !has_it(&bitmaps.list().await?) {
                continue;
            }
            self.disk.image().check_inside(range)?;
            if layer.size() != self.disk.size() {
                let what = format!(
                    "its backing file has the bitmap {name:?}, and is a disk of {} bytes and not of {}",
                    layer.size(),
                    self.disk.size()
                );
                return Err(Error::new(ErrorKind::InvalidInput, what).on(self.disk.name()));
            }
            return rare(bitmaps.extents(name, range, max)).await;
        }
        self.extents(name, range, max).await
    }

    /// The number of dirty bytes in the bitmap of this name: whole granules, except at the end of
    /// the disk.
    ///
    /// # Errors
    /// As [`extents`](Self::extents).
    pub async fn dirty_bytes(&self, name: &str) -> Result<u64> {
        let mut rest = ByteRange::between(0, self.disk.size());
        let mut dirty = 0;
        while !rest.is_empty() {
            for extent in self.extents(name, rest, EXTENTS).await? {
                rest = rest.skip(extent.length);
                dirty += if extent.is_dirty { extent.length } else { 0 };
            }
        }
        Ok(dirty)
    }

    /// A copy in memory of the bitmap of this name. `min_granularity` is the minimum size of the
    /// copy's granules in bytes, a power of two. If the bitmap is enabled, the copy has all changes
    /// before the call, and may have later ones.
    ///
    /// # Errors
    /// As [`extents`](Self::extents), and as [`DirtyMap::new`].
    pub async fn copy(&self, name: &str, min_granularity: u64) -> Result<DirtyMap> {
        let listed = self.list().await?;
        let own = listed.iter().find(|bitmap| bitmap.name == name).map(|one| one.granularity);
        let granularity = own.unwrap_or(min_granularity).max(min_granularity);
        let map = DirtyMap::new(self.disk.size(), granularity)?;
        let mut rest = ByteRange::between(0, self.disk.size());
        while !rest.is_empty() {
            for extent in self.extents(name, rest, EXTENTS).await? {
                if extent.is_dirty {
                    map.mark(rest.truncate(extent.length));
                }
                rest = rest.skip(extent.length);
            }
        }
        Ok(map)
    }

    /// Adds a bitmap without any change in it.
    ///
    /// # Errors
    /// As [`Bitmaps::add`]; `ReadOnly`; `Unsupported` for a format without bitmaps. On error
    /// nothing has changed.
    pub async fn add(&self, new: &NewBitmap) -> Result<Pause> {
        self.while_quiesced(async |bitmaps| {
            if self.is_transient(&new.name) {
                Err(is_there(&new.name))
            } else {
                rare(bitmaps.add(new)).await
            }
        })
        .await
    }

    /// Adds a bitmap in memory without any change in it.
    ///
    /// # Errors
    /// `InvalidInput` as for [`add`](Self::add), or if its bits take too much memory. On error
    /// nothing has changed.
    pub async fn add_transient(&self, new: &NewBitmap) -> Result<Pause> {
        self.change_at_once(BitmapChange::AddTransient(new.clone())).await
    }

    /// Changes the bitmap of this name.
    ///
    /// # Errors
    /// As [`add`](Self::add); `InvalidInput` if no bitmap has this name, or if it is inconsistent
    /// and `action` does not remove it.
    pub async fn change(&self, name: &str, action: BitmapAction) -> Result<Pause> {
        if self.is_transient(name) {
            return self.change_at_once(BitmapChange::Change { name: name.into(), action }).await;
        }
        self.while_quiesced(async |bitmaps| rare(bitmaps.change(name, action)).await).await
    }

    /// Merges the bitmap `source_name` of `source` into the bitmap `name`. `source` is this disk,
    /// or a disk that does not change during the call.
    ///
    /// # Errors
    /// As [`change`](Self::change); `InvalidInput` for disks of different sizes; `Unsupported` if a
    /// bitmap in memory would be merged into an image's bitmap, or if one of the bitmaps is in
    /// memory and the disks differ.
    pub async fn merge(&self, name: &str, source: &Disk<S>, source_name: &str) -> Result<Pause> {
        let is_in_memory = self.is_transient(name) || source.bitmaps().is_transient(source_name);
        if is_in_memory && std::ptr::eq(self.disk, source) {
            let (name, source) = (name.to_owned(), source_name.to_owned());
            return self.change_at_once(BitmapChange::Merge { name, source }).await;
        }
        if is_in_memory {
            return Err(self.refuse_merge(name, source_name, "they are of two disks"));
        }
        let source = source.format().bitmaps()?;
        self.while_quiesced(async |bitmaps| rare(bitmaps.merge(name, &source, source_name)).await)
            .await
    }

    fn refuse_merge(&self, name: &str, source: &str, why: &str) -> Error {
        let what = format!("the bitmap {source:?} cannot be merged into {name:?}: {why}");
        Error::new(ErrorKind::Unsupported, what)
            .on(self.disk.name())
            .hint("merge both into a third one in memory")
    }

    /// Makes one change as [`change_bitmaps`] does.
    async fn change_at_once(&self, change: BitmapChange) -> Result<Pause> {
        let changes = [change];
        self.prepare(&changes).await?;
        let began = Instant::now();
        let quiesced = self.disk.quiesced().await?;
        change_bitmaps(&[(&quiesced, &changes[..])]).await?;
        Ok(Pause { length: began.elapsed() })
    }

    /// Prepares a call of [`change_bitmaps`]. For changes of the image's bitmaps, an image that is
    /// read-only or whose format has no bitmaps is refused, and pending metadata is written, so
    /// that the changes take little time.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub async fn prepare(&self, changes: &[BitmapChange]) -> Result<()> {
        let in_memory = |name: &str| self.is_transient(name) || adds_transient(changes, name);
        let is_transient = |change: &BitmapChange| {
            !matches!(change, BitmapChange::Add(_)) && in_memory(change.name())
        };
        if changes.iter().all(is_transient) { Ok(()) } else { self.prepare_image().await }
    }

    async fn prepare_image(&self) -> Result<()> {
        self.disk.check_writable()?;
        self.disk.format().bitmaps()?;
        rare(flush_ahead(&[self.disk], SyncMode::Data)).await.map(drop)
    }

    /// Divides `changes`. Returns the changes of the image's bitmaps, and the set of bitmaps in
    /// memory after all changes. The caller has quiesced the disk.
    async fn divide(
        &self,
        changes: &[BitmapChange],
    ) -> Result<(Vec<ImageChange>, TransientBitmaps)> {
        let mut of_image: Vec<&BitmapChange> = Vec::new();
        let mut transient = self.disk.transient_bitmaps.get();
        let (size, cluster) = (self.disk.size(), self.disk.image().cluster_size());
        for change in changes {
            let is_in_memory = transient.has(change.name());
            match change {
                BitmapChange::Add(new) if is_in_memory => return Err(is_there(&new.name)),
                BitmapChange::AddTransient(new) => {
                    if self.image_has(&new.name, &of_image).await? {
                        return Err(is_there(&new.name));
                    }
                    transient
                        .add(new, size, cluster)
                        .map_err(|error| error.on(self.disk.name()))?;
                }
                BitmapChange::Change { name, action } if is_in_memory => {
                    transient.change(name, *action)?;
                }
                BitmapChange::Merge { name, source } => {
                    let from = transient.map_of(source).cloned();
                    match (from, is_in_memory) {
                        (Some(from), true) => transient.merge(name, &from)?,
                        (Some(_), false) => {
                            return Err(self.refuse_merge(name, source, "that one is stored"));
                        }
                        (None, true) if of_image.iter().any(|other| other.name() == source) => {
                            let why = "it changes at the same moment";
                            return Err(self.refuse_merge(name, source, why));
                        }
                        (None, true) => {
                            let least = DirtyMap::min_granularity(size, MAX_COPY);
                            transient.merge(name, &self.copy(source, least).await?)?;
                        }
                        (None, false) => of_image.push(change),
                    }
                }
                BitmapChange::MergeChanges { name, changes } if is_in_memory => {
                    transient.merge(name, changes)?;
                }
                BitmapChange::MergeChanges { name, .. } => {
                    return Err(self.refuse_merge(name, "of another disk", "that one is stored"));
                }
                change => of_image.push(change),
            }
        }
        Ok((of_image.into_iter().filter_map(of_an_image).collect(), transient))
    }

    /// Whether the image has a bitmap of this name after `changes`.
    async fn image_has(&self, name: &str, changes: &[&BitmapChange]) -> Result<bool> {
        if let Some(last) = changes.iter().rev().find(|change| change.name() == name) {
            let removes = BitmapAction::Remove;
            let is_removed =
                matches!(last, BitmapChange::Change { action, .. } if *action == removes);
            return Ok(!is_removed);
        }
        match self.disk.format().bitmaps() {
            Ok(bitmaps) => Ok(bitmaps.list().await?.iter().any(|bitmap| bitmap.name == name)),
            // The format has no bitmaps.
            Err(_) => Ok(false),
        }
    }

    /// Runs a change of the image's bitmaps while the disk is quiesced.
    async fn while_quiesced(
        &self,
        change: impl AsyncFnOnce(&Bitmaps<'_, FlushTracker<S>>) -> Result<()>,
    ) -> Result<Pause> {
        self.prepare_image().await?;
        let began = Instant::now();
        let _quiesced = self.disk.quiesce().await?;
        // The image may have become read-only or been replaced since the first check.
        self.disk.check_writable()?;
        change(&self.disk.format().bitmaps()?).await?;
        Ok(Pause { length: began.elapsed() })
    }
}

/// Changes the bitmaps of quiesced disks durably: either all changes are made, or none.
///
/// # Errors
/// The error of the first change that fails; then no change is made. The exception: if the last
/// write to one of several images fails, changes of the other images may have been made, and the
/// error says so.
pub async fn change_bitmaps<S: Storage>(
    all: &[(&QuiescedDisk<'_, S>, &[BitmapChange])],
) -> Result<()> {
    let meeting = Meeting { of: all.len(), ..Meeting::default() };
    let change = async |(disk, changes): &(&QuiescedDisk<'_, S>, &[BitmapChange])| {
        let made = async {
            let disk = disk.disk();
            let (of_image, transient) = disk.bitmaps().divide(changes).await?;
            if of_image.is_empty() {
                meeting.arrive().await?
            } else {
                // The image may have become read-only or been replaced since the first check.
                disk.check_writable()?;
                let bitmaps = disk.format().bitmaps()?;
                bitmaps.change_all(&of_image, async || meeting.arrive().await).await?;
            }
            disk.transient_bitmaps.set(transient, &disk.observers);
            Ok(())
        };
        if let Err(error) = made.await {
            meeting.fail(error);
        }
    };
    rare(join_all(all.iter().map(change))).await;
    let (failed, error) = (meeting.failed.into_inner(), meeting.error.into_inner());
    match error {
        None => Ok(()),
        Some(error) if failed < all.len() && all.len() > 1 => {
            Err(error.hint("bitmaps of the other disks were changed: list them"))
        }
        Some(error) => Err(error),
    }
}

/// Whether one of these changes adds a bitmap of this name in memory.
fn adds_transient(changes: &[BitmapChange], name: &str) -> bool {
    changes.iter().any(|change| match change {
        BitmapChange::AddTransient(new) => new.name == name,
        _ => false,
    })
}

/// The change of an image's bitmap; `None` for a change of a bitmap in memory.
fn of_an_image(change: &BitmapChange) -> Option<ImageChange> {
    Some(match change.clone() {
        BitmapChange::Add(new) => ImageChange::Add(new),
        BitmapChange::AddTransient(_) | BitmapChange::MergeChanges { .. } => return None,
        BitmapChange::Change { name, action } => ImageChange::Change { name, action },
        BitmapChange::Merge { name, source } => ImageChange::Merge { name, source },
    })
}

/// A barrier: the changes of several images wait here for each other before they take effect.
#[derive(Default)]
struct Meeting {
    of: usize,
    arrived: AtomicUsize,
    failed: AtomicUsize,
    error: Mutex<Option<Error>>,
    changed: Condvar,
}

impl Meeting {
    /// Waits until the changes of all images have arrived.
    ///
    /// # Errors
    /// The change of another image has failed.
    async fn arrive(&self) -> Result<()> {
        self.arrived.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_all();
        let outcome = || {
            if self.failed.load(Ordering::SeqCst) > 0 {
                // The caller gets the error of the change that failed.
                return Some(Err(Error::new(ErrorKind::Io, "another disk's change failed")));
            }
            (self.arrived.load(Ordering::SeqCst) == self.of).then_some(Ok(()))
        };
        self.changed.wait_until(outcome).await
    }

    fn fail(&self, error: Error) {
        self.failed.fetch_add(1, Ordering::SeqCst);
        self.error.lock().get_or_insert(error);
        self.changed.notify_all();
    }
}
