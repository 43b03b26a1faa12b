//! Extents that are prepared for a change.

use std::ops::Deref;

use blockhouse_core::{Durability, Extent, Result, Storage};
use blockhouse_format::{Abort, Format};

use crate::durability::FlushTracker;

/// An extent that the format has prepared: committed when its data arrived, else given back, also
/// when the request is dropped.
pub(crate) struct Prepared<'a, S: Storage> {
    format: &'a Format<FlushTracker<S>>,
    extent: Extent,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No operation is under way.
    Idle,
    /// The storage is at work.
    Moving,
    /// Committed, or being so.
    Committed,
}

impl<'a, S: Storage> Prepared<'a, S> {
    pub(crate) fn new(format: &'a Format<FlushTracker<S>>, extent: Extent) -> Self {
        Self { format, extent, stage: Stage::Idle }
    }

    /// From now on the storage may be at work on the extent's place.
    pub(crate) fn set_moving(&mut self) {
        self.stage = Stage::Moving;
    }

    /// Nothing is at work on it any more.
    pub(crate) fn set_idle(&mut self) {
        self.stage = Stage::Idle;
    }

    /// The storage is through and its data as durable as `data` says: commits the extent, or gives
    /// it back if that failed.
    pub(crate) async fn settle<T>(mut self, outcome: Result<T>, data: Durability) -> Result<T> {
        self.stage = Stage::Idle;
        let value = outcome?;
        self.stage = Stage::Committed;
        self.format.link(self.extent, data).await?;
        Ok(value)
    }
}

impl<S: Storage> Deref for Prepared<'_, S> {
    type Target = Extent;

    fn deref(&self) -> &Extent {
        &self.extent
    }
}

impl<S: Storage> Drop for Prepared<'_, S> {
    fn drop(&mut self) {
        match self.stage {
            Stage::Idle => self.format.abort(self.extent, Abort::Ended),
            Stage::Moving => self.format.abort(self.extent, Abort::InFlight),
            Stage::Committed => {}
        }
    }
}
