//! VHD, the format of Virtual PC and Hyper-V, which QEMU calls vpc: a footer at the end of the
//! file, and for dynamic images a table of blocks, each with a bitmap of the sectors that were
//! written.
//!
//! Source: "Virtual Hard Disk Image Format Specification" of Microsoft, version 1.0. Supported:
//! fixed and dynamic images. Refused: differencing images, because a part of their data is in
//! another file.
//!
//! The footer at the end is authoritative. The copy at the start is read only if the end has no
//! footer, because in a fixed image the start is guest data, which can look like a footer.

mod check;
mod create;
mod footer;
mod sparse;

use blockhouse_core::{Result, Storage};

use super::fields::SECTOR;
use super::overlap::Survey;
use super::piece::Piece;
use super::refusal::corrupt;
use super::tables::{PageCache, Tables};
use crate::aligned_read::read;
pub use create::NewVpc;
use footer::{Footer, Kind};
use sparse::SparseHeader;

/// The mapping of an image.
pub(super) struct Vpc {
    size: u64,
    blocks: Blocks,
}

/// The location of the data.
enum Blocks {
    /// All data is at the start of the file, in the order of the disk.
    Fixed,
    /// The table has the locations of the blocks.
    Dynamic(SparseHeader),
}

impl Vpc {
    /// Reads the table of a dynamic image, too, because only the table has the size that the file
    /// must have.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset; or errors of the storage.
    pub(super) async fn open<S: Storage>(storage: &S) -> Result<Self> {
        let (footer, data_end) = find_footer(storage).await?;
        let blocks = match footer.kind {
            Kind::Fixed if footer.size > data_end => {
                let what =
                    format!("states a disk of {} bytes, and the file has {data_end}", footer.size);
                return Err(corrupt(what, data_end));
            }
            Kind::Fixed => Blocks::Fixed,
            Kind::Dynamic { header } => {
                let bytes = read(storage, header, sparse::LENGTH).await?;
                let header = SparseHeader::parse(&bytes, header, footer.size, data_end)?;
                let cache = PageCache::default();
                let tables = Tables::new(storage, &cache, None);
                header.check_not_truncated(&tables, storage.size()).await?;
                Blocks::Dynamic(header)
            }
        };
        Ok(Self { size: footer.size, blocks })
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of a block of a dynamic image.
    pub(super) fn block_size(&self) -> Option<u64> {
        match &self.blocks {
            Blocks::Fixed => None,
            Blocks::Dynamic(header) => Some(header.block_size),
        }
    }

    /// The piece of the disk from `at` on, at most up to the end of the block.
    ///
    /// # Errors
    /// `Corrupt` for a block past the end of the file; or errors of the storage.
    pub(super) async fn piece<S: Storage>(&self, tables: &Tables<'_, S>, at: u64) -> Result<Piece> {
        match &self.blocks {
            Blocks::Fixed => Ok(Piece::mapped(at, self.size - at)),
            Blocks::Dynamic(header) => header.piece(tables, at).await,
        }
    }

    /// Checks the table for errors; `None` for a fixed image, which has no table.
    ///
    /// # Errors
    /// Errors of the storage; `Unsupported` if more blocks are in use than can be counted.
    pub(super) async fn survey<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
    ) -> Result<Option<Survey>> {
        match &self.blocks {
            Blocks::Fixed => Ok(None),
            Blocks::Dynamic(header) => header.survey(tables).await.map(Some),
        }
    }
}

/// The footer at the end of the file, or if it is missing, its copy at the start of a dynamic
/// image; and the offset at which the data ends.
async fn find_footer<S: Storage>(storage: &S) -> Result<(Footer, u64)> {
    let Some(last) = storage.size().checked_sub(SECTOR) else {
        return Err(corrupt("is no VHD image: it is shorter than a footer", 0));
    };
    let at_end = Footer::parse(&read(storage, last, SECTOR as usize).await?, last);
    let error = match at_end {
        Ok(footer) => return Ok((footer, last)),
        Err(error) => error,
    };
    if !footer::is_absent(&error) {
        return Err(error);
    }
    match Footer::parse(&read(storage, 0, SECTOR as usize).await?, 0) {
        Ok(copy) if matches!(copy.kind, Kind::Dynamic { .. }) => Ok((copy, storage.size())),
        // The start of a fixed image is guest data, not a copy of the footer.
        _ => Err(error),
    }
}
