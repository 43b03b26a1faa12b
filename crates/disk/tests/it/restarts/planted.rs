//! Whether the restarts would find what they are for: hosts and redo logs that are wrong on purpose.
//!
//! A format that kept its log wrongly would look the same from outside.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, IoVector, Result, StateMemory, Storage,
    SyncMode, Unmap,
};
use blockhouse_sim::{Rng, SimDisk, SimMemory};

use super::layout::Layout;
use super::log_words::{
    FIRST_RECORD, HEAD, KIND_SHIFT, MAGIC, SET, TAIL, WORDS_PER_RECORD, ZERO_KEEPING_HOST,
};
use super::service::{Hardware, State, explore};
use crate::qcow2_planted::{Broken, Policy};

/// What is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    /// Nothing: the wrappers themselves change no outcome.
    None,
    /// A record becomes valid with the next one: after its request was answered.
    LateAppend,
    /// The log is emptied when a writeback begins.
    EarlyTail,
    /// The log is emptied when a write of the image has failed, as one of a writeback may.
    FailedTail,
    /// Zeros that keep their host cluster are replayed as a discard.
    ZeroAsDiscard,
    /// A replay sets entries before it has the refcounts on disk.
    RefcountsLate,
    /// Nothing is replayed.
    NoReplay,
}

/// The memory, as the format sees it.
struct FlawedMemory {
    memory: Arc<SimMemory>,
    flaw: Flaw,
    /// The head that the format has stored.
    head: AtomicU64,
    /// Whether a log was attached: the replay is over.
    is_attached: AtomicBool,
}

impl FlawedMemory {
    /// Drops all records.
    fn empty(&self) {
        self.memory.store(TAIL, self.memory.load(HEAD));
    }
}

impl StateMemory for FlawedMemory {
    fn words(&self) -> usize {
        self.memory.words()
    }

    fn load(&self, index: usize) -> u64 {
        let word = self.memory.load(index);
        let is_kind = index >= FIRST_RECORD && (index - FIRST_RECORD) % WORDS_PER_RECORD == 1;
        match self.flaw {
            Flaw::NoReplay if index == HEAD => self.memory.load(TAIL),
            Flaw::ZeroAsDiscard if is_kind && word >> KIND_SHIFT == ZERO_KEEPING_HOST => {
                // With an entry of zeros: unallocated.
                word & u64::from(u32::MAX) | SET << KIND_SHIFT
            }
            _ => word,
        }
    }

    fn store(&self, index: usize, value: u64) {
        if index == MAGIC && value != 0 {
            self.is_attached.store(true, Ordering::Relaxed);
        }
        if index == HEAD && self.flaw == Flaw::LateAppend {
            let before = self.head.swap(value, Ordering::Relaxed);
            return self.memory.store(HEAD, before.min(value));
        }
        self.memory.store(index, value);
    }

    fn reserve(&self, words: usize) -> bool {
        self.memory.reserve(words)
    }

    fn release(&self, words: usize) {
        self.memory.release(words);
    }
}

/// A storage that tells the memory what becomes of writebacks.
struct FlawedStorage {
    disk: Broken,
    memory: Arc<FlawedMemory>,
    flaw: Flaw,
}

impl Storage for FlawedStorage {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.disk.capabilities()
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        self.disk.read(offset, into).await
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        let outcome = match self.flaw {
            // Only the replay does it wrongly.
            Flaw::RefcountsLate if self.memory.is_attached.load(Ordering::Relaxed) => {
                self.disk.write_through(offset, from, durability).await
            }
            _ => self.disk.write(offset, from, durability).await,
        };
        if self.flaw == Flaw::FailedTail && outcome.is_err() {
            self.memory.empty();
        }
        outcome
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        self.disk.write_zeroes(range, unmap).await
    }

    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        self.disk.prepare_zeroes(range, held).await
    }

    async fn free_space(&self) -> Result<Option<u64>> {
        self.disk.free_space().await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        self.disk.discard(range).await
    }

    /// The first operation of a writeback: data is stable before a table refers to it.
    async fn flush(&self, sync: SyncMode) -> Result<()> {
        if self.flaw == Flaw::EarlyTail {
            self.memory.empty();
        }
        self.disk.flush(sync).await
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.disk.resize(size).await
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        self.disk.block_status(range).await
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        self.disk.prefetch(range).await
    }
}

/// Makes hosts with this flaw.
#[derive(Clone, Copy)]
struct Flawed(Flaw);

impl Hardware for Flawed {
    type Storage = FlawedStorage;
    type Memory = FlawedMemory;

    fn memory(&self, memory: Arc<SimMemory>) -> Arc<FlawedMemory> {
        let (head, is_attached) = (AtomicU64::new(0), AtomicBool::new(false));
        Arc::new(FlawedMemory { memory, flaw: self.0, head, is_attached })
    }

    fn storage(&self, disk: SimDisk, memory: &Arc<FlawedMemory>) -> FlawedStorage {
        let policy = match self.0 {
            Flaw::RefcountsLate => Policy::RefcountsLate,
            _ => Policy::Right,
        };
        let disk = Broken::new(disk, policy);
        FlawedStorage { disk, memory: Arc::clone(memory), flaw: self.0 }
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
