//! Checks that entries of a VMDK image's grain tables refer to grains in the file, each entry to
//! another grain.

use blockhouse_core::{ByteRange, ErrorKind, Result, Storage, WorkBudget};

use super::sparse::{Grain, SparseExtent};
use super::{Source, Vmdk};
use crate::foreign::fields::SECTOR;
use crate::foreign::overlap::Survey;
use crate::foreign::tables::Tables;

impl Vmdk {
    /// Reads all tables; `None` if the files of the image are not open.
    ///
    /// # Errors
    /// Errors of the storage; `Unsupported` if more grains are in use than can be counted.
    pub(in crate::foreign) async fn survey<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
    ) -> Result<Option<Survey>> {
        if self.extents.iter().any(|extent| matches!(extent.source, Source::Unopened { .. })) {
            return Ok(None);
        }
        // An image without tables has no grains to check, so the size has no effect.
        let grain_size = self.grain_size().unwrap_or(SECTOR);
        let total = self.sparse().map(|(range, extent)| extent.grains(range)).sum();
        // The tables do not have the lengths of compressed grains. So the check only finds two
        // grains that begin at the same offset.
        let is_compressed = self.sparse().any(|(_, extent)| extent.header.is_compressed);
        let is_uniform = self.sparse().all(|(_, extent)| extent.header.grain_size == grain_size);
        let length = if is_compressed || !is_uniform { 1 } else { grain_size };
        let mut survey = Survey::new(total, length);
        for (range, extent) in self.sparse() {
            extent.check(tables, extent.grains(range), &mut survey).await?;
        }
        Ok(Some(survey))
    }
}

impl SparseExtent {
    /// The number of grains in `range`, the extent's part of the disk. A descriptor may make that
    /// part shorter than the extent.
    fn grains(&self, range: ByteRange) -> u64 {
        self.header.capacity.min(range.length()).div_ceil(self.header.grain_size)
    }

    async fn check<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        grains: u64,
        survey: &mut Survey,
    ) -> Result<()> {
        let per_table = self.header.table_entries;
        let budget = WorkBudget::new();
        for number in 0..grains.div_ceil(per_table) {
            budget.spend(WorkBudget::LOOK_UP).await;
            let table = match self.table(tables, number).await {
                Ok(Some(table)) => table,
                Ok(None) => continue,
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    survey.problem(|| error.to_string());
                    continue;
                }
                Err(error) => return Err(error),
            };
            for index in number * per_table..((number + 1) * per_table).min(grains) {
                budget.spend(WorkBudget::LOOK_UP).await;
                match self.grain(tables, table, index).await {
                    Ok(Grain::At(host)) => survey.add(host)?,
                    Ok(Grain::Hole | Grain::Zero) => {}
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        survey.problem(|| error.to_string());
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}
