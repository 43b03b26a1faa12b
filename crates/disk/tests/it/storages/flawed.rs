//! A host that is wrong on purpose about the redo log in its memory: the memory, as the format sees
//! it, and the storage that tells it the outcome of writebacks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhouse_core::{Durability, IoVector, Result, StateMemory, Storage, SyncMode};
use blockhouse_sim::{SimMemory, forward_storage};

use super::broken::Broken;
use super::log_words::{
    FIRST_RECORD, HEAD, KIND_SHIFT, MAGIC, SET, TAIL, WORDS_PER_RECORD, ZERO_KEEPING_HOST,
};

/// The planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
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
pub struct FlawedMemory {
    memory: Arc<SimMemory>,
    flaw: Flaw,
    /// The head that the format has stored.
    head: AtomicU64,
    /// Whether a log was attached: the replay is over.
    is_attached: AtomicBool,
}

impl FlawedMemory {
    pub fn new(memory: Arc<SimMemory>, flaw: Flaw) -> Self {
        Self { memory, flaw, head: AtomicU64::new(0), is_attached: AtomicBool::new(false) }
    }

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

/// A storage that tells the memory the outcome of writebacks.
pub struct FlawedStorage {
    disk: Broken,
    memory: Arc<FlawedMemory>,
    flaw: Flaw,
}

impl FlawedStorage {
    pub fn new(disk: Broken, memory: Arc<FlawedMemory>, flaw: Flaw) -> Self {
        Self { disk, memory, flaw }
    }
}

impl Storage for FlawedStorage {
    forward_storage!(disk: name, capabilities, size, read, write_zeroes, prepare_zeroes, free_space, discard, resize, block_status, prefetch);

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

    /// The first operation of a writeback: data is stable before a table refers to it.
    async fn flush(&self, sync: SyncMode) -> Result<()> {
        if self.flaw == Flaw::EarlyTail {
            self.memory.empty();
        }
        self.disk.flush(sync).await
    }
}
