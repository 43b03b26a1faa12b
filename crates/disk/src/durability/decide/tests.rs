//! Truth tables: every combination of facts matches exactly one row, and gets the row's plan.

use blockhouse_core::{ByteRange, ExtentState};

use super::*;

const ASKED: [Durability; 3] = [Durability::None, Durability::Data, Durability::Full];
const FUA: [Fua; 3] = [Fua::Native, Fua::Emulated, Fua::Ignored];
const EXTENTS: [Extents; 3] = [Extents::Overwrites, Extents::New, Extents::Mixed];
const WRITES: [Writes; 5] = [
    Writes::Counted(1),
    Writes::Counted(MAX_FUA_WRITES),
    Writes::Counted(MAX_FUA_WRITES + 1),
    Writes::Counted(16),
    Writes::Unbounded,
];
const ADVICE: [MetadataSync; 2] = [MetadataSync::Fua, MetadataSync::Flush];

/// Columns: asked, FUA of the storage, change, number of writes, advice of the format; the plan.
/// `*` matches anything.
const PLANS: &str = "
    none  *         *           *     *      | NoSync
    data  ignored   *           *     *      | NoSync
    full  ignored   *           *     *      | NoSync

    full  native    *           *     *      | ThenFlush(Full)
    full  emulated  *           *     *      | ThenFlush(Full)

    data  native    metadata    *     *      | ThenMetadata
    data  emulated  metadata    *     *      | ThenMetadata
    data  native    shared      *     *      | ThenFlush(Data)
    data  emulated  shared      *     *      | ThenFlush(Data)

    data  native    overwrites  few   *      | Fua
    data  native    overwrites  more  *      | Fua
    data  native    overwrites  many  *      | ThenFlush(Data)
    data  emulated  overwrites  *     *      | ThenFlush(Data)

    data  native    new         few   fua    | FuaThenMetadata
    data  native    new         few   flush  | ThenDataAndMetadata
    data  native    new         more  *      | ThenDataAndMetadata
    data  native    new         many  *      | ThenDataAndMetadata
    data  emulated  new         *     *      | ThenDataAndMetadata

    data  native    mixed       few   fua    | FuaThenMetadata
    data  native    mixed       few   flush  | ThenFlush(Data)
    data  native    mixed       more  *      | ThenFlush(Data)
    data  native    mixed       many  *      | ThenFlush(Data)
    data  emulated  mixed       *     *      | ThenFlush(Data)
";

/// Columns: asked, FUA of the storage, "grouped" if group commit applies; the method.
const METHODS: &str = "
    none  *         *        | Plain
    data  ignored   *        | Plain
    full  ignored   *        | Plain
    data  native    alone    | Fua
    data  native    grouped  | PlainThenFlush(Data)
    data  emulated  *        | PlainThenFlush(Data)
    full  native    *        | PlainThenFlush(Full)
    full  emulated  *        | PlainThenFlush(Full)
";

/// Columns: plan; durability of each write, required sync afterwards, whether holes may stay.
const EFFECTS: &str = "
    NoSync               | None None holes
    Fua                  | Data None filled
    FuaThenMetadata      | Data Metadata filled
    ThenMetadata         | None Metadata filled
    ThenDataAndMetadata  | None DataAndMetadata filled
    ThenFlush(Data)      | None Flush(Data) filled
    ThenFlush(Full)      | None Flush(Full) filled
";

/// The result in the only row of `table` that matches `facts`.
fn look_up<'a>(table: &'a str, facts: &[&str]) -> &'a str {
    let rows = table.lines().filter_map(|line| line.split_once('|'));
    let matches = |conditions: &str| {
        let conditions: Vec<_> = conditions.split_whitespace().collect();
        assert_eq!(conditions.len(), facts.len(), "{conditions:?}");
        conditions.iter().zip(facts).all(|(&wanted, fact)| wanted == "*" || wanted == *fact)
    };
    let found: Vec<_> = rows.filter(|(conditions, _)| matches(conditions)).collect();
    assert_eq!(found.len(), 1, "rows for {facts:?}: {found:?}");
    found[0].1.trim()
}

fn name_of_asked(asked: Durability) -> &'static str {
    match asked {
        Durability::None => "none",
        Durability::Data => "data",
        Durability::Full => "full",
    }
}

fn name_of_fua(fua: Fua) -> &'static str {
    match fua {
        Fua::Native => "native",
        Fua::Emulated => "emulated",
        Fua::Ignored => "ignored",
    }
}

fn names_of_change(change: Change) -> (&'static str, &'static str) {
    match change {
        Change::Metadata => ("metadata", "-"),
        Change::SharedFlush => ("shared", "-"),
        Change::Data { extents, writes } => (
            match extents {
                Extents::Overwrites => "overwrites",
                Extents::New => "new",
                Extents::Mixed => "mixed",
            },
            match writes {
                Writes::Counted(count) if count <= 3 => "few",
                Writes::Counted(_) => "more",
                Writes::Unbounded => "many",
            },
        ),
    }
}

#[test]
fn every_combination_of_facts_has_the_plan_of_its_row() {
    let data =
        EXTENTS.iter().flat_map(|&extents| WRITES.map(|writes| Change::Data { extents, writes }));
    let changes: Vec<_> = [Change::Metadata, Change::SharedFlush].into_iter().chain(data).collect();
    let mut combinations = 0;
    for asked in ASKED {
        for fua in FUA {
            for &change in &changes {
                for advice in ADVICE {
                    let (kind, count) = names_of_change(change);
                    let advised = if advice == MetadataSync::Fua { "fua" } else { "flush" };
                    let facts = [name_of_asked(asked), name_of_fua(fua), kind, count, advised];
                    let plan = DurabilityPlan::decide(Facts { asked, fua, change }, || advice);
                    assert_eq!(format!("{plan:?}"), look_up(PLANS, &facts), "{facts:?}");
                    combinations += 1;
                }
            }
        }
    }
    assert_eq!(combinations, 3 * 3 * 17 * 2);
}

#[test]
fn every_write_that_reaches_a_storage_has_the_method_of_its_row() {
    for asked in ASKED {
        for fua in FUA {
            for (crowd, shares_flush) in [("alone", false), ("grouped", true)] {
                let facts = [name_of_asked(asked), name_of_fua(fua), crowd];
                let method = WriteMethod::decide(asked, fua, shares_flush);
                assert_eq!(format!("{method:?}"), look_up(METHODS, &facts), "{facts:?}");
            }
        }
    }
}

#[test]
fn every_plan_has_the_effects_of_its_row() {
    use DurabilityPlan::{
        Fua, FuaThenMetadata, NoSync, ThenDataAndMetadata, ThenFlush, ThenMetadata,
    };
    let full = ThenFlush(SyncMode::Full);
    for plan in [
        NoSync,
        Fua,
        FuaThenMetadata,
        ThenMetadata,
        ThenDataAndMetadata,
        ThenFlush(SyncMode::Data),
        full,
    ] {
        let holes = if plan.may_leave_holes() { "holes" } else { "filled" };
        let effects = format!("{:?} {:?} {holes}", plan.write_durability(), plan.required_sync());
        assert_eq!(effects, look_up(EFFECTS, &[&format!("{plan:?}")]));
    }
}

#[test]
fn the_format_is_asked_only_where_its_advice_matters() {
    for asked in ASKED {
        for fua in FUA {
            for extents in EXTENTS {
                for writes in WRITES {
                    let mut is_asked = false;
                    let change = Change::Data { extents, writes };
                    let _ = DurabilityPlan::decide(Facts { asked, fua, change }, || {
                        is_asked = true;
                        MetadataSync::Flush
                    });
                    let (_, count) = names_of_change(change);
                    let matters = (asked, fua) == (Durability::Data, Fua::Native)
                        && extents != Extents::Overwrites
                        && count == "few";
                    assert_eq!(is_asked, matters, "{asked:?} {fua:?} {change:?}");
                }
            }
        }
    }
}

#[test]
fn the_greater_sync_includes_the_lesser() {
    let ascending = [
        RequiredSync::None,
        RequiredSync::Metadata,
        RequiredSync::DataAndMetadata,
        RequiredSync::Flush(SyncMode::Data),
        RequiredSync::Flush(SyncMode::Full),
    ];
    assert!(ascending.is_sorted());
}

fn extent(flags: ExtentFlags, length: u64) -> Extent {
    let guest = ByteRange::between(0, length);
    Extent { guest, alloc_range: guest, state: ExtentState::Mapped { host: 0 }, flags }
}

#[test]
fn extents_are_taken_together() {
    let (pure, new) = (ExtentFlags::empty(), ExtentFlags::NEW);
    let of = |flags: &[ExtentFlags]| {
        let extents: Vec<_> = flags.iter().map(|&flags| extent(flags, 1)).collect();
        Extents::of(extents.iter())
    };
    assert_eq!(of(&[pure; 9]), Extents::Overwrites);
    assert_eq!(of(&[new, new | ExtentFlags::SHARED]), Extents::New);
    for flags in [[pure, new], [pure, ExtentFlags::DIRTY], [new, ExtentFlags::DIRTY]] {
        assert_eq!(of(&flags), Extents::Mixed);
    }
    assert_eq!(of(&[ExtentFlags::SHARED]), Extents::Mixed);
}

#[test]
fn a_writeback_waits_for_short_plain_writes_that_need_one() {
    let flush = DurabilityPlan::ThenFlush(SyncMode::Data);
    let new = extent(ExtentFlags::NEW, MAX_AWAITED);
    assert!(flush.joins_writeback(&new));
    assert!(DurabilityPlan::ThenDataAndMetadata.joins_writeback(&new));
    assert!(!flush.joins_writeback(&extent(ExtentFlags::NEW, MAX_AWAITED + 1)), "long");
    assert!(!flush.joins_writeback(&extent(ExtentFlags::empty(), 1)), "its mapping is durable");
    for plan in [DurabilityPlan::NoSync, DurabilityPlan::Fua, DurabilityPlan::FuaThenMetadata] {
        assert!(!plan.joins_writeback(&new), "{plan:?}");
    }
}
