//! Dirty bitmaps in memory. They belong to the disk, not to its image, and end with the disk.
//!
//! Guarantees: an enabled bitmap has every change that began while the bitmap was enabled, also if
//! the change failed, and also if another image has replaced the disk's image. A command never
//! modifies a bitmap in place: the command makes a new set of bitmaps, which replaces the old set
//! while the disk is quiesced. So several modifications take effect together, or not at all. A
//! bitmap takes one bit of memory for each granule, at most [`MAX_BYTES`]; a disk has at most
//! [`MAX_BITMAPS`].

use std::sync::Arc;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result};
use blockhouse_format::{Bitmap, BitmapAction, NewBitmap};
use parking_lot::Mutex;

use crate::dirty_map::DirtyMap;
use crate::observers::{ChangeObserver, Observers};

/// Maximum number of bitmaps in memory of a disk.
const MAX_BITMAPS: usize = 64;
/// Maximum bytes of the bits of one bitmap.
const MAX_BYTES: u64 = 64 << 20;
/// Maximum bytes of a name, as for a bitmap of an image.
const MAX_NAME: usize = 1023;
/// Minimum number of bytes per bit.
const MIN_GRANULARITY: u64 = 512;
const MAX_GRANULARITY: u64 = 2 << 30;
/// The bounds of the default granularity, which is the cluster size.
const USUAL_GRANULARITY: [u64; 2] = [4 << 10, 64 << 10];

/// A bitmap in memory. While it is enabled, its map observes the disk's changes.
#[derive(Clone)]
pub(crate) struct TransientBitmap {
    name: String,
    is_enabled: bool,
    map: Arc<DirtyMap>,
}

/// All bitmaps in memory of a disk, in the order in which they were added.
#[derive(Clone, Default)]
pub(crate) struct TransientBitmaps {
    bitmaps: Vec<Arc<TransientBitmap>>,
}

/// The present set of a disk's bitmaps in memory.
#[derive(Default)]
pub(crate) struct SharedBitmaps(Mutex<TransientBitmaps>);

impl SharedBitmaps {
    /// A copy of the present set.
    pub(crate) fn get(&self) -> TransientBitmaps {
        self.0.lock().clone()
    }

    /// Replaces the set. The disk is quiesced, and `observers` are the disk's.
    pub(crate) fn set(&self, bitmaps: TransientBitmaps, observers: &Observers) {
        let former = std::mem::replace(&mut *self.0.lock(), bitmaps.clone());
        former.observers().for_each(|bitmap| observers.detach(&bitmap));
        bitmaps.observers().for_each(|bitmap| observers.attach(bitmap));
    }
}

impl TransientBitmap {
    fn described(&self) -> Bitmap {
        Bitmap {
            name: self.name.clone(),
            granularity: self.map.granularity(),
            is_enabled: self.is_enabled,
            is_persistent: false,
            is_in_use: false,
            is_inconsistent: false,
            lacks_since: None,
        }
    }
}

impl TransientBitmaps {
    /// Whether the set has no bitmap.
    pub(crate) fn is_empty(&self) -> bool {
        self.bitmaps.is_empty()
    }

    /// Whether the set has a bitmap of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.map_of(name).is_some()
    }

    /// The changes that the bitmap of this name has recorded.
    pub(crate) fn map_of(&self, name: &str) -> Option<&Arc<DirtyMap>> {
        self.bitmaps.iter().find(|bitmap| bitmap.name == name).map(|bitmap| &bitmap.map)
    }

    /// The descriptions of the bitmaps, for users.
    pub(crate) fn described(&self) -> impl Iterator<Item = Bitmap> {
        self.bitmaps.iter().map(|bitmap| bitmap.described())
    }

    /// The enabled bitmaps, as observers of changes.
    pub(crate) fn observers(&self) -> impl Iterator<Item = Arc<dyn ChangeObserver>> {
        let enabled = self.bitmaps.iter().filter(|bitmap| bitmap.is_enabled);
        enabled.map(|bitmap| Arc::clone(&bitmap.map) as Arc<dyn ChangeObserver>)
    }

    /// Adds a bitmap without any change in it, for a disk of `size` bytes. The caller has checked
    /// that no bitmap of the image has this name.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is taken, empty or too long, a granularity that bitmaps of
    /// images cannot have, too many bitmaps, or bits of more than [`MAX_BYTES`]; `Io` if memory is
    /// short.
    pub(crate) fn add(&mut self, new: &NewBitmap, size: u64, cluster: Option<u64>) -> Result<()> {
        let NewBitmap { name, granularity, is_enabled } = new;
        let [least, most] = USUAL_GRANULARITY;
        let granularity = granularity.unwrap_or(cluster.unwrap_or(most).clamp(least, most));
        let refuse = |what, hint| Err(Error::new(ErrorKind::InvalidInput, what).hint(hint));
        if name.is_empty() || name.len() > MAX_NAME {
            let what = format!("a bitmap's name has 1 to {MAX_NAME} bytes, not {}", name.len());
            return refuse(what, "choose another name");
        }
        if self.has(name) {
            return Err(is_there(name));
        }
        if !granularity.is_power_of_two()
            || !(MIN_GRANULARITY..=MAX_GRANULARITY).contains(&granularity)
        {
            let what = format!(
                "a bitmap's granularity is a power of two, 512 B to 2 GiB, not {granularity}"
            );
            return refuse(what, "64K suits most disks");
        }
        if granularity < DirtyMap::min_granularity(size, MAX_BYTES) {
            return Err(too_large(name, granularity));
        }
        if self.bitmaps.len() >= MAX_BITMAPS {
            let what = format!("a disk has {MAX_BITMAPS} bitmaps in memory at most");
            return refuse(what, "remove one of them first");
        }
        let map = Arc::new(DirtyMap::new(size, granularity)?);
        let (name, is_enabled) = (name.clone(), *is_enabled);
        self.bitmaps.push(Arc::new(TransientBitmap { name, is_enabled, map }));
        Ok(())
    }

    /// Changes the bitmap of this name, if there is one.
    ///
    /// # Errors
    /// `Io` if memory is short.
    pub(crate) fn change(&mut self, name: &str, action: BitmapAction) -> Result<()> {
        if action == BitmapAction::Remove {
            self.bitmaps.retain(|bitmap| bitmap.name != name);
            return Ok(());
        }
        self.replace(Some(name), |bitmap| {
            match action {
                BitmapAction::Remove | BitmapAction::Clear => {
                    bitmap.map =
                        Arc::new(DirtyMap::new(bitmap.map.size(), bitmap.map.granularity())?);
                }
                BitmapAction::Enable => bitmap.is_enabled = true,
                BitmapAction::Disable => bitmap.is_enabled = false,
            }
            Ok(())
        })
    }

    /// Adds changes to the bitmap of this name, if there is one.
    ///
    /// # Errors
    /// `Io` if memory is short.
    pub(crate) fn merge(&mut self, name: &str, changes: &DirtyMap) -> Result<()> {
        self.replace(Some(name), |bitmap| {
            let merged = copied(&bitmap.map, bitmap.map.size())?;
            mark_all_of(&merged, changes);
            bitmap.map = Arc::new(merged);
            Ok(())
        })
    }

    /// The bitmaps for another size of the disk. If the disk grows, enabled bitmaps mark the new
    /// part as changed, as bitmaps of images do.
    ///
    /// # Errors
    /// `InvalidInput` if a bitmap would take more than [`MAX_BYTES`]; `Io` if memory is short.
    pub(crate) fn resized(mut self, size: u64) -> Result<Self> {
        self.replace(None, |bitmap| {
            let old = bitmap.map.size();
            if bitmap.map.granularity() < DirtyMap::min_granularity(size, MAX_BYTES) {
                return Err(too_large(&bitmap.name, bitmap.map.granularity()));
            }
            let map = copied(&bitmap.map, size)?;
            if bitmap.is_enabled && old < size {
                map.mark(ByteRange::between(old, size));
            }
            bitmap.map = Arc::new(map);
            Ok(())
        })?;
        Ok(self)
    }

    /// Marks `range` in the enabled bitmaps, because its content has changed without a request.
    pub(crate) fn mark(&self, range: ByteRange) {
        for bitmap in self.bitmaps.iter().filter(|bitmap| bitmap.is_enabled) {
            bitmap.map.mark(range);
        }
    }

    /// Replaces the bitmap of this name, or every bitmap if `name` is `None`, by a changed copy.
    fn replace(
        &mut self,
        name: Option<&str>,
        change: impl Fn(&mut TransientBitmap) -> Result<()>,
    ) -> Result<()> {
        for bitmap in &mut self.bitmaps {
            if name.is_none_or(|name| bitmap.name == name) {
                let mut changed = TransientBitmap::clone(bitmap);
                change(&mut changed)?;
                *bitmap = Arc::new(changed);
            }
        }
        Ok(())
    }
}

/// The error for a name that is already in use by a bitmap.
pub(crate) fn is_there(name: &str) -> Error {
    let what = format!("the bitmap {name:?} is there already");
    Error::new(ErrorKind::InvalidInput, what)
        .hint("choose another name, or remove that bitmap first")
}

fn too_large(name: &str, granularity: u64) -> Error {
    let what = format!(
        "the bitmap {name:?} would take more than 64 MiB of memory with a granularity of {granularity}"
    );
    Error::new(ErrorKind::InvalidInput, what).hint("add it with a larger one")
}

/// A copy of a map, for a disk of `size` bytes.
fn copied(map: &DirtyMap, size: u64) -> Result<DirtyMap> {
    let copy = DirtyMap::new(size, map.granularity())?;
    mark_all_of(&copy, map);
    Ok(copy)
}

/// Marks in `map` the dirty granules of `other`.
fn mark_all_of(map: &DirtyMap, other: &DirtyMap) {
    let mut from = 0;
    while let Some(range) = other.next(from, u64::MAX) {
        map.mark(range);
        from = range.end();
    }
}
