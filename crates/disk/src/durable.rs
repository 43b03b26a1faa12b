//! The durability decision: how a request's `Durability` becomes operations on the storage.
//!
//! A request for `Data` whose extents are all plain overwrites travels as FUA where the storage has
//! that: one operation for each extent, nothing follows. Where tables have to follow (new space, or
//! an overwrite whose own mapping is not durable yet), the format says what is cheaper: the data by
//! FUA, then the tables by FUA (`sync_metadata`), for a lone write; or plain writes and one flush that
//! many share. What only tables say (zeros, discards) is durable with the tables alone, and so is
//! data that went down plainly into new space: tables that refer to it are written behind a flush.
//! In every other case the data goes down plainly, the mapping is committed, and one flush of the
//! right depth is owed at the end. `Full` is always a full sync. A storage without any stable place
//! (`--cache unsafe`) is owed nothing.
//!
//! Whether an owed flush costs anything is decided one step below, in [`crate::generations`].

use blockhouse_core::{Durability, Extent, ExtentFlags, Fua, Result, Storage, SyncMode};
use blockhouse_format::MetadataSync;

use crate::Disk;

/// Up to how many extents go down by FUA each where a flush could do for all of them.
const FEW: usize = 3;

/// How the writes of one request become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// They need not.
    Plain,
    /// Each carries it.
    Fua,
    /// Each carries it, and the tables follow.
    FuaThenTables,
    /// By a flush after all of them.
    ThenFlush(SyncMode),
}

/// What a request still owes when its operations are through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[must_use]
pub(crate) enum Debt {
    #[default]
    Nothing,
    /// The format's tables, and only them: its data is durable.
    Tables,
    /// The format's tables and, before them, the data that only they refer to.
    TablesAndData,
    /// A flush.
    Flush(SyncMode),
}

impl Plan {
    /// For writes of data to these extents. `cheaper` is asked only where tables have to follow.
    pub(crate) fn for_writes<'a>(
        durability: Durability,
        fua: Fua,
        extents: impl ExactSizeIterator<Item = &'a Extent> + Clone,
        cheaper: impl FnOnce() -> MetadataSync,
    ) -> Self {
        match (durability, fua) {
            (Durability::Data, Fua::Native) if extents.clone().all(Extent::is_pure_overwrite) => {
                Self::Fua
            }
            (Durability::Data, Fua::Native)
                if extents.len() <= FEW && cheaper() == MetadataSync::Fua =>
            {
                Self::FuaThenTables
            }
            _ => Self::without_fua(durability, fua),
        }
    }

    /// For operations that cannot carry durability: zero writes, discards, and the pieces of a
    /// request that is written bit by bit, which share one flush.
    pub(crate) fn without_fua(durability: Durability, fua: Fua) -> Self {
        match (durability, fua) {
            (Durability::None, _) | (_, Fua::Ignored) => Self::Plain,
            (Durability::Data, _) => Self::ThenFlush(SyncMode::Data),
            (Durability::Full, _) => Self::ThenFlush(SyncMode::Full),
        }
    }

    /// What each write carries.
    pub(crate) fn of_each_write(self) -> Durability {
        match self {
            Self::Fua | Self::FuaThenTables => Durability::Data,
            Self::Plain | Self::ThenFlush(_) => Durability::None,
        }
    }

    /// What is left to do after the writes.
    pub(crate) fn debt(self) -> Debt {
        match self {
            Self::Plain | Self::Fua => Debt::Nothing,
            Self::FuaThenTables => Debt::Tables,
            Self::ThenFlush(sync) => Debt::Flush(sync),
        }
    }

    /// As [`debt`](Self::debt), of writes of data to these extents and nothing else.
    pub(crate) fn debt_for<'a>(self, mut extents: impl Iterator<Item = &'a Extent>) -> Debt {
        let is_new = |extent: &Extent| extent.flags.contains(ExtentFlags::NEW);
        match self {
            Self::ThenFlush(SyncMode::Data) if extents.all(is_new) => Debt::TablesAndData,
            _ => self.debt(),
        }
    }
}

impl Debt {
    /// Of a change that moved no data: the tables say all of it.
    pub(crate) fn of_tables(durability: Durability, fua: Fua) -> Self {
        match Plan::without_fua(durability, fua) {
            Plan::ThenFlush(SyncMode::Data) => Self::Tables,
            plan => plan.debt(),
        }
    }

    /// The debt of two parts of a request: one payment, as deep as the deeper one.
    pub(crate) fn and(self, other: Self) -> Self {
        self.max(other)
    }
}

impl<S: Storage> Disk<S> {
    /// Pays what a request owes.
    pub(crate) async fn pay(&self, debt: Debt) -> Result<()> {
        match debt {
            Debt::Nothing => Ok(()),
            Debt::Tables => {
                self.format.sync_metadata().await?;
                self.check_failure()
            }
            Debt::TablesAndData => {
                self.format.sync_data_and_metadata().await?;
                self.check_failure()
            }
            Debt::Flush(sync) => self.format.flush(sync).await,
        }
    }

    /// Where there were no tables to write, nobody has looked yet.
    fn check_failure(&self) -> Result<()> {
        self.storage().check_failure()?;
        self.format.storage().check_failure()
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_core::{ByteRange, ExtentState};

    use super::*;

    const PURE: ExtentFlags = ExtentFlags::empty();
    const NEW: ExtentFlags = ExtentFlags::NEW;

    fn mapped(&flags: &ExtentFlags) -> Extent {
        Extent {
            guest: ByteRange::between(0, 1),
            alloc_range: ByteRange::between(0, 1),
            state: ExtentState::Mapped { host: 0 },
            flags,
        }
    }

    fn plan(durability: Durability, fua: Fua, extents: &[ExtentFlags]) -> Plan {
        plan_with(durability, fua, extents, MetadataSync::Flush)
    }

    fn plan_with(
        durability: Durability,
        fua: Fua,
        extents: &[ExtentFlags],
        cheaper: MetadataSync,
    ) -> Plan {
        let extents: Vec<_> = extents.iter().map(mapped).collect();
        Plan::for_writes(durability, fua, extents.iter(), || cheaper)
    }

    #[test]
    fn only_pure_overwrites_on_native_fua_travel_as_fua_alone() {
        assert_eq!(plan(Durability::Data, Fua::Native, &[PURE; 9]), Plan::Fua);
        assert_eq!(
            plan(Durability::Data, Fua::Native, &[PURE, NEW]),
            Plan::ThenFlush(SyncMode::Data)
        );
        assert_eq!(plan(Durability::Data, Fua::Emulated, &[PURE]), Plan::ThenFlush(SyncMode::Data));
    }

    #[test]
    fn tables_follow_by_fua_where_the_format_calls_that_cheaper() {
        let by_fua = |durability, fua, extents: &[ExtentFlags]| {
            plan_with(durability, fua, extents, MetadataSync::Fua)
        };
        for flags in [NEW, ExtentFlags::DIRTY, NEW | ExtentFlags::SHARED] {
            let plan = by_fua(Durability::Data, Fua::Native, &[PURE, flags]);
            assert_eq!(plan, Plan::FuaThenTables);
            assert_eq!((plan.of_each_write(), plan.debt()), (Durability::Data, Debt::Tables));
        }
        let flush = Plan::ThenFlush(SyncMode::Data);
        assert_eq!(by_fua(Durability::Data, Fua::Native, &[NEW; FEW + 1]), flush);
        assert_eq!(by_fua(Durability::Data, Fua::Emulated, &[NEW]), flush);
        assert_eq!(by_fua(Durability::None, Fua::Native, &[NEW]), Plan::Plain);
    }

    #[test]
    fn full_is_never_an_answer_of_fua() {
        let full = Plan::ThenFlush(SyncMode::Full);
        for fua in [Fua::Native, Fua::Emulated] {
            for flags in [PURE, NEW] {
                for cheaper in [MetadataSync::Fua, MetadataSync::Flush] {
                    assert_eq!(plan_with(Durability::Full, fua, &[flags], cheaper), full);
                }
            }
            assert_eq!(Plan::without_fua(Durability::Full, fua), full);
            assert_eq!(Debt::of_tables(Durability::Full, fua), Debt::Flush(SyncMode::Full));
        }
    }

    #[test]
    fn nothing_is_owed_without_a_stable_place_or_a_wish() {
        for durability in [Durability::None, Durability::Data, Durability::Full] {
            assert_eq!(plan(durability, Fua::Ignored, &[PURE]), Plan::Plain);
            assert_eq!(Plan::without_fua(durability, Fua::Ignored), Plan::Plain);
            assert_eq!(Debt::of_tables(durability, Fua::Ignored), Debt::Nothing);
        }
        assert_eq!(plan(Durability::None, Fua::Native, &[NEW]), Plan::Plain);
        assert_eq!(Debt::of_tables(Durability::None, Fua::Native), Debt::Nothing);
    }

    #[test]
    fn data_in_new_space_is_durable_with_the_tables_that_refer_to_it() {
        let debt = |plan: Plan, flags: &[ExtentFlags]| {
            let extents: Vec<_> = flags.iter().map(mapped).collect();
            plan.debt_for(extents.iter())
        };
        let (data, full) = (Plan::ThenFlush(SyncMode::Data), Plan::ThenFlush(SyncMode::Full));
        assert_eq!(debt(data, &[NEW, NEW | ExtentFlags::SHARED]), Debt::TablesAndData);
        assert_eq!(debt(data, &[NEW, PURE]), Debt::Flush(SyncMode::Data));
        assert_eq!(debt(data, &[ExtentFlags::DIRTY]), Debt::Flush(SyncMode::Data));
        assert_eq!(debt(full, &[NEW]), Debt::Flush(SyncMode::Full));
        assert_eq!(debt(Plan::FuaThenTables, &[NEW]), Debt::Tables);
        assert_eq!(debt(Plan::Plain, &[NEW]), Debt::Nothing);
    }

    #[test]
    fn parts_of_a_request_share_the_deeper_payment() {
        let (data, full) = (Plan::ThenFlush(SyncMode::Data), Plan::ThenFlush(SyncMode::Full));
        assert_eq!(data.debt().and(full.debt()), Debt::Flush(SyncMode::Full));
        assert_eq!(Plan::FuaThenTables.debt().and(data.debt()), Debt::Flush(SyncMode::Data));
        assert_eq!(Debt::TablesAndData.and(Debt::Tables), Debt::TablesAndData);
        assert_eq!(Debt::TablesAndData.and(data.debt()), Debt::Flush(SyncMode::Data));
        assert_eq!(Plan::Fua.debt().and(Plan::FuaThenTables.debt()), Debt::Tables);
        assert_eq!(Plan::Fua.debt().and(Plan::Plain.debt()), Debt::Nothing);
    }
}
