//! New images of other programs' formats, filled once from a disk and never changed again by this
//! program.
//!
//! Guarantees: the file is empty at first and is never read, so the unwritten parts of a block are
//! holes of the file and read as zeros. The tables are in memory until
//! [`finish`](NewForeign::finish): four bytes for each block of the disk that has data or is near
//! such a block. An unfinished file has no header, so no program takes it for an image.

use blockhouse_core::Result;

use super::ForeignKind;
use super::fields::SECTOR;
use super::new_parts::{FilePiece, FilePieces, NewForeignOptions, Subformat, refuse};
use super::vdi::NewVdi;
use super::vhdx::NewVhdx;
use super::vmdk::{NewSparse, NewStream};
use super::vpc::NewVpc;

/// An image that is being filled.
pub enum NewForeign {
    /// VirtualBox.
    Vdi(NewVdi),
    /// VHD.
    Vpc(NewVpc),
    /// Hyper-V's newer format.
    Vhdx(NewVhdx),
    /// VMware, a file with tables.
    Vmdk(NewSparse),
    /// VMware, a stream.
    Stream(NewStream),
}

impl NewForeign {
    /// An image without data. For a split image, this is one of the files that its descriptor
    /// names.
    ///
    /// # Errors
    /// `InvalidInput` for a disk, or options, that the format cannot have.
    pub fn new(kind: ForeignKind, options: &NewForeignOptions) -> Result<Self> {
        let is_stream = options.subformat == Subformat::Stream;
        if is_stream && kind != ForeignKind::Vmdk {
            return Err(refuse("streams are VMDK images"));
        }
        if kind == ForeignKind::Vmdk && options.subformat == Subformat::Fixed {
            return Err(refuse("a flat extent of a VMDK image is a raw file"));
        }
        if options.is_split && (kind != ForeignKind::Vmdk || is_stream) {
            return Err(refuse("only VMDK images that are no streams are made of several files"));
        }
        if options.parent.is_some() && (kind != ForeignKind::Vmdk || is_stream) {
            return Err(refuse("only VMDK images that are no streams are made with a parent"));
        }
        if kind != ForeignKind::Vhdx && options.sector_size != SECTOR as u32 {
            return Err(refuse("the format cannot state the size of the disk's sectors"));
        }
        Ok(match kind {
            ForeignKind::Vdi => Self::Vdi(NewVdi::new(options)?),
            ForeignKind::Vpc => Self::Vpc(NewVpc::new(options)?),
            ForeignKind::Vhdx => Self::Vhdx(NewVhdx::new(options)?),
            ForeignKind::Vmdk if is_stream => Self::Stream(NewStream::new(options)?),
            ForeignKind::Vmdk => Self::Vmdk(NewSparse::new(options)?),
        })
    }

    /// For a stream: the unit in which data is appended, in bytes. Units are appended in the order
    /// of the disk.
    pub fn stream_unit(&self) -> Option<u64> {
        match self {
            Self::Stream(_) => Some(NewStream::GRAIN),
            Self::Vdi(_) | Self::Vpc(_) | Self::Vhdx(_) | Self::Vmdk(_) => None,
        }
    }

    /// For an image with a parent: the unit in which data is written, in bytes. Reason: an
    /// allocated grain hides all data of the parent in its range.
    pub fn overlay_unit(&self) -> Option<u64> {
        match self {
            Self::Vmdk(image) => image.overlay_unit(),
            Self::Vdi(_) | Self::Vpc(_) | Self::Vhdx(_) | Self::Stream(_) => None,
        }
    }

    /// The offset in the file for the disk's bytes from `at` on, and the number of bytes that are
    /// contiguous from there. Allocates the block at the first call for it; later calls return the
    /// same offset.
    ///
    /// # Errors
    /// ENOMEM; ENOSPC if the file would become longer than the format allows.
    ///
    /// # Panics
    /// If the image is a stream.
    pub fn place(&mut self, at: u64) -> Result<(u64, u64)> {
        match self {
            Self::Vdi(image) => image.place(at),
            Self::Vpc(image) => image.place(at),
            Self::Vhdx(image) => image.place(at),
            Self::Vmdk(image) => image.place(at),
            Self::Stream(_) => unreachable!("a stream has no places"),
        }
    }

    /// The bytes to append to the file for the disk's bytes from `at` on: one
    /// [unit](Self::stream_unit), or less at the end of the disk.
    ///
    /// # Errors
    /// `InvalidInput` if the calls are not in the order of the disk, or the file becomes too long.
    ///
    /// # Panics
    /// If the image is not a stream.
    pub fn append(&mut self, at: u64, bytes: &[u8]) -> Result<FilePiece> {
        match self {
            Self::Stream(image) => image.append(at, bytes),
            Self::Vdi(_) | Self::Vpc(_) | Self::Vhdx(_) | Self::Vmdk(_) => {
                unreachable!("only a stream is appended to")
            }
        }
    }

    /// The remaining writes, and the length to which the file must be set afterwards.
    pub fn finish(self) -> (FilePieces, u64) {
        match self {
            Self::Vdi(image) => image.finish(),
            Self::Vpc(image) => image.finish(),
            Self::Vhdx(image) => image.finish(),
            Self::Vmdk(image) => image.finish(),
            Self::Stream(image) => image.finish(),
        }
    }
}
