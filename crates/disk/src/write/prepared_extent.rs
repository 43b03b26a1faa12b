//! An extent between its preparation and its link.

use std::ops::Deref;

use blockhouse_core::{Durability, Extent, Result, Storage};
use blockhouse_format::{Abort, Format};

use crate::durability::FlushTracker;

/// An extent that the format has prepared for a change. It is linked after its data is written, and
/// freed otherwise, also if the request's future is dropped.
pub(super) struct PreparedExtent<'a, S: Storage> {
    format: &'a Format<FlushTracker<S>>,
    extent: Extent,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No operation is in flight.
    Idle,
    /// The storage may be writing.
    Writing,
    /// The extent is linked, or its link has begun.
    Linked,
}

impl<'a, S: Storage> PreparedExtent<'a, S> {
    pub(super) fn new(format: &'a Format<FlushTracker<S>>, extent: Extent) -> Self {
        Self { format, extent, stage: Stage::Idle }
    }

    /// Notes that from now on the storage may be writing to the extent's host range.
    pub(super) fn begin_io(&mut self) {
        self.stage = Stage::Writing;
    }

    /// Notes that no operation is in flight.
    pub(super) fn end_io(&mut self) {
        self.stage = Stage::Idle;
    }

    /// Ends a storage operation: links the extent, or frees it if `outcome` is an error. `data` is
    /// the durability of the written data.
    pub(super) async fn complete<T>(mut self, outcome: Result<T>, data: Durability) -> Result<T> {
        self.stage = Stage::Idle;
        let value = outcome?;
        self.stage = Stage::Linked;
        self.format.link(self.extent, data).await?;
        Ok(value)
    }
}

impl<S: Storage> Deref for PreparedExtent<'_, S> {
    type Target = Extent;

    fn deref(&self) -> &Extent {
        &self.extent
    }
}

impl<S: Storage> Drop for PreparedExtent<'_, S> {
    fn drop(&mut self) {
        match self.stage {
            Stage::Idle => self.format.abort(self.extent, Abort::Ended),
            Stage::Writing => self.format.abort(self.extent, Abort::InFlight),
            Stage::Linked => {}
        }
    }
}
