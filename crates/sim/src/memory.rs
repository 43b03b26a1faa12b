//! Memory that outlives the process, as a file on tmpfs would be.
//!
//! Guarantees: the guarantees of [`StateMemory`]. Each store is a step of the process, so the
//! process may die between any two stores. The next process does not see later stores of a dead
//! one. A store to a word that is not reserved panics.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use blockhouse_core::{RESERVED_WORDS, StateMemory};

use crate::Sim;
use crate::process::Process;

/// Words that outlive the process of a simulation.
pub struct SimMemory {
    words: Vec<AtomicU64>,
    process: Process,
    /// The number of words that are reserved now.
    reserved: AtomicUsize,
    /// The words of the process when it died.
    survivors: OnceLock<Vec<u64>>,
}

impl SimMemory {
    /// New memory of this many zero words. A power loss leaves such memory, too.
    pub fn new(sim: &Sim, words: usize) -> Self {
        Self::with(sim, vec![0; words])
    }

    fn with(sim: &Sim, words: Vec<u64>) -> Self {
        Self {
            reserved: RESERVED_WORDS.min(words.len()).into(),
            words: words.into_iter().map(AtomicU64::new).collect(),
            process: sim.process().clone(),
            survivors: OnceLock::new(),
        }
    }

    /// The memory for the next process if this one dies now, or has died before.
    #[must_use]
    pub fn after_death(&self, next: &Sim) -> Self {
        Self::with(next, self.survivors.get().cloned().unwrap_or_else(|| self.content()))
    }

    fn content(&self) -> Vec<u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire)).collect()
    }
}

impl StateMemory for SimMemory {
    fn words(&self) -> usize {
        self.words.len()
    }

    fn load(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Acquire)
    }

    fn store(&self, index: usize, value: u64) {
        assert!(index < self.reserved.load(Ordering::Relaxed), "word {index} is not reserved");
        if !self.process.step() {
            // A dead process still sees its own stores: it does not notice that it is dead.
            self.survivors.get_or_init(|| self.content());
        }
        self.words[index].store(value, Ordering::Release);
    }

    fn reserve(&self, words: usize) -> bool {
        assert!(words <= self.words.len(), "{words} words of {}", self.words.len());
        self.reserved.fetch_max(words, Ordering::Relaxed);
        true
    }

    fn release(&self, words: usize) {
        assert!(words >= RESERVED_WORDS, "{words} words are always there");
        self.reserved.store(words, Ordering::Relaxed);
        if !self.process.is_dead() {
            self.words[words..].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_of_a_dead_process_are_not_found() {
        let sim = Sim::new(0);
        let memory = SimMemory::new(&sim, 3);
        sim.kill_at(2);
        for index in 0..3 {
            memory.store(index, 7);
        }
        assert_eq!(memory.load(2), 7, "it sees them itself");
        let next = memory.after_death(&Sim::new(1));
        assert_eq!([0, 1, 2].map(|index| next.load(index)), [7, 7, 0]);
        next.store(2, 8);
        assert_eq!(next.load(2), 8, "the next process is alive");
    }

    #[test]
    fn a_process_may_die_when_all_is_stored() {
        let sim = Sim::new(0);
        let memory = SimMemory::new(&sim, 1);
        memory.store(0, 5);
        sim.kill();
        assert_eq!(memory.after_death(&Sim::new(1)).load(0), 5);
    }
}
