//! Images whose mapping does not change when the disk is written, because every byte has a fixed
//! host offset, or because the image is only read.
//!
//! [`Raw`] is the disk byte for byte; its bitmaps are in a [`SideFile`]. The I/O path decrypts the
//! disk of a [`Luks`] container. [`Foreign`] images are those of other programs.

mod raw;
mod side_file;

use blockhouse_core::{
    ByteRange, Error, ErrorKind, Extent, ExtentFlags, ExtentState, Result, Storage, SyncMode, rare,
};

pub use raw::Raw;
pub use side_file::SideFile;

use crate::{Foreign, Intent, Luks, Qcow2};

/// An image whose mapping does not change when the disk is written. See the module's comment.
pub enum Flat<S: Storage> {
    /// The image is the disk, byte for byte.
    Raw(Raw<S>),
    /// The image is the disk, and a side file has its bitmaps.
    WithSideFile(SideFile<S>),
    /// The encrypted disk follows a header.
    Luks(Box<Luks<S>>),
    /// An image of another program, for reading only.
    Foreign(Box<Foreign<S>>),
}

impl<S: Storage> Flat<S> {
    /// The name of the format of [`storage`](Self::storage): `qcow2` for a raw image with a side
    /// file.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Raw(_) => "raw",
            Self::WithSideFile(_) => "qcow2",
            Self::Luks(_) => "luks",
            Self::Foreign(foreign) => foreign.kind().as_str(),
        }
    }

    /// The size of the disk in bytes, a multiple of 512.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.size(),
            Self::WithSideFile(side_file) => side_file.image().size(),
            Self::Luks(luks) => luks.size(),
            Self::Foreign(foreign) => foreign.size(),
        }
    }

    /// The file that was opened: for a raw image with a side file, the side file.
    pub(crate) fn storage(&self) -> &S {
        match self {
            Self::Raw(raw) => raw.storage(),
            Self::WithSideFile(side_file) => side_file.image().storage(),
            Self::Luks(luks) => luks.storage(),
            Self::Foreign(foreign) => foreign.storage(),
        }
    }

    /// The file that host offsets point to.
    pub(crate) fn data(&self) -> &S {
        match self {
            Self::WithSideFile(side_file) => side_file.image().data(),
            Self::Foreign(foreign) => foreign.data(),
            Self::Raw(_) | Self::Luks(_) => self.storage(),
        }
    }

    /// The side file of a raw image.
    pub(crate) fn side_file(&self) -> Option<&SideFile<S>> {
        if let Self::WithSideFile(side_file) = self { Some(side_file) } else { None }
    }

    /// The metadata of the side file.
    pub(crate) fn qcow2(&self) -> Option<&Qcow2<S>> {
        self.side_file().map(SideFile::image)
    }

    /// As [`Format::map`](crate::Format::map).
    pub(crate) async fn map(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        match self {
            Self::Raw(raw) => Ok(raw.map(range, intent)),
            Self::WithSideFile(side_file) => side_file.map(range, intent).await,
            Self::Luks(luks) => Ok(luks.map(range)),
            Self::Foreign(foreign) => foreign.map(range, intent).await,
        }
    }

    /// Does nothing for an extent that was written, because its data is visible without a link.
    pub(crate) fn link(&self) -> Result<()> {
        match self {
            Self::Raw(_) | Self::WithSideFile(_) | Self::Luks(_) => Ok(()),
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// As [`Format::flush`](crate::Format::flush).
    pub(crate) async fn flush(&self, sync: SyncMode) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Luks(_) => self.storage().flush(sync).await,
            Self::WithSideFile(side_file) => side_file.image().flush(sync).await,
            Self::Foreign(_) => Ok(()),
        }
    }

    /// As [`SizeChange::grow`](crate::SizeChange::grow), but the new size may also be smaller,
    /// except for a raw image with a side file.
    pub(crate) async fn resize(&self, size: u64) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.resize(size).await,
            Self::WithSideFile(side_file) => rare(side_file.image().size_change().grow(size)).await,
            Self::Luks(luks) => luks.resize(size).await,
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// As [`SizeChange::shrink`](crate::SizeChange::shrink).
    pub(crate) async fn shrink(&self, size: u64) -> Result<()> {
        match self.qcow2() {
            Some(qcow2) => rare(qcow2.size_change().shrink(size)).await,
            None => self.resize(size).await,
        }
    }

    /// As [`Format::close`](crate::Format::close).
    pub(crate) async fn close(&self) -> Result<()> {
        match self.qcow2() {
            Some(qcow2) => rare(qcow2.close()).await,
            None => self.flush(SyncMode::Data).await,
        }
    }

    /// The error for a property that only images with metadata have.
    pub(crate) fn lacks(&self, what: &str) -> Error {
        let what = match self {
            Self::Raw(_) | Self::WithSideFile(_) => format!("raw images have no {what}"),
            Self::Luks(_) => format!("a LUKS container has no {what}"),
            Self::Foreign(foreign) => return foreign.read_only(),
        };
        Error::new(ErrorKind::Unsupported, what).on(self.storage().name())
    }
}

/// The extent of a range whose host offset equals its guest offset.
fn extent_at_own_offset(range: ByteRange) -> Extent {
    let state = ExtentState::Mapped { host: range.offset() };
    Extent { guest: range, alloc_range: range, state, flags: ExtentFlags::empty() }
}
