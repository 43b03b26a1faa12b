//! The content of a disk from one offset on: the result of each format's lookup.

use blockhouse_core::{ByteRange, Extent, ExtentFlags, ExtentState};

/// Consecutive bytes of the disk with one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) state: ExtentState,
    /// The number of bytes, at least one.
    pub(super) length: u64,
    /// The guest range of the compressed unit; `None` for all other states.
    pub(super) unit: Option<ByteRange>,
}

impl Piece {
    /// Bytes that were never written.
    pub(super) fn hole(length: u64) -> Self {
        Self { state: ExtentState::Hole, length, unit: None }
    }

    /// The same bytes, with their data in the image's parent.
    pub(super) fn of_parent(self) -> Self {
        Self { state: ExtentState::Backing, ..self }
    }

    /// Bytes that the image's metadata defines as zeros.
    pub(super) fn zero(length: u64) -> Self {
        Self { state: ExtentState::Zero, length, unit: None }
    }

    /// Bytes that are in the file from `host` on.
    pub(super) fn mapped(host: u64, length: u64) -> Self {
        Self { state: ExtentState::Mapped { host }, length, unit: None }
    }

    /// Whether `next`, the piece that follows this one, can be part of the same extent.
    pub(super) fn continues_as(&self, next: &Self) -> bool {
        match (self.state, next.state) {
            (ExtentState::Hole, ExtentState::Hole)
            | (ExtentState::Zero, ExtentState::Zero)
            | (ExtentState::Backing, ExtentState::Backing) => true,
            (ExtentState::Mapped { host }, ExtentState::Mapped { host: next }) => {
                host.checked_add(self.length) == Some(next)
            }
            _ => false,
        }
    }

    /// The extent of the first bytes of `range`, which begins with this piece.
    pub(super) fn extent(&self, range: ByteRange) -> Extent {
        let guest = range.truncate(self.length);
        let alloc_range = self.unit.unwrap_or(guest);
        Extent { guest, alloc_range, state: self.state, flags: ExtentFlags::empty() }
    }
}
