//! Memory that outlives the process: where a format keeps its redo log.
//!
//! A process that is killed loses no store that it made, because the memory belongs to the host and
//! not to the process: a file on tmpfs that is mapped shared, for instance. A power failure or a
//! restart of the host loses the memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of words that are reserved from the start (32 KiB); in shorter memory, all words.
pub const RESERVED_WORDS: usize = 4096;

/// Memory of 64-bit words that outlives the process which stores them.
///
/// An implementation guarantees:
///
/// - The next process finds each word that [`store`](Self::store) has written, whatever ends this
///   process: SIGKILL, an abort, the OOM killer. Nothing needs to be flushed or closed for that.
/// - Stores of one thread become visible in their order, to other threads and to the next process.
/// - A word is never torn: a load sees zero, or a value that was stored.
/// - Loads and stores do not block, allocate or make a system call, except at the first access to a
///   page.
/// - A store to one of the first [`RESERVED_WORDS`], or to a word that [`reserve`](Self::reserve)
///   has allocated, never fails. Callers never store to other words.
/// - New memory is all zeros. The image's lock ensures that only one user stores into it at a time.
///
/// Another program may have changed the file. So a reader checks all words as untrusted input.
pub trait StateMemory: Send + Sync {
    /// How many words there are. Constant.
    fn words(&self) -> usize;

    /// Loads a word with acquire ordering.
    ///
    /// # Panics
    /// When `index` is not less than [`words`](Self::words).
    fn load(&self, index: usize) -> u64;

    /// Stores a word with release ordering.
    ///
    /// # Panics
    /// When `index` is not less than [`words`](Self::words).
    fn store(&self, index: usize, value: u64);

    /// Makes the host allocate the first `words` words; `words` is at most
    /// [`words`](Self::words). Stored words keep their value. `false` on ENOMEM: then nothing has
    /// changed. May make a system call.
    fn reserve(&self, words: usize) -> bool;

    /// Frees the memory beyond the first `words` words; `words` is at least [`RESERVED_WORDS`]. The
    /// freed words then read as zeros or as before, and must be reserved again before stores. May
    /// make a system call.
    fn release(&self, words: usize);
}

/// Words of this process alone. They outlive a disk that is dropped without being closed, which is
/// how tests and the simulator model a killed process.
impl StateMemory for Vec<AtomicU64> {
    fn words(&self) -> usize {
        self.len()
    }

    fn load(&self, index: usize) -> u64 {
        self[index].load(Ordering::Acquire)
    }

    fn store(&self, index: usize, value: u64) {
        self[index].store(value, Ordering::Release);
    }

    /// All words are allocated.
    fn reserve(&self, _words: usize) -> bool {
        true
    }

    fn release(&self, _words: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_on_the_heap_are_zeros_at_first_and_keep_what_is_stored() {
        let memory: Vec<AtomicU64> = std::iter::repeat_with(AtomicU64::default).take(3).collect();
        let memory: &dyn StateMemory = &memory;
        assert_eq!((memory.words(), memory.load(2)), (3, 0));
        memory.store(2, u64::MAX);
        assert_eq!((memory.load(1), memory.load(2)), (0, u64::MAX));
    }
}
