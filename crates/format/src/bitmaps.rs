//! Persistent dirty bitmaps of an image: the interface of the formats that have them.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::{Bitmap, BitmapAction, Format, NewBitmap, Qcow2};

impl<S: Storage> Format<S> {
    /// The image's persistent bitmaps.
    ///
    /// # Errors
    /// `Unsupported` for a format without bitmaps.
    pub fn bitmaps(&self) -> Result<Bitmaps<'_, S>> {
        match self {
            Self::Qcow2(image) => Ok(Bitmaps { image }),
            Self::Raw(_) | Self::Foreign(_) => {
                let what = format!("a {} image has no bitmaps", self.name());
                Err(Error::new(ErrorKind::Unsupported, what)
                    .on(self.storage().name())
                    .hint("bitmaps need a qcow2 image"))
            }
        }
    }
}

/// The persistent bitmaps of an image. Changes are durable when they return, and happen as a whole or not at all.
/// The caller keeps changes of the guest's data away while one is made.
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
}
