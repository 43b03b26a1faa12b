//! Images of other programs, as the targets of these formats look at them.
//!
//! An input is a byte that says how its file is, and what is in the file:
//!
//! | bit | meaning |
//! | --- | --- |
//! | 0 | the file has blocks of 512 bytes, and everything must be aligned to them; else of one |
//! | 1 | zeros follow the bytes, so that blocks of an image lie in the file; else they are all of it |
//!
//! What [`look_at`] asserts: the image is opened, or refused with an error that names the place.
//! Its extents have a length, and lie in the disk. Reads of their first bytes, and of the disk's
//! last ones, succeed or name the place. A check counts at least the problems that it tells.
//! Nothing is written, and no operation is misaligned. Memory is bounded.

use blockhouse_core::{ByteRange, Storage};
use blockhouse_disk::{Access, Disk, Image, ImageFormat, Options};
use blockhouse_format::ForeignKind;
use blockhouse_sim::Sim;

use crate::sparse_file::SparseFile;
use crate::walk::{Limits, read_extents, read_last_bytes};
use crate::{assert_tells_the_place, in_bounded_memory};

/// Extents that are read, and bytes of each.
const LIMITS: Limits = Limits { extents: 8, read: 4096 };
/// Bytes of compressed grains that are unpacked, of which each extent is one.
const MAX_UNPACKED: u64 = 128 << 10;
/// Blocks of the largest disk that is checked: a check looks at each, and many look like few.
const MAX_CHECKED: u64 = 256;

/// How the file of an input is.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// Bytes of its blocks.
    pub block: u32,
    /// Whether zeros follow what is in it.
    pub is_extended: bool,
}

impl Mode {
    /// The mode of an input, and the rest of it; `None` for an empty one.
    pub fn split(input: &[u8]) -> Option<(Self, &[u8])> {
        let (mode, rest) = input.split_first()?;
        let block = if mode & 1 == 0 { 1 } else { 512 };
        Some((Self { block, is_extended: mode & 2 != 0 }, rest))
    }

    /// A file with `bytes` at its start, and `last` at its end. `zeros` are between them if it is
    /// extended.
    pub fn file(self, bytes: &[u8], last: &[u8], zeros: u64) -> SparseFile {
        let zeros = if self.is_extended { zeros } else { 0 };
        let end = bytes.len() as u64 + zeros;
        let pieces = vec![(0, bytes.to_vec()), (end, last.to_vec())];
        SparseFile::new(self.block, end + last.len() as u64, pieces)
    }
}

/// Opens, reads and checks an image. The files that it names are all `extents`.
///
/// # Panics
/// When anything is not as this module says.
pub fn look_at(kind: ForeignKind, image: SparseFile, extents: SparseFile) {
    in_bounded_memory(|| Sim::new(0).block_on(read_and_check(kind, image, extents)));
}

async fn read_and_check(kind: ForeignKind, image: SparseFile, extents: SparseFile) {
    let options = Options { access: Access::ReadOnly, ..Options::default() };
    let opened = match Image::open(image, ImageFormat::Foreign(kind), options).await {
        Ok(image) if !image.extent_files().is_empty() => {
            let whole = ByteRange::between(0, extents.size());
            let ranges = vec![whole; image.extent_files().len()];
            image.with_extents(extents, &ranges).await
        }
        opened => opened,
    };
    let disk = match opened {
        Ok(image) => Disk::new(image),
        Err(error) => return assert_tells_the_place(&error),
    };
    let unit = disk.image().cluster_size().unwrap_or(disk.size()).max(1);
    let limits = match kind {
        ForeignKind::Vmdk => {
            Limits { extents: (MAX_UNPACKED / unit).clamp(2, 8) as usize, ..LIMITS }
        }
        _ => LIMITS,
    };
    read_extents(&disk, limits).await;
    read_last_bytes(&disk, limits).await;
    if disk.size() / unit > MAX_CHECKED {
        return;
    }
    match disk.image().check().await {
        Ok(report) => {
            assert!(report.is_none_or(|found| found.problems.len() as u64 <= found.corruptions));
        }
        Err(error) => assert_tells_the_place(&error),
    }
}
