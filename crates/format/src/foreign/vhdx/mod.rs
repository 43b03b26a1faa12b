//! VHDX, the format of Hyper-V: a table of blocks of 1 to 256 MiB, and a log of metadata changes
//! that may not have been written to their final location.
//!
//! Source: \[MS-VHDX\]. Supported: fixed and dynamic images. Refused: differencing images, because
//! a part of their data is in another file. A log that was not replayed, because the program that
//! wrote it died, is replayed in memory (`log`): metadata reads return the same bytes as after a
//! replay on disk, and the file is not changed. A repair replays the log into the file (`repair`).

mod bat;
mod check;
mod create;
mod guid;
mod header;
mod log;
mod metadata;
mod regions;
mod repair;

use blockhouse_core::{ByteRange, Error, ErrorKind, ExtentState, Result, Storage};

use super::patches::Patches;
use super::piece::Piece;
use super::refusal::corrupt;
use super::tables::Tables;
use bat::Bat;
pub use create::NewVhdx;
use header::Header;
use metadata::Metadata;
use regions::Regions;

/// The mapping of an image.
pub(super) struct Vhdx {
    metadata: Metadata,
    bat: Bat,
    /// The changes that the log contains.
    patches: Patches,
}

impl Vhdx {
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset; or errors of the storage.
    pub(super) async fn open<S: Storage>(storage: &S) -> Result<Self> {
        let header = Header::find(storage).await?;
        let patches = log::replay(storage, &header).await?;
        let regions = Regions::find(storage, &patches).await?;
        let metadata = Metadata::read(storage, &patches, regions.metadata).await?;
        let bat = Bat::new(&metadata, regions.bat)?;
        let end = patches.file_size(storage.size());
        if regions.bat.end() > end {
            let what = format!("its block table ends past the end of the file ({end} bytes)");
            return Err(corrupt(what, regions.bat.offset()));
        }
        Ok(Self { metadata, bat, patches })
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.metadata.size
    }

    /// Bytes of a block.
    pub(super) fn block_size(&self) -> u64 {
        self.metadata.block_size
    }

    /// Bytes of a sector of the guest's disk.
    pub(super) fn sector_size(&self) -> u64 {
        self.metadata.sector_size
    }

    /// The changes that the log contains, which every read of metadata must apply.
    pub(super) fn patches(&self) -> &Patches {
        &self.patches
    }

    /// The piece of the disk from `at` on, at most up to the end of the block.
    ///
    /// # Errors
    /// `Corrupt` with the entry's offset; `Unsupported` for data that is in the log; or errors of
    /// the storage.
    pub(super) async fn piece<S: Storage>(&self, tables: &Tables<'_, S>, at: u64) -> Result<Piece> {
        let block_size = self.metadata.block_size;
        let inside = at % block_size;
        let length = (block_size - inside).min(self.metadata.size - at);
        let piece = match self.bat.block(tables, at / block_size).await? {
            bat::Block::Hole => Piece::hole(length),
            bat::Block::Zero => Piece::zero(length),
            bat::Block::Mapped { host } => {
                // The sum overflows for a damaged entry. The caller refuses the saturated offset,
                // which is past the end of the file.
                Piece::mapped(host.saturating_add(inside), length)
            }
        };
        if let ExtentState::Mapped { host } = piece.state
            && let Some(range) = ByteRange::new(host, length)
            && self.patches.overlaps(range)
        {
            let what = format!("data of the disk's offset {at} is in the log of the image");
            return Err(Error::new(ErrorKind::Unsupported, what)
                .at(host)
                .hint("let the program that made the image open it once, which replays the log"));
        }
        Ok(piece)
    }
}
