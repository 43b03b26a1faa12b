//! Whether the crashes of `qcow2_crash` would find what they are for: storages that carry out a
//! wrong order behind the back of a right one, each of which has to be caught within few seeds.
//!
//! A mapper that wrote its tables in the wrong order would look the same from below. What is
//! written late is held back in memory, seen by reads, until after the flush or durable write that
//! should have covered it.

use blockhouse_sim::SimDisk;

use crate::crashed::jury::Jury;
use crate::crashed::{Kind, explore_kind};
use crate::storages::{Broken, Policy};

/// The first of these seeds whose finding contains this word, and the finding. A wrong order may
/// show in other ways first, such as clusters that leak.
fn found_by(policy: Policy, kind: Kind, seeds: u64, word: &str) -> Option<(u64, String)> {
    // Our own check has to be enough.
    static JURY: Jury = Jury::for_one_in(u32::MAX);
    (0..seeds).find_map(|seed| {
        let explored =
            explore_kind(kind, seed, &JURY, |disk| SimDisk::wrapping(Broken::new(disk, policy)));
        let violation = explored.err().filter(|violation| violation.contains(word))?;
        Some((seed, violation))
    })
}

#[test]
fn wrong_policies_are_found_out() {
    for (policy, kinds, word) in [
        (Policy::PlainFua, &[Kind::Plain, Kind::Lazy, Kind::Subclusters][..], ""),
        (Policy::NoFlush, &[Kind::Plain, Kind::Old, Kind::Lazy, Kind::Backed], ""),
        (Policy::RefcountsLate, &[Kind::Plain, Kind::Old, Kind::Backed], "refcount 0"),
        (Policy::DataLate, &[Kind::Plain, Kind::Lazy, Kind::Backed, Kind::Subclusters], ""),
        (Policy::CutTooFar, &[Kind::Plain, Kind::Old], ""),
        (
            Policy::BitsLate,
            &[Kind::Bitmaps, Kind::LazyBitmaps, Kind::RawBitmaps],
            "lacks the change",
        ),
        (
            Policy::BitsLost,
            &[Kind::Bitmaps, Kind::LazyBitmaps, Kind::RawBitmaps],
            "lacks the change",
        ),
        (Policy::EntriesLate, &[Kind::Plain, Kind::Lazy, Kind::Backed, Kind::Subclusters], ""),
    ] {
        for &kind in kinds {
            let Some((seed, violation)) = found_by(policy, kind, 200, word) else {
                panic!("{policy:?} went unnoticed on {kind:?} images");
            };
            let first = violation.lines().next().unwrap_or_default();
            eprintln!("{policy:?} on {kind:?}: seed {seed}: {first}");
        }
    }
}

#[test]
fn the_wrapper_itself_changes_nothing() {
    for kind in [Kind::Plain, Kind::Backed, Kind::Bitmaps, Kind::RawBitmaps] {
        assert_eq!(found_by(Policy::Right, kind, 60, ""), None);
    }
}
