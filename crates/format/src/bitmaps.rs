//! Persistent dirty bitmaps of a qcow2 image, which may be the side file of a raw image.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::{Bitmaps, Flat, Format, Qcow2};

impl<S: Storage> Format<S> {
    /// Whether the image, open for writing, has persistent bitmaps consistent with the disk.
    pub fn has_bitmaps(&self) -> bool {
        self.qcow2().is_some_and(|qcow2| qcow2.bitmaps().has_any())
    }

    /// The image's persistent bitmaps.
    ///
    /// # Errors
    /// `Unsupported` for a format without bitmaps.
    pub fn bitmaps(&self) -> Result<Bitmaps<'_, S>> {
        self.qcow2().map(Qcow2::bitmaps).ok_or_else(|| {
            let what = format!("a {} image has no bitmaps", self.name());
            let hint = match self {
                Self::Flat(Flat::Raw(_)) => {
                    "'bitmap add' gives a raw file a place for them, --bitmaps FILE any raw volume"
                }
                _ => "bitmaps need a qcow2 image or a raw file",
            };
            Error::new(ErrorKind::Unsupported, what).on(self.storage().name()).hint(hint)
        })
    }
}
