//! Checks that the block table of a VDI image names each block of the file at most once, names no
//! block past the end of the file, and names as many blocks as its header states.

use blockhouse_core::{Result, Storage};

use super::{DISCARDED, Vdi};
use crate::foreign::overlap::Survey;
use crate::foreign::scan::scan;
use crate::foreign::tables::Tables;

impl Vdi {
    /// Reads the whole table.
    ///
    /// # Errors
    /// Errors of the storage; `Unsupported` if more blocks are in use than can be counted.
    pub(in crate::foreign) async fn survey<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        file_size: u64,
    ) -> Result<Survey> {
        let header = &self.header;
        let (blocks, block_size) = (header.blocks.into(), header.block_size);
        let (mut survey, mut used) = (Survey::new(blocks, block_size), 0);
        // The scan leaves out the entries of blocks that were never written.
        let visit = |index, entry| {
            let block = u32::from_le_bytes(entry);
            if block == DISCARDED {
                return Ok(());
            }
            used += 1;
            if block >= header.blocks {
                survey.problem(|| {
                    format!("block {index} is said to be in block {block} of the file")
                });
                return Ok(());
            }
            let length = header.size.saturating_sub(index * block_size).clamp(1, block_size);
            survey.add(index, self.host_offset(block), length, file_size)
        };
        scan(tables, header.table_offset, 0..blocks, 0xff, visit).await?;
        let stated = header.allocated;
        if u64::from(stated) != used {
            survey.problem(|| {
                format!("the header states {stated} blocks in use, the table has {used}")
            });
        }
        Ok(survey)
    }
}
