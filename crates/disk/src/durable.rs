//! The durability decision: how a request's `Durability` becomes operations on the storage.
//!
//! A request for `Data` whose extents are all plain overwrites travels as FUA where the storage has
//! that: one operation, nothing follows. In every other case the data goes down plainly, the
//! mapping is committed, and one flush of the right depth is owed at the end. `Full` is always a
//! full sync. A storage without any stable place (`--cache unsafe`) is owed nothing.
//!
//! Whether an owed flush costs anything is decided one step below, in [`crate::generations`].

use blockhouse_core::{Durability, Extent, Fua, Sync};

/// How the writes of one request become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// They need not.
    Plain,
    /// Each carries it.
    Fua,
    /// By a flush after all of them.
    ThenFlush(Sync),
}

/// The flush that a request still owes when its operations are through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[must_use]
pub(crate) struct Debt(Option<Sync>);

impl Plan {
    /// For writes of data to these extents.
    pub(crate) fn for_writes<'a>(
        durability: Durability,
        fua: Fua,
        mut extents: impl Iterator<Item = &'a Extent>,
    ) -> Self {
        match (durability, fua) {
            (Durability::Data, Fua::Native) if extents.all(Extent::is_pure_overwrite) => Self::Fua,
            _ => Self::without_fua(durability, fua),
        }
    }

    /// For operations that cannot carry durability: zero writes, discards, and the pieces of a
    /// request that is written bit by bit, which share one flush.
    pub(crate) fn without_fua(durability: Durability, fua: Fua) -> Self {
        match (durability, fua) {
            (Durability::None, _) | (_, Fua::None) => Self::Plain,
            (Durability::Data, _) => Self::ThenFlush(Sync::Data),
            (Durability::Full, _) => Self::ThenFlush(Sync::Full),
        }
    }

    /// What each write carries.
    pub(crate) fn of_each_write(self) -> Durability {
        match self {
            Self::Fua => Durability::Data,
            Self::Plain | Self::ThenFlush(_) => Durability::None,
        }
    }

    /// What is left to do after the writes.
    pub(crate) fn debt(self) -> Debt {
        match self {
            Self::Plain | Self::Fua => Debt::NOTHING,
            Self::ThenFlush(sync) => Debt(Some(sync)),
        }
    }
}

impl Debt {
    pub(crate) const NOTHING: Self = Self(None);

    /// The debt of two parts of a request: one flush, as deep as the deeper one.
    pub(crate) fn and(self, other: Self) -> Self {
        self.max(other)
    }

    /// The flush that settles it.
    pub(crate) fn flush(self) -> Option<Sync> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_core::{ByteRange, ExtentFlags, ExtentState};

    use super::*;

    const PURE: ExtentFlags = ExtentFlags::empty();
    const NEW: ExtentFlags = ExtentFlags::NEW;

    fn plan(durability: Durability, fua: Fua, extents: &[ExtentFlags]) -> Plan {
        let mapped = |&flags| Extent {
            guest: ByteRange::between(0, 1),
            whole: ByteRange::between(0, 1),
            state: ExtentState::Mapped { host: 0 },
            flags,
        };
        let extents: Vec<_> = extents.iter().map(mapped).collect();
        Plan::for_writes(durability, fua, extents.iter())
    }

    #[test]
    fn only_pure_overwrites_on_native_fua_travel_as_fua() {
        assert_eq!(plan(Durability::Data, Fua::Native, &[PURE, PURE]), Plan::Fua);
        assert_eq!(plan(Durability::Data, Fua::Native, &[PURE, NEW]), Plan::ThenFlush(Sync::Data));
        assert_eq!(plan(Durability::Data, Fua::Emulated, &[PURE]), Plan::ThenFlush(Sync::Data));
    }

    #[test]
    fn full_is_never_an_answer_of_fua() {
        for fua in [Fua::Native, Fua::Emulated] {
            assert_eq!(plan(Durability::Full, fua, &[PURE]), Plan::ThenFlush(Sync::Full));
            assert_eq!(Plan::without_fua(Durability::Full, fua), Plan::ThenFlush(Sync::Full));
        }
    }

    #[test]
    fn nothing_is_owed_without_a_stable_place_or_a_wish() {
        for durability in [Durability::None, Durability::Data, Durability::Full] {
            assert_eq!(plan(durability, Fua::None, &[PURE]), Plan::Plain);
            assert_eq!(Plan::without_fua(durability, Fua::None), Plan::Plain);
        }
        assert_eq!(plan(Durability::None, Fua::Native, &[NEW]), Plan::Plain);
    }

    #[test]
    fn parts_of_a_request_share_the_deeper_flush() {
        let (data, full) = (Plan::ThenFlush(Sync::Data), Plan::ThenFlush(Sync::Full));
        assert_eq!(data.debt().and(full.debt()).flush(), Some(Sync::Full));
        assert_eq!(Plan::Fua.debt().and(data.debt()).flush(), Some(Sync::Data));
        assert_eq!(Plan::Fua.debt().and(Plan::Plain.debt()).flush(), None);
    }
}
