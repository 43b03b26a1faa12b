//! Checks that the table of a dynamic VHD image names each block of the file at most once.

use blockhouse_core::{Result, Storage, WorkBudget};

use super::sparse::{SparseHeader, UNALLOCATED};
use crate::foreign::fields::SECTOR;
use crate::foreign::overlap::Survey;
use crate::foreign::tables::Tables;

impl SparseHeader {
    /// Reads the whole table.
    ///
    /// # Errors
    /// Errors of the storage; `Unsupported` if more blocks are in use than can be counted.
    pub(super) async fn survey<S: Storage>(&self, tables: &Tables<'_, S>) -> Result<Survey> {
        let whole = self.bitmap_size + self.block_size;
        let mut survey = Survey::new(self.blocks, whole);
        let budget = WorkBudget::new();
        for index in 0..self.blocks {
            let entry = self.entry(tables, index).await?;
            budget.spend(WorkBudget::LOOK_UP).await;
            if entry == UNALLOCATED {
                continue;
            }
            let start = u64::from(entry) * SECTOR;
            if start + whole > self.data_end {
                survey.problem(|| {
                    format!("block {index} lies at {start} and ends past the end of the file")
                });
                survey.add_faulty(start)?;
            } else {
                survey.add(start)?;
            }
        }
        Ok(survey)
    }
}
