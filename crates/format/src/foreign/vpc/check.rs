//! Checks that the table of a dynamic VHD image names each block of the file at most once, and no
//! block past the end of the file.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use super::sparse::SparseHeader;
use crate::foreign::fields::SECTOR;
use crate::foreign::overlap::Survey;
use crate::foreign::scan::scan;
use crate::foreign::tables::Tables;

impl SparseHeader {
    /// Reads the whole table.
    ///
    /// # Errors
    /// Errors of the storage; `Unsupported` if more blocks are in use than can be counted.
    pub(super) async fn survey<S: Storage>(&self, tables: &Tables<'_, S>) -> Result<Survey> {
        let length = self.bitmap_size + self.block_size;
        let mut survey = Survey::new(self.blocks, length);
        self.scan_blocks(tables, |index, start| survey.add(index, start, length, self.data_end))
            .await?;
        Ok(survey)
    }

    /// Reads the whole table, and refuses a truncated image: a block ends past the end of the file,
    /// which has `file_size` bytes. As in QEMU, a block that ends inside the footer is not refused.
    ///
    /// # Errors
    /// `Corrupt`, with the offset of the table; errors of the storage.
    pub(super) async fn check_not_truncated<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        file_size: u64,
    ) -> Result<()> {
        let mut end = 0;
        let visit = |_, start: u64| {
            end = end.max(start + self.bitmap_size + self.block_size);
            Ok(())
        };
        self.scan_blocks(tables, visit).await?;
        // As in QEMU, a part of a sector counts as a sector.
        if end <= file_size.next_multiple_of(SECTOR) {
            return Ok(());
        }
        let what = format!(
            "the image has been truncated to {file_size} bytes, and {end} are needed by the block table"
        );
        Err(Error::new(ErrorKind::Corrupt, what)
            .at(self.table_offset)
            .hint("copy the file again, or restore it from a copy"))
    }

    /// Passes the number of each block that was written to `visit`, and its offset in the file.
    async fn scan_blocks<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        mut visit: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let visit = |index, entry| visit(index, u64::from(u32::from_be_bytes(entry)) * SECTOR);
        scan(tables, self.table_offset, 0..self.blocks, 0xff, visit).await
    }
}
