//! The order of a writeback's writes (README.md of qcow2, "Order"):
//!
//! 1. refcounts, and tables that nothing on disk refers to yet; flush: after this, these tables and
//!    all data are durable;
//! 2. if the refcount table changed: its entries, or the header with its new location; if the
//!    outcome of an earlier header write is unknown: the header; flush;
//! 3. slices of L2 tables, L1 entries, a new size; flush. A few slices are written with FUA instead
//!    of the flush.
//!
//! A failed write of a table is recorded, and no table that depends on it is written. ENOSPC of a
//! write is not recorded: the next writeback repeats the write, which may have been partial.

use blockhouse_core::{Capabilities, Durability, Fua, FuaCost, Result, Storage, SyncMode};

use crate::qcow2::layout::header::Incompatible;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::tables::{WritebackBatch, WritebackScope};

use super::Metadata;

/// Maximum number of changes, and of writes of a kind, that use FUA rather than a flush. If FUA
/// implies a flush, the maximum is 1.
pub(super) const MAX_FUA_WRITES: usize = 3;

/// Whether a flush was part of the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    Yes,
    No,
}

/// Writes batches durably.
pub(super) struct BatchWriter<'a, S: Storage>(pub(super) &'a Metadata<S>);

impl<S: Storage> BatchWriter<'_, S> {
    /// Writes a batch durably. Returns whether a flush was part of the operation.
    pub(super) async fn write(&self, batch: &WritebackBatch) -> Result<Flushed> {
        if batch.scope() == WritebackScope::SkipRefcounts {
            self.0.set_dirty_bit().await?;
        }
        if self.is_small(batch) {
            // The refcounts are durable before the references to the clusters are written.
            self.0.writer.write(batch.unordered(), Durability::Data).await?;
            batch.note_new_tables_linked();
            self.0.writer.write(batch.mappings(), Durability::Data).await?;
            return Ok(Flushed::No);
        }
        self.0.writer.write(batch.unordered(), Durability::None).await?;
        self.0.sync(SyncMode::Data).await?;
        batch.note_new_tables_linked();
        if batch.has_header_write() {
            let update = batch.refcount_table_update();
            self.0
                .change_header(|header| update.iter().for_each(|update| update.apply(header)))
                .await?;
        }
        self.0.writer.write(batch.refcount_table(), Durability::None).await?;
        if batch.has_header_write() || !batch.refcount_table().is_empty() {
            self.0.sync(SyncMode::Data).await?;
        }
        if let Some(update) = batch.l1_update() {
            self.0.change_header(|header| update.apply(header)).await?;
        }
        if batch.l1_update().is_none() && self.goes_by_fua(batch.mappings()) {
            self.0.writer.write(batch.mappings(), Durability::Data).await?;
            return Ok(Flushed::Yes);
        }
        self.0.writer.write(batch.mappings(), Durability::None).await?;
        if batch.l1_update().is_some() || !batch.mappings().is_empty() {
            self.0.sync(SyncMode::Data).await?;
        }
        Ok(Flushed::Yes)
    }

    /// Whether these writes use FUA rather than a flush after them.
    fn goes_by_fua(&self, writes: &[TableWrite]) -> bool {
        let Capabilities { fua, fua_cost, .. } = self.0.storage().capabilities();
        let limit = match fua_cost {
            FuaCost::NoFlush => MAX_FUA_WRITES,
            FuaCost::ExtraFlush => 1,
        };
        fua == Fua::Native && writes.len() <= limit
    }

    /// Whether the batch is written as a few FUA writes without a flush, because the data is stable
    /// already.
    fn is_small(&self, batch: &WritebackBatch) -> bool {
        batch.is_stable_slices()
            && self.goes_by_fua(batch.unordered())
            && self.goes_by_fua(batch.mappings())
    }
}

impl<S: Storage> Metadata<S> {
    /// Makes durable the refcounts of clusters allocated before the call, and the data written to
    /// these clusters. With lazy refcounts the dirty bit is made durable instead.
    pub(crate) async fn flush_allocated(&self) -> Result<()> {
        if self.state.lock().tables.headers.disk().has_late_refcounts() {
            self.set_dirty_bit().await?;
        }
        self.flush(SyncMode::Data).await
    }

    /// Sets the dirty bit (refcounts may be wrong), durably.
    async fn set_dirty_bit(&self) -> Result<()> {
        // Another task may be writing the dirty bit, so the bit in memory is not sufficient: it
        // must be durable.
        if self.state.lock().tables.headers.is_marked_durably(Incompatible::DIRTY) {
            return Ok(());
        }
        self.rewrite_header(|header| header.incompatible.insert(Incompatible::DIRTY)).await
    }
}
