//! Whether the restarts would find what they are for: hosts and redo logs that are wrong on
//! purpose.
//!
//! A format that kept its log wrongly would look the same from outside.

use std::ops::Range;
use std::sync::Arc;

use blockhouse_sim::{Rng, SimDisk, SimMemory};

use super::layout::Layout;
use super::service::{Hardware, State, explore};
use crate::storages::{Broken, Flaw, FlawedMemory, FlawedStorage, Policy};

/// Makes hosts with this flaw.
#[derive(Clone, Copy)]
struct Flawed(Flaw);

impl Hardware for Flawed {
    type Memory = FlawedMemory;

    fn memory(&self, memory: Arc<SimMemory>) -> Arc<FlawedMemory> {
        Arc::new(FlawedMemory::new(memory, self.0))
    }

    fn storage(&self, disk: SimDisk, memory: &Arc<FlawedMemory>) -> SimDisk {
        let policy = match self.0 {
            Flaw::RefcountsLate => Policy::RefcountsLate,
            _ => Policy::Right,
        };
        let disk = Broken::new(disk, policy);
        SimDisk::wrapping(FlawedStorage::new(disk, Arc::clone(memory), self.0))
    }
}

/// The first of these seeds that finds the flaw, and what it found.
fn found_by(flaw: Flaw, mut seeds: Range<u64>) -> Option<(u64, String)> {
    seeds.find_map(|seed| {
        let layout = Layout::qcow2(&mut Rng::with_seed(seed));
        let explored = explore(seed, &layout, State::Kept, Flawed(flaw));
        Some((seed, explored.err()?))
    })
}

#[test]
fn wrong_logs_are_found_out() {
    for (flaw, seeds) in [
        (Flaw::LateAppend, 0..300),
        (Flaw::EarlyTail, 0..600),
        (Flaw::FailedTail, 0..1_000),
        (Flaw::ZeroAsDiscard, 0..2_000),
        (Flaw::RefcountsLate, 0..1_200),
        (Flaw::NoReplay, 0..300),
    ] {
        let Some((seed, violation)) = found_by(flaw, seeds.clone()) else {
            panic!("{flaw:?} went unnoticed for the seeds {seeds:?}");
        };
        let first = violation.lines().next().unwrap_or_default();
        eprintln!("{flaw:?}: seed {seed}: {first}");
    }
}

#[test]
fn the_wrappers_themselves_change_nothing() {
    assert_eq!(found_by(Flaw::None, 0..60), None);
}
