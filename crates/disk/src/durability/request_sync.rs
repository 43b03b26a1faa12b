//! The durability of one request, from its first write to its end; and whether the request changes
//! the disk's content.
//!
//! A [`RequestSync`] is created once per request, with the requested durability. It makes the plan
//! of each write, and records the sync that the plan requires afterwards, so no write can forget
//! the sync. [`RequestSync::complete`] performs the strongest of these syncs, once.

use std::cell::Cell;

use blockhouse_core::{Durability, Extent, Result, Storage};
use blockhouse_format::{Format, MetadataSync};

use super::decide::{Change, DurabilityPlan, Extents, Facts, RequiredSync, Writes};
use super::flush_tracker::FlushTracker;

/// See the module's page.
pub(crate) struct RequestSync<'a, S: Storage> {
    format: &'a Format<FlushTracker<S>>,
    asked: Durability,
    changes_content: bool,
    required: Cell<RequiredSync>,
}

impl<'a, S: Storage> RequestSync<'a, S> {
    /// For a request. `asked` is the greater of the request's durability and that of the disk's
    /// options.
    pub(crate) fn new(format: &'a Format<FlushTracker<S>>, asked: Durability) -> Self {
        Self { format, asked, changes_content: true, required: Cell::default() }
    }

    /// For writes that the caller makes durable by other means.
    pub(crate) fn not_required(format: &'a Format<FlushTracker<S>>) -> Self {
        Self::new(format, Durability::None)
    }

    /// For writes that do not change the disk's content, and need not be durable.
    pub(crate) fn of_same_content(format: &'a Format<FlushTracker<S>>) -> Self {
        Self { changes_content: false, ..Self::not_required(format) }
    }

    /// Whether the request may change the disk's content.
    pub(crate) fn changes_content(&self) -> bool {
        self.changes_content
    }

    /// The plan for writes of data to prepared extents.
    pub(crate) fn plan_data<'e>(
        &self,
        extents: impl Iterator<Item = &'e Extent> + Clone,
        writes: Writes,
    ) -> DurabilityPlan {
        let extents = Extents::of(extents);
        self.plan(Change::Data { extents, writes }, || self.format.metadata_sync_mode())
    }

    /// The plan for zeros that are written to a prepared extent as data. FUA is used only for a
    /// pure overwrite, because COW padding is written without FUA.
    pub(crate) fn plan_zeros(&self, is_pure_overwrite: bool, writes: Writes) -> DurabilityPlan {
        let extents = if is_pure_overwrite { Extents::Overwrites } else { Extents::Mixed };
        self.plan(Change::Data { extents, writes }, || MetadataSync::Flush)
    }

    /// Records operations that are not durable by themselves.
    pub(crate) fn note_plain_operation(&self) {
        self.plan(Change::SharedFlush, || MetadataSync::Flush);
    }

    /// Records a change of metadata only.
    pub(crate) fn note_metadata_change(&self) {
        self.plan(Change::Metadata, || MetadataSync::Flush);
    }

    fn plan(&self, change: Change, metadata_sync: impl FnOnce() -> MetadataSync) -> DurabilityPlan {
        let fua = self.format.data().capabilities().fua;
        let plan = DurabilityPlan::decide(Facts { asked: self.asked, fua, change }, metadata_sync);
        self.required.set(self.required.get().max(plan.required_sync()));
        plan
    }

    /// The strongest sync recorded so far.
    #[cfg(test)]
    pub(crate) fn required(&self) -> RequiredSync {
        self.required.get()
    }

    /// Makes the request as durable as required, once its writes have ended.
    ///
    /// # Errors
    /// Errors of the storage, or the first failure of an earlier flush or durable write.
    pub(crate) async fn complete(self) -> Result<()> {
        match self.required.get() {
            RequiredSync::None => return Ok(()),
            RequiredSync::Metadata => self.format.sync_metadata().await?,
            RequiredSync::DataAndMetadata => self.format.sync_data_and_metadata().await?,
            RequiredSync::Flush(sync) => return self.format.flush(sync).await,
        }
        // A metadata sync without anything to write does not detect an earlier failure.
        self.format.data().check_failure()?;
        self.format.storage().check_failure()
    }
}
