//! The durability decision: from facts to a plan, without any effect.
//!
//! [`DurabilityPlan::decide`] is called once for the writes of a request:
//!
//! - If all extents are known and pure overwrites, and the storage has FUA, the data is written
//!   with FUA: one operation for each extent, and no sync afterwards.
//! - If metadata must follow (for new space, or for an overwrite whose own mapping is not durable
//!   yet), the format advises the cheaper method. For a single write, FUA for the data and then for
//!   the metadata is cheaper; for many writes, plain writes and one shared flush.
//! - Zero writes and discards that change only metadata need only a metadata sync. Plain writes
//!   into new space need only the sync of their metadata, too, because the format flushes data
//!   before it writes a table entry that refers to the data.
//! - In every other case the data is written without FUA and one flush follows. `Full` always ends
//!   in a full sync, because FUA makes only data durable.
//! - If durability is ignored (`--cache unsafe`), nothing follows.
//!
//! [`WriteMethod::decide`] is called for each write that reaches a storage. If many durable writes
//! are in flight, one flush for all can be cheaper than FUA for each (group commit).

use blockhouse_core::{Durability, Extent, ExtentFlags, Fua, SyncMode};
use blockhouse_format::MetadataSync;

/// Maximum number of extents that are each written with FUA if metadata must follow. More extents
/// are written without FUA and share one flush. Pure overwrites have no maximum.
const MAX_FUA_WRITES: usize = 3;

/// Maximum bytes of a write that a metadata writeback waits for. A longer write takes as long as a
/// second writeback.
const MAX_AWAITED: u64 = 256 << 10;

/// The facts that the decision for a request depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// The required durability: the greater of the request's and that of the disk's options.
    pub(super) asked: Durability,
    /// The support for FUA of the storage that has the data.
    pub(super) fua: Fua,
    pub(super) change: Change,
}

/// The change of the image by a request or by a part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Only the format's metadata changes.
    Metadata,
    /// Operations without FUA (the storage's zero writes and discards), or many operations that
    /// share one flush.
    SharedFlush,
    /// Data is written.
    Data { extents: Extents, writes: Writes },
}

/// The kind of the extents that data is written to, all taken together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extents {
    /// All are [pure overwrites](Extent::is_pure_overwrite).
    Overwrites,
    /// All are `NEW`: no durable mapping refers to them.
    New,
    /// Anything else.
    Mixed,
}

impl Extents {
    pub(super) fn of<'a>(extents: impl Iterator<Item = &'a Extent> + Clone) -> Self {
        if extents.clone().all(Extent::is_pure_overwrite) {
            Self::Overwrites
        } else if extents.clone().all(|extent| extent.flags.contains(ExtentFlags::NEW)) {
            Self::New
        } else {
            Self::Mixed
        }
    }
}

/// The number of writes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writes {
    /// The number of extents, all of which are known.
    Counted(usize),
    /// Many, because the request is written part by part.
    Unbounded,
}

/// How the writes of a request become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DurabilityPlan {
    /// No durability is required.
    NoSync,
    /// Each write has FUA.
    Fua,
    /// Each write has FUA, and a metadata sync follows.
    FuaThenMetadata,
    /// No data is written; a metadata sync follows.
    ThenMetadata,
    /// Plain writes into new space, and a sync of the data and its metadata follows.
    ThenDataAndMetadata,
    /// Plain writes, and a flush follows.
    ThenFlush(SyncMode),
}

impl DurabilityPlan {
    /// Chooses the plan. `metadata_sync` returns the format's advice for metadata that follows
    /// data. The function is called at most once, and only if its result matters, because it takes
    /// the format's lock.
    pub(super) fn decide(facts: Facts, metadata_sync: impl FnOnce() -> MetadataSync) -> Self {
        match facts {
            Facts { asked: Durability::None, .. } | Facts { fua: Fua::Ignored, .. } => Self::NoSync,
            Facts { asked: Durability::Full, .. } => Self::ThenFlush(SyncMode::Full),
            Facts { change: Change::Metadata, .. } => Self::ThenMetadata,
            Facts { change: Change::SharedFlush, .. } => Self::ThenFlush(SyncMode::Data),
            Facts { fua, change: Change::Data { extents, writes }, .. } => {
                Self::of_data(fua, extents, writes, metadata_sync)
            }
        }
    }

    fn of_data(
        fua: Fua,
        extents: Extents,
        writes: Writes,
        metadata_sync: impl FnOnce() -> MetadataSync,
    ) -> Self {
        match (fua, extents, writes) {
            (Fua::Native, Extents::Overwrites, Writes::Counted(_)) => Self::Fua,
            (Fua::Native, _, Writes::Counted(count))
                if count <= MAX_FUA_WRITES && metadata_sync() == MetadataSync::Fua =>
            {
                Self::FuaThenMetadata
            }
            (_, Extents::New, _) => Self::ThenDataAndMetadata,
            _ => Self::ThenFlush(SyncMode::Data),
        }
    }

    /// The durability of each write of data.
    pub(crate) fn write_durability(self) -> Durability {
        match self {
            Self::Fua | Self::FuaThenMetadata => Durability::Data,
            Self::NoSync | Self::ThenMetadata | Self::ThenDataAndMetadata | Self::ThenFlush(_) => {
                Durability::None
            }
        }
    }

    /// The work that is left after the writes.
    pub(super) fn required_sync(self) -> RequiredSync {
        match self {
            Self::NoSync | Self::Fua => RequiredSync::None,
            Self::FuaThenMetadata | Self::ThenMetadata => RequiredSync::Metadata,
            Self::ThenDataAndMetadata => RequiredSync::DataAndMetadata,
            Self::ThenFlush(sync) => RequiredSync::Flush(sync),
        }
    }

    /// Whether a metadata writeback of another request should wait for a write to `extent`. Reason:
    /// the write requires a writeback too, and one writeback can serve both requests.
    pub(crate) fn joins_writeback(self, extent: &Extent) -> bool {
        let is_plain = matches!(self, Self::ThenDataAndMetadata | Self::ThenFlush(_));
        is_plain && !extent.is_pure_overwrite() && extent.guest.length() <= MAX_AWAITED
    }

    /// Whether a write into new space that reads as zeros may leave holes of the host file around
    /// the written bytes. False for durable writes, because each later FUA write to a hole costs a
    /// transaction of the host file system's journal.
    pub(crate) fn may_leave_holes(self) -> bool {
        self == Self::NoSync
    }
}

/// The sync that a request still requires after its writes. Ordered: a greater sync includes all
/// lesser ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[must_use]
pub(crate) enum RequiredSync {
    #[default]
    None,
    /// A sync of the format's metadata alone, because the data is durable already.
    Metadata,
    /// A sync of the format's metadata, after a flush of the data that only this metadata refers
    /// to.
    DataAndMetadata,
    /// A flush.
    Flush(SyncMode),
}

/// How one write reaches the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteMethod {
    /// Without FUA.
    Plain,
    /// With FUA.
    Fua,
    /// Without FUA, followed by a flush that many writes can share.
    PlainThenFlush(SyncMode),
}

impl WriteMethod {
    /// The method of a write with the durability `asked`. `shares_flush` says whether one flush for
    /// several writes in flight is cheaper than FUA for each.
    pub(super) fn decide(asked: Durability, fua: Fua, shares_flush: bool) -> Self {
        match (asked, fua) {
            (Durability::None, _) | (_, Fua::Ignored) => Self::Plain,
            (Durability::Data, Fua::Native) if !shares_flush => Self::Fua,
            (Durability::Data, _) => Self::PlainThenFlush(SyncMode::Data),
            (Durability::Full, _) => Self::PlainThenFlush(SyncMode::Full),
        }
    }
}

#[cfg(test)]
mod tests;
