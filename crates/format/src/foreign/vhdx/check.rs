//! Checks that the block table of a VHDX image names each block of the file at most once.

use blockhouse_core::{ErrorKind, Result, Storage, WorkBudget};

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
        let block_size = self.metadata.block_size;
        let mut survey = Survey::new(self.bat.blocks, block_size);
        let budget = WorkBudget::new();
        for index in 0..self.bat.blocks {
            budget.spend(WorkBudget::LOOK_UP).await;
            match self.bat.block(tables, index).await {
                Ok(Block::Mapped { host }) if host >= file_size => {
                    survey.problem(|| {
                        format!("block {index} lies past the end of the file ({host})")
                    });
                }
                Ok(Block::Mapped { host }) => survey.add(host)?,
                Ok(Block::Hole | Block::Zero) => {}
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    survey.problem(|| error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(survey)
    }
}
