//! The same random operations have the same outcome on every engine, and that of a plain model.

use std::ops::Range;

use blockhouse_core::{Allocation, ByteRange, Durability, Error, Storage, SyncMode, Unmap};
use blockhouse_engine::{EngineChoice, EventLoop, HostFile, PageCache, spawn};
use fastrand::Rng;

use crate::common::memory::Memory;
use crate::common::seeds::for_seeds;
use crate::common::{for_every_choice, in_time, write};

/// The range of operations: some of it lies past the end of the file.
const SPACE: usize = 1 << 19;
const BLOCK: usize = 4096;

#[derive(Clone, Debug)]
enum Step {
    Read { at: Range<usize>, piece: usize },
    Write { at: Range<usize>, piece: usize, byte: u8, durability: Durability },
    Zero { at: Range<usize>, unmap: Unmap },
    Discard { at: Range<usize> },
    Status { at: Range<usize> },
    Flush(SyncMode),
    Resize(usize),
}

/// The outcome of a step, as far as it must be the same everywhere.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Done,
    Bytes(Vec<u8>),
    /// Nothing is stored in the first this many bytes.
    Hole(usize),
    Failed(i32),
}

/// Steps that run at the same time, each in a part of the space of its own.
fn round(rng: &mut Rng, unit: usize) -> Vec<Step> {
    if rng.u8(..10) == 0 {
        return vec![Step::Resize(rng.usize(..=SPACE / BLOCK) * BLOCK)];
    }
    let lanes = rng.usize(1..=8);
    let lane = SPACE / lanes / BLOCK * BLOCK;
    (0..lanes).map(|index| step(rng, index * lane..(index + 1) * lane, unit)).collect()
}

fn step(rng: &mut Rng, lane: Range<usize>, unit: usize) -> Step {
    let [a, b] = [(); 2].map(|()| rng.usize(lane.start / unit..lane.end / unit));
    let at = a.min(b) * unit..(a.max(b) + 1) * unit;
    let piece = [300, 4096, 16384, SPACE][rng.usize(..4)].max(unit);
    let durability = [Durability::None, Durability::Data, Durability::Full][rng.usize(..3)];
    let unmap = if rng.bool() { Unmap::Allowed } else { Unmap::Forbidden };
    match rng.u8(..20) {
        0..7 => Step::Read { at, piece },
        7..14 => Step::Write { at, piece, byte: rng.u8(1..), durability },
        14..16 => Step::Zero { at, unmap },
        16 => Step::Discard { at },
        17..19 => Step::Status { at },
        _ => Step::Flush(if rng.bool() { SyncMode::Data } else { SyncMode::Full }),
    }
}

async fn perform(file: &HostFile, step: Step) -> Outcome {
    let range = |at: &Range<usize>| ByteRange::between(at.start as u64, at.end as u64);
    let done = |result: Result<(), Error>| match result {
        Ok(()) => Outcome::Done,
        Err(error) => Outcome::Failed(error.errno()),
    };
    match step {
        Step::Read { at, piece } => {
            let memory = Memory::with(&vec![0xee; at.len()]);
            match file.read(at.start as u64, memory.vector(piece)).await {
                Ok(()) => Outcome::Bytes(memory.bytes()),
                Err(error) => Outcome::Failed(error.errno()),
            }
        }
        Step::Write { at, piece, byte, durability } => {
            let memory = Memory::with(&vec![byte; at.len()]);
            done(write(file, at.start as u64, memory.vector(piece), durability).await)
        }
        Step::Zero { at, unmap } => done(file.write_zeroes(range(&at), unmap).await),
        Step::Discard { at } => done(file.discard(range(&at)).await),
        Step::Status { at } => match file.block_status(range(&at)).await {
            Ok((Allocation::Data, _)) => Outcome::Done,
            Ok((Allocation::Hole, length)) => Outcome::Hole(length as usize),
            Err(error) => Outcome::Failed(error.errno()),
        },
        Step::Flush(sync) => done(file.flush(sync).await),
        Step::Resize(size) => done(file.resize(size as u64).await),
    }
}

/// The file as it must be, and whether an outcome fits it.
struct Model(Vec<u8>);

impl Model {
    fn check(&mut self, step: &Step, outcome: &Outcome) {
        match (step, outcome) {
            // An operation that the file system below cannot do leaves everything as it was.
            (Step::Zero { .. } | Step::Discard { .. }, Outcome::Failed(95 /* EOPNOTSUPP */)) => {}
            (_, Outcome::Failed(code)) => panic!("{step:?} failed with {code}"),
            (Step::Read { at, .. }, Outcome::Bytes(bytes)) => {
                assert!(*bytes == self.bytes(at), "{step:?} gave other bytes");
            }
            (Step::Status { at }, Outcome::Hole(length)) => {
                let hole = self.bytes(&(at.start..at.start + length));
                assert!(hole.iter().all(|&byte| byte == 0), "{step:?} found a hole in data");
            }
            (Step::Write { at, byte, .. }, _) => {
                let size = self.0.len().max(at.end);
                self.0.resize(size, 0);
                self.0[at.clone()].fill(*byte);
            }
            (Step::Zero { at, .. } | Step::Discard { at }, _) => {
                let size = self.0.len();
                self.0[at.start.min(size)..at.end.min(size)].fill(0);
            }
            (Step::Resize(size), _) => self.0.resize(*size, 0),
            _ => {}
        }
    }

    /// With zeros past the end.
    fn bytes(&self, at: &Range<usize>) -> Vec<u8> {
        let size = self.0.len();
        let mut bytes = self.0[at.start.min(size)..at.end.min(size)].to_vec();
        bytes.resize(at.len(), 0);
        bytes
    }
}

fn run(choice: EngineChoice, cache: PageCache, rounds: &[Vec<Step>]) -> Vec<Outcome> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let size = SPACE / 2;
    let file = HostFile::create(&folder.path().join("disk"), size as u64, cache).unwrap();
    let file = std::rc::Rc::new(file);
    let mut model = Model(vec![0; size]);
    let mut outcomes = Vec::new();
    EventLoop::new(choice).unwrap().block_on(async {
        for steps in rounds {
            let start = |step: &Step| {
                let (file, step) = (std::rc::Rc::clone(&file), step.clone());
                spawn(async move { perform(&file, step).await })
            };
            let tasks: Vec<_> = steps.iter().map(start).collect();
            let mut of_round = Vec::new();
            for task in tasks {
                of_round.push(task.await);
            }
            // Reads first: the steps of a round touch different bytes, but not different sizes.
            let order = |pair: &(&Step, &Outcome)| !matches!(pair.0, Step::Read { .. });
            let mut pairs: Vec<_> = steps.iter().zip(&of_round).collect();
            pairs.sort_by_key(order);
            pairs.into_iter().for_each(|(step, outcome)| model.check(step, outcome));
            assert_eq!(file.size(), model.0.len() as u64, "after {steps:?}");
            outcomes.append(&mut of_round);
        }
    });
    let on_disk = std::fs::read(file.name()).unwrap();
    assert!(on_disk == model.0, "the file holds something else in the end");
    outcomes
}

fn compare(target_test: &str, cache: PageCache, unit: usize) {
    for_seeds("differential", target_test, 4, |rng| {
        let rounds: Vec<Vec<Step>> = (0..30).map(|_| round(rng, unit)).collect();
        let mut first = None;
        for_every_choice(|choice| {
            let outcomes = in_time({
                let rounds = rounds.clone();
                move || run(choice, cache, &rounds)
            });
            // Where the data has been written back decides what is a hole.
            let known = |outcome: &Outcome| !matches!(outcome, Outcome::Hole(_) | Outcome::Done);
            let outcomes: Vec<Outcome> = outcomes.into_iter().filter(known).collect();
            let first = first.get_or_insert_with(|| outcomes.clone());
            assert!(*first == outcomes, "{choice:?} had other outcomes than the engine before");
        });
    });
}

#[test]
fn engines_agree_through_the_page_cache() {
    compare("engines_agree_through_the_page_cache", PageCache::Used, 1);
}

#[test]
fn engines_agree_around_the_page_cache() {
    compare("engines_agree_around_the_page_cache", PageCache::Bypassed, BLOCK);
}
