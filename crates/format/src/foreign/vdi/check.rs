//! Checks that the block table of a VDI image names each block of the file at most once, and names
//! as many blocks as its header states.

use blockhouse_core::{Result, Storage, WorkBudget};

use super::{DISCARDED, UNALLOCATED, Vdi};
use crate::foreign::overlap::Survey;
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
        let mut survey = Survey::new(header.blocks.into(), header.block_size);
        let (mut used, budget) = (0, WorkBudget::new());
        for index in 0..header.blocks.into() {
            let block = self.entry(tables, index).await?;
            budget.spend(WorkBudget::LOOK_UP).await;
            if block == UNALLOCATED || block == DISCARDED {
                continue;
            }
            used += 1;
            let start = self.host_offset(block);
            if block >= header.blocks {
                survey.problem(|| {
                    format!("block {index} is said to be in block {block} of the file")
                });
            } else if start >= file_size {
                survey.problem(|| format!("block {index} lies past the end of the file ({start})"));
            } else {
                survey.add(start)?;
            }
        }
        let stated = header.allocated;
        if u64::from(stated) != used {
            survey.problem(|| {
                format!("the header states {stated} blocks in use, the table has {used}")
            });
        }
        Ok(survey)
    }
}
