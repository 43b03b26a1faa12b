//! L2 tables that may be changed in place.

use crate::qcow2::allocator::{DeferredFree, Punch, Users};
use crate::qcow2::layout::entry::Reference;
use crate::qcow2::tables::{SliceId, Step};

use super::Mapper;

impl Mapper<'_> {
    /// The slice with a cluster's L2 entry, in an L2 table to which only the active L1 table
    /// refers. The table is allocated or copied if necessary.
    pub(super) fn writable_l2_slice(&mut self, cluster: u64) -> Step<SliceId> {
        let at = self.tables.geometry().l2_index(cluster);
        let table = match self.tables.l2_table(at.l1_index)? {
            Some(table) if table.is_copied() => table.offset,
            other => self.allocate_l2_table(at.l1_index, other)?,
        };
        let slice = SliceId::l2(table + at.slice_offset);
        self.tables.ensure(slice)?;
        Ok(slice)
    }

    fn allocate_l2_table(&mut self, l1_index: usize, old: Option<Reference>) -> Step<u64> {
        let content = match old {
            Some(old) => Some(self.tables.content_of(old)?),
            None => None,
        };
        if l1_index >= self.tables.l1().len() {
            let what = "the L1 table does not reach this far";
            return Err(self.tables.corrupt(what, self.tables.header().l1_offset).into());
        }
        let cluster = self.allocator.take_l2_table(l1_index)?;
        let table = self.tables.add_l2_table(l1_index, cluster, content.as_deref())?;
        if let Some(old) = old {
            let old = self.tables.geometry().cluster_of(old.offset);
            let (punch, users) = (Punch::No, Users::Others);
            self.allocator.frees.defer(DeferredFree { clusters: old..old + 1, punch, users });
        }
        Ok(table)
    }
}
