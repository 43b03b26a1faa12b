//! Persistent dirty bitmaps of an image: the interface of the formats that have them.

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

use crate::qcow2::{BitmapLossObserver, Voucher};
use crate::{
    Bitmap, BitmapAction, BitmapChange, BitmapExtent, Format, InheritedBits, NewBitmap, Qcow2,
};

impl<S: Storage> Format<S> {
    /// Whether the image, open for writing, has persistent bitmaps that are in step with the disk.
    pub fn has_bitmaps(&self) -> bool {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => false,
            Self::Qcow2(image) => image.has_bitmaps(),
        }
    }

    /// Has a sidecar note a voucher before the first change of a session, which `vouch` gives: the
    /// file is this process's alone, and it calls [`renew_voucher`](Self::renew_voucher) in
    /// time. Nothing becomes of other images.
    pub fn vouch_by(&self, vouch: fn() -> Option<Voucher>) {
        if let Self::Qcow2(image) = self
            && image.is_sidecar()
        {
            image.vouch_by(vouch);
        }
    }

    /// Has `observer` told of each bitmap that has to be given up from now on, because a change
    /// could not be recorded in it. Only the first observer of an image is.
    pub fn observe_bitmap_losses(&self, observer: BitmapLossObserver) {
        if let Self::Qcow2(image) = self {
            image.observe_bitmap_losses(observer);
        }
    }

    /// Notes a new voucher durably, where a session goes on in which one was noted.
    ///
    /// # Errors
    /// What the storage answers.
    pub async fn renew_voucher(&self) -> Result<()> {
        match self {
            Self::Qcow2(image) => image.renew_voucher().await,
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok(()),
        }
    }

    /// As [`Qcow2::bitmap_excess`]; 0 for a format without bitmaps.
    pub fn bitmap_excess(&self) -> u64 {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => 0,
            Self::Qcow2(image) => image.bitmap_excess(),
        }
    }

    /// The image's persistent bitmaps.
    ///
    /// # Errors
    /// `Unsupported` for a format without bitmaps.
    pub fn bitmaps(&self) -> Result<Bitmaps<'_, S>> {
        match self {
            Self::Qcow2(image) => Ok(Bitmaps { image }),
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => {
                let what = format!("a {} image has no bitmaps", self.name());
                let hint = match self {
                    Self::Raw(_) => {
                        "'bitmap add' gives a raw file a place for them, --bitmaps FILE any raw volume"
                    }
                    _ => "bitmaps need a qcow2 image or a raw file",
                };
                let error = Error::new(ErrorKind::Unsupported, what).on(self.storage().name());
                Err(error.hint(hint))
            }
        }
    }
}

/// The persistent bitmaps of an image. Changes are durable when they return, and happen as a whole
/// or not at all. The caller keeps changes of the guest's data away while one is made.
pub struct Bitmaps<'a, S: Storage> {
    image: &'a Qcow2<S>,
}

impl<S: Storage> Bitmaps<'_, S> {
    /// All bitmaps, in the order in which they were added.
    ///
    /// # Errors
    /// As [`Qcow2::bitmaps`].
    pub async fn list(&self) -> Result<Vec<Bitmap>> {
        self.image.bitmaps().await
    }

    /// The bitmap's record of a range.
    ///
    /// # Errors
    /// As [`Qcow2::bitmap_extents`].
    pub async fn extents(
        &self,
        name: &str,
        range: ByteRange,
        max: usize,
    ) -> Result<Vec<BitmapExtent>> {
        self.image.bitmap_extents(name, range, max).await
    }

    /// Has the enabled bitmaps say that `range` changes, durably.
    ///
    /// # Errors
    /// As [`Qcow2::record_change`].
    pub async fn record(&self, range: ByteRange) -> Result<()> {
        self.image.record_change(range).await
    }

    /// Adds a bitmap without any change in it.
    ///
    /// # Errors
    /// As [`Qcow2::add_bitmap`].
    pub async fn add(&self, new: &NewBitmap) -> Result<()> {
        self.image.add_bitmap(new).await
    }

    /// Changes a bitmap.
    ///
    /// # Errors
    /// As [`Qcow2::change_bitmap`].
    pub async fn change(&self, name: &str, action: BitmapAction) -> Result<()> {
        self.image.change_bitmap(name, action).await
    }

    /// Makes changes of bitmaps, all of them or none.
    ///
    /// # Errors
    /// As [`Qcow2::change_bitmaps`].
    pub async fn change_all(
        &self,
        changes: &[BitmapChange],
        prepared: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        self.image.change_bitmaps(changes, prepared).await
    }

    /// Adds what a bitmap of `source` has recorded to another one.
    ///
    /// # Errors
    /// As [`Qcow2::merge_bitmap`].
    pub async fn merge(
        &self,
        name: &str,
        source: &Bitmaps<'_, S>,
        source_name: &str,
    ) -> Result<()> {
        self.image.merge_bitmap(name, source.image, source_name).await
    }

    /// Has bitmaps of `source` go on in this image.
    ///
    /// # Errors
    /// As [`Qcow2::inherit_bitmaps`].
    pub async fn inherit(
        &self,
        source: &Bitmaps<'_, S>,
        names: &[String],
        bits: InheritedBits<'_>,
    ) -> Result<()> {
        self.image.inherit_bitmaps(source.image, names, bits).await
    }
}
