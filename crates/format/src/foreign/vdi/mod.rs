//! VDI, VirtualBox's format: a table has the block of the file for each block of the disk.
//!
//! Source: `VDICore.h` of VirtualBox, and the images that QEMU's `block/vdi.c` accepts. Supported:
//! version 1.1, dynamic and static images. Refused: differencing and undo images, because a part of
//! their data is in another file.

mod check;
mod create;
mod header;

use blockhouse_core::{Result, Storage};

use super::piece::Piece;
use super::refusal::corrupt;
use super::tables::Tables;
pub use create::NewVdi;
use header::Header;

/// Entry of a block that was never written.
const UNALLOCATED: u32 = u32::MAX;
/// Entry of a block whose content was discarded.
const DISCARDED: u32 = u32::MAX - 1;
/// Bytes of an entry.
const ENTRY_SIZE: u64 = 4;

/// The mapping of an image.
pub(super) struct Vdi {
    header: Header,
}

impl Vdi {
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset; or errors of the storage.
    pub(super) async fn open<S: Storage>(storage: &S) -> Result<Self> {
        let bytes = crate::aligned_read::read(storage, 0, header::LENGTH).await?;
        let header = Header::parse(&bytes)?;
        let end = header.table_offset + u64::from(header.blocks) * ENTRY_SIZE;
        if end > storage.size() {
            // Scripts that fetch the head of an image look for QEMU's words, which it has for VMDK.
            let what =
                format!("File truncated, expecting at least {end} bytes for its block table");
            return Err(corrupt(what, header.table_offset));
        }
        Ok(Self { header })
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.header.size
    }

    /// Bytes of a block.
    pub(super) fn block_size(&self) -> u64 {
        self.header.block_size
    }

    /// The piece of the disk from `at` on, at most up to the end of the block.
    ///
    /// # Errors
    /// `Corrupt` with the entry's offset; or errors of the storage.
    pub(super) async fn piece<S: Storage>(&self, tables: &Tables<'_, S>, at: u64) -> Result<Piece> {
        let block_size = self.header.block_size;
        let (index, inside) = (at / block_size, at % block_size);
        let length = block_size - inside;
        Ok(match self.entry(tables, index).await? {
            // No other image has the block's data.
            UNALLOCATED | DISCARDED => Piece::zero(length),
            block if block < self.header.blocks => {
                Piece::mapped(self.host_offset(block) + inside, length)
            }
            block => {
                let what = format!("block {index} of the disk is said to be in block {block}");
                let blocks = self.header.blocks;
                let what = format!("{what} of the file, which can have {blocks}");
                return Err(corrupt(what, self.entry_offset(index)));
            }
        })
    }

    async fn entry<S: Storage>(&self, tables: &Tables<'_, S>, index: u64) -> Result<u32> {
        tables.entry(self.entry_offset(index)).await.map(u32::from_le_bytes)
    }

    fn entry_offset(&self, index: u64) -> u64 {
        self.header.table_offset + index * ENTRY_SIZE
    }

    fn host_offset(&self, block: u32) -> u64 {
        self.header.data_offset + u64::from(block) * self.header.block_size
    }
}
