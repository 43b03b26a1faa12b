//! Checks that the block table of a VHDX image names each block of the file at most once, and no
//! block past the end of the file.

use blockhouse_core::{ErrorKind, Result, Storage};

use super::Vhdx;
use super::bat::Block;
use crate::foreign::overlap::Survey;
use crate::foreign::tables::Tables;

impl Vhdx {
    /// Reads the whole table.
    ///
    /// # Errors
    /// Errors of the storage; `Unsupported` if more blocks are in use than can be counted.
    pub(in crate::foreign) async fn survey<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        file_size: u64,
    ) -> Result<Survey> {
        let (size, block_size) = (self.metadata.size, self.metadata.block_size);
        let mut survey = Survey::new(self.bat.blocks, block_size);
        let visit = |index: u64, block: Result<Block>| match block {
            Ok(Block::Mapped { host }) => {
                let length = (size - index * block_size).min(block_size);
                survey.add(index, host, length, file_size)
            }
            Ok(Block::Hole | Block::Zero) => Ok(()),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                survey.problem(|| error.to_string());
                Ok(())
            }
            Err(error) => Err(error),
        };
        self.bat.scan(tables, visit).await?;
        Ok(survey)
    }
}
