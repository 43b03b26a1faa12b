//! Maps guest clusters to host clusters: lookups, and changes that have not taken effect yet.
//!
//! The life cycle of a change:
//!
//! 1. *Prepare* ([`Mapper::map_write`], `map_zero`, `map_discard`, `map_compressed`): the step
//!    allocates what the change needs and locks its guest clusters (`pending_changes`). Lookups do
//!    not see the change: reads use the old mapping.
//! 2. The I/O path moves the data, without the image's lock.
//! 3. *Link* ([`Mapper::link`]): the L2 entries change in memory, and their old clusters are freed
//!    later. Or *abort* ([`Mapper::abort`]): the allocated clusters are free again, or quarantined
//!    if a dropped write may still modify them.
//!
//! The overwrite of a mapped cluster allocates nothing and changes no entry. Overwrites are counted
//! while they are in flight, so that no change frees the cluster meanwhile.
//!
//! Locking: the image has one lock, which protects [`Mapping`], the tables and the allocator; a
//! step borrows all three as a [`Mapper`]. No function here waits. Each request locks its guest
//! clusters in ascending order, so requests do not deadlock.

mod data_file;
mod data_placement;
mod l2_tables;
mod link;
mod map_ahead;
mod pending_changes;
mod preallocated;
mod read;
mod redo;
mod resize;
mod runs_ahead;
mod unmap;
mod write;

use blockhouse_core::{ByteRange, Extent, ExtentFlags, ExtentState, IoVector};

use crate::qcow2::allocator::Allocator;
use crate::qcow2::layout::header::Header;
use crate::qcow2::tables::{Blocked, Step, Tables};

pub(crate) use preallocated::preallocated_offset;
pub(crate) use read::map_read;

use data_placement::DataPlacement;
use pending_changes::PendingChanges;
use runs_ahead::RunsAhead;

/// The changes and overwrites in flight, and the state besides the tables that the mapping depends
/// on; see the module's documentation.
pub(crate) struct Mapping {
    changes: PendingChanges,
    data: DataPlacement,
    runs: RunsAhead,
    /// End of the backing file in bytes: 0 without a backing file; the maximum while the end is
    /// unknown, and before the image gets a backing file.
    backing_end: u64,
}

/// The state that a step of the mapping works on.
pub(crate) struct Mapper<'a> {
    tables: &'a mut Tables,
    allocator: &'a mut Allocator,
    mapping: &'a mut Mapping,
}

impl Mapping {
    /// The mapping of an image with this header.
    pub(crate) fn new(header: &Header) -> Self {
        Self {
            changes: PendingChanges::default(),
            data: DataPlacement::new(header),
            runs: RunsAhead::default(),
            backing_end: if header.backing.is_some() { u64::MAX } else { 0 },
        }
    }

    /// The mapper for a step that changes entries.
    pub(crate) fn mapper<'a>(
        &'a mut self,
        tables: &'a mut Tables,
        allocator: &'a mut Allocator,
    ) -> Mapper<'a> {
        Mapper { tables, allocator, mapping: self }
    }

    /// Sets the end of the backing file, past which the backing file reads as zeros.
    pub(crate) fn set_backing_end(&mut self, end: u64) {
        self.backing_end = end;
    }

    /// Sets the block size in bytes of the data file, which is open.
    pub(crate) fn set_data_block(&mut self, block: u64) {
        self.data.set_block(block);
    }

    /// The memory of a write that carries COW padding: see
    /// [`Format::track_cow_write`](crate::Format::track_cow_write).
    pub(crate) fn track_cow_write(&self, from: IoVector) -> IoVector {
        self.data.track_cow_write(from)
    }

    /// The number of pending changes.
    pub(crate) fn pending_changes(&self) -> usize {
        self.changes.len()
    }

    /// Whether neither changes nor overwrites are in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.changes.is_idle()
    }
}

impl Mapper<'_> {
    /// Whether clusters without an entry are read from a backing file, or will be once the image
    /// gets a backing file.
    fn has_backing(&self) -> bool {
        self.tables.header().backing.is_some() || self.mapping.backing_end > 0
    }

    /// Returns `Blocked` if a writeback must run, or a change must end, before another change is
    /// prepared.
    fn check_room(&mut self) -> Step<()> {
        self.tables.check_dirty_limit()?;
        let checked = self.tables.redo.check_room(self.mapping.changes.len());
        match self.mapping.changes.first() {
            // The prepared changes take all space of the log, and a writeback does not free that
            // space.
            Some(pending) if checked.is_err() && self.tables.redo.is_empty() => {
                Err(Blocked::NoRoom(pending.listen()))
            }
            _ => checked,
        }
    }
}

/// An extent that needs no change.
fn noop_extent(guest: ByteRange) -> Extent {
    Extent { guest, alloc_range: guest, state: ExtentState::Hole, flags: ExtentFlags::empty() }
}
