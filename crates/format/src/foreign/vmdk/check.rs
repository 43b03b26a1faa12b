//! Checks that entries of a VMDK image's grain tables refer to grains in the file, each entry to
//! another grain.

use blockhouse_core::{ByteRange, Result, Storage, WorkBudget};

use super::sparse::{ENTRY_SIZE, Grain, SparseExtent};
use super::{Source, Vmdk, grain};
use crate::foreign::fields::SECTOR;
use crate::foreign::overlap::Survey;
use crate::foreign::scan::{PIECE, scan, visit_used};
use crate::foreign::tables::Tables;

/// A grain table that the directory names.
struct GrainTable {
    index: u64,
    /// Offset in the storage.
    offset: u64,
}

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
        // The tables do not have the lengths of compressed grains, and a survey has one length for
        // all grains. So for compressed grains, and for grains of several sizes, the check finds
        // only overlaps of grains that begin at the same offset.
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

    /// Checks the first `grains` grains.
    async fn check<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        grains: u64,
        survey: &mut Survey,
    ) -> Result<()> {
        let (count, at_once) = (grains.div_ceil(self.header.table_entries), PIECE / ENTRY_SIZE);
        let mut last = None;
        for first in (0..count).step_by(at_once as usize) {
            let mut found = Vec::new();
            let visit = |index, entry| {
                match self.table_of(index, entry) {
                    Ok(Some(offset)) => found.push(GrainTable { index, offset }),
                    Ok(None) => {}
                    Err(error) => survey.problem(|| error.to_string()),
                }
                Ok(())
            };
            let range = first..(first + at_once).min(count);
            scan(tables, self.directory_offset(0), range, 0, visit).await?;
            // Nearly all programs store the tables one after the other.
            let length = self.table_length();
            let stride = length.next_multiple_of(SECTOR);
            for run in found.chunk_by(|one, next| one.offset + stride == next.offset) {
                for run in run.chunks((PIECE / stride) as usize) {
                    self.check_run(tables, run, grains, survey, &mut last).await?;
                }
            }
        }
        match last {
            Some(host) if self.header.is_compressed => self.check_end(tables, host, survey).await,
            _ => Ok(()),
        }
    }

    /// Checks tables that follow each other in the file. Raises `last` to the highest offset in the
    /// storage at which one of their grains begins.
    async fn check_run<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        run: &[GrainTable],
        grains: u64,
        survey: &mut Survey,
        last: &mut Option<u64>,
    ) -> Result<()> {
        let (length, per_table) = (self.table_length() as usize, self.header.table_entries);
        let (start, end) = (run[0].offset, run[run.len() - 1].offset + length as u64);
        let bytes = tables.read(start, (end - start) as usize).await?;
        let budget = WorkBudget::new();
        for table in run {
            let first = table.index * per_table;
            let used = ((grains - first).min(per_table) * ENTRY_SIZE) as usize;
            let entries = &bytes[(table.offset - start) as usize..][..used];
            let visit = |number, entry| {
                let index = first + number;
                match self.grain_of(table.offset, index, entry) {
                    Ok(Grain::At(host)) => {
                        *last = (*last).max(Some(host));
                        survey.add(index, host, self.needed_of(index), self.file.end())?;
                    }
                    Ok(Grain::Hole | Grain::Zero) => {}
                    Err(error) => survey.problem(|| error.to_string()),
                }
                Ok(())
            };
            visit_used(entries, 0, &budget, visit).await?;
        }
        Ok(())
    }

    /// Checks that the compressed grain at `host` of the storage ends in the file. Of grains that
    /// do not overlap, only the last one can end past the end of the file and begin in it.
    async fn check_end<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        host: u64,
        survey: &mut Survey,
    ) -> Result<()> {
        let left = self.file.end() - host;
        let length = match left.checked_sub(grain::MARKER as u64) {
            Some(_) => grain::length(&tables.read(host, grain::MARKER).await?),
            None => grain::MARKER as u64,
        };
        if length > left {
            survey.problem(|| {
                let end = self.file.end();
                format!("the grain at {host} has {length} bytes, past the end of the file at {end}")
            });
        }
        Ok(())
    }
}
