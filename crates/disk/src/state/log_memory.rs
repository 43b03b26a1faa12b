//! The memory of a redo log: the part of a state file after its first page.
//!
//! Guarantees: the guarantees of [`StateMemory`]. The file has its full length and is sparse.
//! Reserving (`fallocate`) allocates pages of tmpfs, so a later store never lacks memory. If the
//! host has no memory, reserving fails.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhouse_core::{RESERVED_WORDS, StateMemory};
use blockhouse_engine::VolatileSlice;
use rustix::fs::{FallocateFlags, fallocate};

use super::page::PAGE_BYTES;

/// Words of a mapped file. Clones share the memory.
#[derive(Clone)]
pub(super) struct LogMemory {
    words: VolatileSlice,
    file: Arc<OwnedFd>,
}

impl LogMemory {
    /// `words` is a mapping of the log in `file`.
    pub(super) fn new(words: VolatileSlice, file: OwnedFd) -> Self {
        Self { words, file: Arc::new(file) }
    }

    /// Makes the host allocate the first page of a new file, and the part of the log that is always
    /// reserved.
    ///
    /// # Errors
    /// ENOSPC.
    pub(super) fn reserve_first(file: &OwnedFd, log_words: usize) -> io::Result<()> {
        Ok(fallocate(file, FallocateFlags::empty(), 0, end_of(log_words.min(RESERVED_WORDS)))?)
    }
}

/// The file offset after the first `words` words of the log.
fn end_of(words: usize) -> u64 {
    (PAGE_BYTES + words * size_of::<u64>()) as u64
}

impl StateMemory for LogMemory {
    fn words(&self) -> usize {
        self.words.words()
    }

    fn load(&self, index: usize) -> u64 {
        self.words.load(index)
    }

    fn store(&self, index: usize, value: u64) {
        self.words.store(index, value);
    }

    fn reserve(&self, words: usize) -> bool {
        fallocate(&*self.file, FallocateFlags::KEEP_SIZE, 0, end_of(words)).is_ok()
    }

    /// If the host fails, the memory stays allocated.
    fn release(&self, words: usize) {
        let (start, end) = (end_of(words), end_of(self.words()));
        if start < end {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = fallocate(&*self.file, flags, start, end - start);
        }
    }
}
