//! Images in every state that a durable write may meet.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FallocateFlags, fallocate};

use super::direct::{STRIDE, WRITES};
use super::system::tool;

/// Bytes in an image: a half for all counted writes, and the half from [`TABLES`] on.
pub const SIZE: u64 = 2 * WRITES * STRIDE;
/// The offset of the second half, which no counted write of data goes to.
pub const TABLES: u64 = SIZE / 2;

/// Makes an image of this format in `folder`, with `size` bytes of written space, like one that has
/// been in use: each read of it reads the disk below.
pub fn make_written(folder: &Path, format: &str, size: u64) -> Result<PathBuf> {
    let image = folder.join(format!("image.{format}"));
    let name = image.to_str().context("a folder without a name")?;
    let size = size.to_string();
    tool("blockhouse", &["create", "-f", format, "-o", "preallocation=full", name, &size])?;
    Ok(image)
}

/// The state of the space that a write goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// A raw image that was written before.
    RawWritten,
    /// A raw image in unwritten extents (`fallocate`).
    RawUnwritten,
    /// A raw image that is one hole.
    RawHole,
    /// A raw image whose second half was written before; there the bare kernel writes metadata.
    RawHoleAndTables,
    /// A qcow2 image whose clusters were written before, like one of `preallocation=full`.
    Qcow2Written,
    /// A qcow2 image whose clusters are mapped, in unwritten extents: `preallocation=falloc`.
    Qcow2Unwritten,
    /// A qcow2 image whose clusters are yet to be allocated.
    Qcow2New,
}

impl State {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::RawWritten => "raw, written",
            Self::RawUnwritten => "raw, unwritten extents",
            Self::RawHole => "raw, hole",
            Self::RawHoleAndTables => "raw, hole and tables",
            Self::Qcow2Written => "qcow2, written",
            Self::Qcow2Unwritten => "qcow2, falloc",
            Self::Qcow2New => "qcow2, allocating",
        }
    }

    /// The state of the raw image on which the bare kernel does the same.
    pub fn bare(self) -> Self {
        match self {
            Self::RawWritten | Self::Qcow2Written => Self::RawWritten,
            Self::RawUnwritten | Self::Qcow2Unwritten => Self::RawUnwritten,
            Self::RawHole => Self::RawHole,
            Self::Qcow2New | Self::RawHoleAndTables => Self::RawHoleAndTables,
        }
    }

    /// Makes an image in this state, named after it and `purpose`, in `folder`.
    pub fn make(self, folder: &Path, purpose: &str) -> Result<PathBuf> {
        let path = folder.join(format!("{purpose}-{self:?}"));
        let name = path.to_str().context("a folder without a name")?;
        let size = SIZE.to_string();
        match self {
            Self::RawWritten => fill(&File::create(&path)?, 0..SIZE)?,
            Self::RawHoleAndTables => fill(&File::create(&path)?, TABLES..SIZE)?,
            Self::RawUnwritten => set_aside(&File::create(&path)?, SIZE)?,
            Self::RawHole => File::create(&path)?.set_len(SIZE)?,
            Self::Qcow2New => {
                drop(tool("blockhouse", &["create", "--format", "qcow2", name, &size])?)
            }
            Self::Qcow2Written | Self::Qcow2Unwritten => {
                let options = ["create", "--format", "qcow2", "-o", "preallocation=metadata"];
                tool("blockhouse", &[&options[..], &[name, &size]].concat())?;
                let file = File::options().read(true).write(true).open(&path)?;
                let length = file.metadata()?.len();
                set_aside(&file, length)?;
                if self == Self::Qcow2Written {
                    overwrite(&file, length)?;
                }
            }
        }
        File::open(&path)?.sync_all()?;
        Ok(path)
    }
}

/// Copies an image file to the beginning of `disk`, and removes the file.
pub fn put(image: &Path, disk: &Path) -> Result<()> {
    let bytes = std::fs::read(image).context("cannot read an image")?;
    let file = File::options().write(true).open(disk).context("cannot open the disk")?;
    file.write_all_at(&bytes, 0).context("cannot move an image to a disk")?;
    file.sync_all()?;
    std::fs::remove_file(image).context("cannot remove an image")
}

fn set_aside(file: &File, size: u64) -> Result<()> {
    fallocate(file, FallocateFlags::empty(), 0, size).context("cannot set space aside")
}

fn fill(file: &File, range: Range<u64>) -> Result<()> {
    let chunk = vec![0xa5; STRIDE as usize];
    for offset in range.step_by(chunk.len()) {
        file.write_all_at(&chunk, offset).context("cannot fill an image")?;
    }
    Ok(())
}

/// Overwrites the file with its own content, so that no extent is unwritten.
fn overwrite(file: &File, size: u64) -> Result<()> {
    let mut chunk = vec![0; STRIDE as usize];
    for offset in (0..size).step_by(chunk.len()) {
        let length = chunk.len().min((size - offset) as usize);
        file.read_exact_at(&mut chunk[..length], offset).context("cannot read an image")?;
        file.write_all_at(&chunk[..length], offset).context("cannot fill an image")?;
    }
    Ok(())
}
