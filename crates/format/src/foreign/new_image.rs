//! New images of other programs' formats, filled once from a disk and never changed here again.
//!
//! Guarantees: nothing is read of the file, which is empty at first, so what was not written of a
//! block is a hole of the file and reads as zeros. The tables are in memory until
//! [`finish`](NewForeign::finish): four bytes for each block of the disk that has data or is near
//! one. A file that was not finished has no header, and no program takes it for an image.

use blockhouse_core::Result;

use super::ForeignKind;
use super::fields::SECTOR;
use super::new_parts::{FilePiece, FilePieces, NewForeignOptions, Subformat, refuse};
use super::vdi::NewVdi;
use super::vhdx::NewVhdx;
use super::vmdk::{NewSparse, NewStream};
use super::vpc::NewVpc;

/// An image while it is filled.
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
    /// An image without data. Of a split one it is one of the files that its descriptor names.
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

    /// Bytes that are appended together, where the image is a stream: multiples of them in the
    /// order of the disk.
    pub fn stream_unit(&self) -> Option<u64> {
        match self {
            Self::Stream(_) => Some(NewStream::GRAIN),
            Self::Vdi(_) | Self::Vpc(_) | Self::Vhdx(_) | Self::Vmdk(_) => None,
        }
    }

    /// Bytes that are written together, where the image has a parent: multiples of them, because a
    /// grain that has a place has nothing of the parent.
    pub fn overlay_unit(&self) -> Option<u64> {
        match self {
            Self::Vmdk(image) => image.overlay_unit(),
            Self::Vdi(_) | Self::Vpc(_) | Self::Vhdx(_) | Self::Stream(_) => None,
        }
    }

    /// The place in the file for the disk's bytes from `at` on, and for how many it holds. It is
    /// the same whenever it is asked for.
    ///
    /// # Errors
    /// ENOMEM; ENOSPC where the file becomes longer than the format allows.
    ///
    /// # Panics
    /// Where the image is a stream.
    pub fn place(&mut self, at: u64) -> Result<(u64, u64)> {
        match self {
            Self::Vdi(image) => image.place(at),
            Self::Vpc(image) => image.place(at),
            Self::Vhdx(image) => image.place(at),
            Self::Vmdk(image) => image.place(at),
            Self::Stream(_) => unreachable!("a stream has no places"),
        }
    }

    /// The bytes to append to the file for the disk's bytes from `at` on, one
    /// [unit](Self::stream_unit) or, at the end of the disk, less.
    ///
    /// # Errors
    /// `InvalidInput` where the order of the disk is not kept, or the file becomes too long.
    ///
    /// # Panics
    /// Where the image is no stream.
    pub fn append(&mut self, at: u64, bytes: &[u8]) -> Result<FilePiece> {
        match self {
            Self::Stream(image) => image.append(at, bytes),
            Self::Vdi(_) | Self::Vpc(_) | Self::Vhdx(_) | Self::Vmdk(_) => {
                unreachable!("only a stream is appended to")
            }
        }
    }

    /// The remaining writes, and the length that the file gets afterwards.
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
