//! Persistent dirty bitmaps of an open disk: which parts of it changed since a bitmap was added or
//! cleared.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use blockhouse_core::sync::Condvar;
use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage, SyncMode};
use blockhouse_format::{Bitmap, BitmapAction, BitmapChange, BitmapExtent, Bitmaps, NewBitmap};
use futures_util::future::join_all;
use parking_lot::Mutex;

use crate::dirty_map::DirtyMap;
use crate::disk::{Disk, QuiescedDisk};
use crate::durability::FlushTracker;
use crate::snapshots::Pause;

/// Extents that are looked at together, at least.
const EXTENTS: usize = 4096;

impl<S: Storage> Disk<S> {
    /// The disk's persistent bitmaps.
    pub fn bitmaps(&self) -> DiskBitmaps<'_, S> {
        DiskBitmaps { disk: self }
    }
}

/// The persistent bitmaps of an open disk. Changes are durable when they return, and happen as a
/// whole or not at all; the disk holds off other changes meanwhile.
pub struct DiskBitmaps<'a, S: Storage> {
    disk: &'a Disk<S>,
}

impl<S: Storage> DiskBitmaps<'_, S> {
    /// All bitmaps, in the order in which they were added; none where another program has changed
    /// the disk without recording its changes in them.
    ///
    /// # Errors
    /// `Unsupported` for a format without bitmaps; `Corrupt` where the directory contradicts the
    /// format.
    pub async fn list(&self) -> Result<Vec<Bitmap>> {
        self.disk.begin_use().format().bitmaps()?.list().await
    }

    /// The records of the bitmap of this name for `range`: extents that follow each other, `max` at
    /// least unless there are fewer. An enabled bitmap of a disk that is open for writing says
    /// what was recorded up to now.
    ///
    /// # Errors
    /// `InvalidInput` where there is no such bitmap, where it is inconsistent, or where the range
    /// is past the end; or as [`list`](Self::list).
    pub async fn extents(
        &self,
        name: &str,
        range: ByteRange,
        max: usize,
    ) -> Result<Vec<BitmapExtent>> {
        self.disk.image().check_inside(range)?;
        self.disk.begin_use().format().bitmaps()?.extents(name, range, max).await
    }

    /// How many bytes the bitmap of this name says to have changed, in whole granules but for the
    /// end of the disk.
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

    /// A copy of the bitmap of this name in memory, with granules of `min_granularity` bytes, a
    /// power of two, where it is finer. Of one that changes: all changes that were made before,
    /// and perhaps later ones.
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
    /// As [`Bitmaps::add`]; `ReadOnly`; `Unsupported`
    /// for a format without bitmaps. Nothing has changed then.
    pub async fn add(&self, new: &NewBitmap) -> Result<Pause> {
        self.while_quiesced(async |bitmaps| bitmaps.add(new).await).await
    }

    /// Changes the bitmap of this name.
    ///
    /// # Errors
    /// As [`add`](Self::add); `InvalidInput` where no bitmap has this name, or where it is
    /// inconsistent and `action` does not remove it.
    pub async fn change(&self, name: &str, action: BitmapAction) -> Result<Pause> {
        self.while_quiesced(async |bitmaps| bitmaps.change(name, action).await).await
    }

    /// Adds what the bitmap `source_name` of `source` has recorded to the bitmap `name`. `source`
    /// is this disk, or one that nothing changes meanwhile.
    ///
    /// # Errors
    /// As [`change`](Self::change); `InvalidInput` for disks of different sizes.
    pub async fn merge(&self, name: &str, source: &Disk<S>, source_name: &str) -> Result<Pause> {
        let source = source.format().bitmaps()?;
        self.while_quiesced(async |bitmaps| bitmaps.merge(name, &source, source_name).await).await
    }

    /// Refuses a disk without bitmaps that can be changed, and writes what waits, so that a change
    /// of them is quick. Before [`change_bitmaps`].
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub async fn prepare(&self) -> Result<()> {
        self.disk.check_access(0)?;
        self.disk.format().bitmaps()?;
        self.disk.begin_use().format().flush(SyncMode::Data).await
    }

    /// Runs a change of the bitmaps while the guest's changes are held off.
    async fn while_quiesced(
        &self,
        change: impl AsyncFnOnce(&Bitmaps<'_, FlushTracker<S>>) -> Result<()>,
    ) -> Result<Pause> {
        self.prepare().await?;
        let began = Instant::now();
        let _quiesced = self.disk.quiesce().await?;
        // It may have become read-only meanwhile, or another image have taken the place of this
        // one.
        self.disk.check_access(0)?;
        change(&self.disk.format().bitmaps()?).await?;
        Ok(Pause { length: began.elapsed() })
    }
}

/// Changes the bitmaps of disks whose changes are held off: all of them, or none, durably.
///
/// # Errors
/// That of the first change that cannot be made: then none is. What a storage answers to the last
/// write of one of several images: those of the others may be made then, which the error says.
pub async fn change_bitmaps<S: Storage>(
    all: &[(&QuiescedDisk<'_, S>, &[BitmapChange])],
) -> Result<()> {
    let meeting = Meeting { of: all.len(), ..Meeting::default() };
    let change = async |(disk, changes): &(&QuiescedDisk<'_, S>, &[BitmapChange])| {
        let made = async {
            // It may have become read-only meanwhile, or another image have taken the place of this
            // one.
            disk.disk().check_access(0)?;
            let bitmaps = disk.disk().format().bitmaps()?;
            bitmaps.change_all(changes, async || meeting.arrive().await).await
        };
        if let Err(error) = made.await {
            meeting.fail(error);
        }
    };
    join_all(all.iter().map(change)).await;
    let (failed, error) = (meeting.failed.into_inner(), meeting.error.into_inner());
    match error {
        None => Ok(()),
        Some(error) if failed < all.len() && all.len() > 1 => {
            Err(error.hint("bitmaps of the other disks were changed: list them"))
        }
        Some(error) => Err(error),
    }
}

/// Where the changes of several images wait for each other before they become effective.
#[derive(Default)]
struct Meeting {
    of: usize,
    arrived: AtomicUsize,
    failed: AtomicUsize,
    error: Mutex<Option<Error>>,
    changed: Condvar,
}

impl Meeting {
    /// Waits until all have arrived.
    ///
    /// # Errors
    /// One of them has failed.
    async fn arrive(&self) -> Result<()> {
        self.arrived.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_all();
        let outcome = || {
            if self.failed.load(Ordering::SeqCst) > 0 {
                // That of the one that has failed is the answer.
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
