//! Keeps the tables frozen while a transaction runs.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::qcow2::tables::{FreezeState, ThawEvent};
use crate::qcow2::writeback::Metadata;
use crate::qcow2::writeback::WritebackBlock;

/// A guard: the tables are frozen until it is dropped.
pub(super) struct FreezeGuard<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    stage: Stage,
    /// Ends after the freeze: fields are dropped after `drop` has run.
    block: Option<WritebackBlock<'a, S>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The tables in memory are the active tables on disk.
    Building,
    /// The header is being written, so it is unknown which tables are active on disk.
    Switching,
}

impl<'a, S: Storage> FreezeGuard<'a, S> {
    /// Freezes the tables. All dirty metadata is on disk when the function returns.
    ///
    /// # Errors
    /// The failure of an earlier transaction at its last step; storage errors.
    pub(super) async fn freeze(metadata: &'a Metadata<S>) -> Result<Self> {
        {
            let mut state = metadata.lock();
            let state = &mut *state;
            state.tables.freeze.check_known()?;
            if !state.mapping.is_idle() {
                let what = "snapshots cannot be changed while the guest's data is";
                return Err(Error::new(ErrorKind::InvalidInput, what).on(metadata.storage().name()));
            }
            state.tables.freeze = FreezeState::Frozen(ThawEvent::default());
            // The new tables may use the reserved space.
            state.allocator.release_reserve(&mut state.tables);
            state.allocator.drop_end_reserve();
        }
        let mut freeze = Self { metadata, stage: Stage::Building, block: None };
        freeze.block = Some(metadata.block_writeback().await?);
        metadata.writer().drained().await;
        Ok(freeze)
    }

    /// Records that the write which switches the tables begins. From now on it is unknown which
    /// tables are active.
    pub(super) fn begin_switch(&mut self) {
        self.stage = Stage::Switching;
    }

    /// Records that the tables in memory are again the active tables on disk.
    pub(super) fn end_switch(&mut self) {
        self.stage = Stage::Building;
    }
}

impl<S: Storage> Drop for FreezeGuard<'_, S> {
    fn drop(&mut self) {
        let writer = self.metadata.writer();
        if self.stage == Stage::Switching {
            let what = "a change of the snapshots was dropped at its last step";
            // `fail` keeps an earlier error, which is the cause of this error.
            writer.fail(&Error::new(ErrorKind::Io, what).on(writer.storage().name()));
        }
        let mut state = self.metadata.lock();
        state.tables.freeze = match writer.failure() {
            // Either the old or the new tables are active, so neither may be overwritten.
            Some(error) if self.stage == Stage::Switching => {
                FreezeState::Failed(error.duplicate().hint("open the image again"))
            }
            // Writes of a dropped transaction may still be in flight to clusters whose refcounts
            // are 0.
            _ if writer.writes().listen().is_some() => {
                FreezeState::Draining(writer.writes().clone())
            }
            _ => FreezeState::Active,
        };
    }
}
