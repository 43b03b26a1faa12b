//! The content of a disk from one offset on: the answer of each format's look-up.

use blockhouse_core::{ByteRange, Extent, ExtentFlags, ExtentState};

/// Bytes of the disk with one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) state: ExtentState,
    /// How many bytes, at least one.
    pub(super) length: u64,
    /// The range that compressed bytes decompress to; `None` for all other states.
    pub(super) unit: Option<ByteRange>,
}

impl Piece {
    /// Bytes that nothing was written to.
    pub(super) fn hole(length: u64) -> Self {
        Self { state: ExtentState::Hole, length, unit: None }
    }

    /// The same bytes, which the image's parent has.
    pub(super) fn of_parent(self) -> Self {
        Self { state: ExtentState::Backing, ..self }
    }

    /// Bytes that are zeros by the format's word.
    pub(super) fn zero(length: u64) -> Self {
        Self { state: ExtentState::Zero, length, unit: None }
    }

    /// Bytes that are in the file from `host` on.
    pub(super) fn mapped(host: u64, length: u64) -> Self {
        Self { state: ExtentState::Mapped { host }, length, unit: None }
    }

    /// Whether `next`, which follows, can be part of the same extent.
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
