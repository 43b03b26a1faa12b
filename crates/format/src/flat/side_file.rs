//! The side file of a raw image: a qcow2 image that has the raw image's bitmaps, and no data.
//!
//! The raw image is the data file of that qcow2 image (`data_file_raw`), whose tables exist for
//! other programs. Here each guest offset is its host offset, so a change of the disk does not
//! change the tables. The change is recorded in the bitmaps, then written to the raw image.

use blockhouse_core::{ByteRange, Extent, Result, Storage};

use super::extent_at_own_offset;
use crate::{Bitmaps, Intent, Qcow2};

/// The side file of a raw image. See the module's comment.
pub struct SideFile<S: Storage> {
    image: Box<Qcow2<S>>,
}

impl<S: Storage> SideFile<S> {
    /// Takes a qcow2 image as the side file of its data file; `Err` returns the image if it is not
    /// a side file.
    pub(crate) fn new(image: Box<Qcow2<S>>) -> Result<Self, Box<Qcow2<S>>> {
        let is_alone = image.facts().has_raw_disk() && image.facts().backing.is_none();
        if is_alone && image.header().data_file_mark().is_some() {
            Ok(Self { image })
        } else {
            Err(image)
        }
    }

    /// The image that has the bitmaps.
    pub(crate) fn image(&self) -> &Qcow2<S> {
        &self.image
    }

    /// As [`Format::map`](crate::Format::map), also past the end of the disk.
    pub(crate) async fn map(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        let range = match intent {
            Intent::Read => range,
            Intent::Write | Intent::Zero(_) | Intent::Discard => {
                self.image.begin_change(range).await?
            }
        };
        Ok(extent_at_own_offset(range))
    }

    /// As [`Format::map_same_content`](crate::Format::map_same_content).
    pub(crate) async fn map_same_content(&self, range: ByteRange) -> Result<Extent> {
        self.image.begin_unrecorded_change().await?;
        Ok(extent_at_own_offset(range))
    }

    /// The raw image's bitmaps.
    pub fn bitmaps(&self) -> Bitmaps<'_, S> {
        self.image.bitmaps()
    }

    /// Whether the raw image is longer than the disk, because a process died while it changed the
    /// size.
    pub fn is_shorter_than_data(&self) -> bool {
        self.image.data().size() > self.image.size()
    }

    /// Truncates the raw image at the end of the disk.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn cut_data(&self) -> Result<()> {
        self.image.data().resize(self.image.size()).await
    }
}
