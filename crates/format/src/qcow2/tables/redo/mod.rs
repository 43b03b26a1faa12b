//! The redo log: changes of L2 entries that no finished writeback has written to the disk, kept in
//! memory that outlives the process.
//!
//! A server answers a guest's write into new space when its entry is linked in memory. If the
//! server's process dies before a writeback, the host runs on and still has the data, but the entry
//! is lost. So:
//!
//! 1. A step that links an entry appends the change, before the request is answered. Both happen
//!    under the image's lock, so the log has the order of the changes.
//! 2. A writeback notes the log's head ([`RedoLog::head`]) when it begins. The writeback copies the
//!    dirty metadata under the same lock, so the copy has every change before the noted head. When
//!    the writeback is durable, the log's tail moves to the noted head ([`RedoLog::trim`]). A
//!    failed or dropped writeback does not move the tail.
//! 3. After the death of a process, the records between tail and head are replayed before any other
//!    change (`transaction/replay`). Records have the new values of entries, so a replay can be
//!    repeated, also on tables that already have some of the changes.
//!
//! The memory is a ring of records of a fixed length. A record is valid once the head after it is
//! stored. A killed process loses none of its stores, so the log is consistent after each store. If
//! the ring is full, a step that prepares a change is blocked as at the dirty limit.
//!
//! Memory is reserved for as many records as needed, from the ring's first record on. An empty log
//! continues at the first record, and releases the rest of the memory. If the host has no memory
//! left, the ring counts as full.

mod latest;
mod record;

use std::sync::Arc;

use blockhouse_core::{RESERVED_WORDS, StateMemory};

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::{SESSION_BITS, new_session};

pub(crate) use latest::LatestChanges;
pub(crate) use record::{EntryRun, RedoChange, RedoRecord};

use super::{Blocked, Step};
use record::WORDS_PER_RECORD;

/// The maximum number of records that wait for a writeback. Random writes of 4 KiB, 60,000 per
/// second, fill the log in about a second.
const MAX_RECORDS: usize = 1 << 16;

/// The maximum number of records of one change: the first and the last cluster of a write may
/// differ from the rest.
const MAX_RECORDS_PER_CHANGE: u64 = 3;

/// "BHRedo", and the version of this layout.
const MAGIC: u64 = 0x4248_5265_646f_0002;

/// The words before the records: the magic number, the geometry of the image, head and tail, the
/// autoclear bits that the image has from the first change on, and those that it had before if it
/// lacks no change of an earlier session.
const MAGIC_WORD: usize = 0;
const GEOMETRY_WORD: usize = 1;
const HEAD_WORD: usize = 2;
const TAIL_WORD: usize = 3;
const SESSION_WORD: usize = 4;
const EARLIER_SESSION_WORD: usize = 5;
const FIRST_RECORD: usize = 8;

/// The fewest records for which memory is reserved at a time.
const RESERVED_AT_A_TIME: u64 = 1024;

/// The words of memory of a log: 2 MiB, of which the log of an idle image takes 32 KiB.
pub(crate) const REDO_LOG_WORDS: usize = FIRST_RECORD + MAX_RECORDS * WORDS_PER_RECORD;

/// The redo log of an image. A log without memory records nothing.
#[derive(Default)]
pub(crate) struct RedoLog {
    memory: Option<Arc<dyn StateMemory>>,
    /// The autoclear bits of the session.
    session: u64,
    /// The number of records that were ever appended (`head`), and of those that are no longer
    /// needed (`tail`).
    head: u64,
    tail: u64,
    /// The end of the records that prepared changes may append.
    promised: u64,
    /// The number of records, from the ring's first record on, that have memory.
    reserved: u64,
}

impl RedoLog {
    /// An empty log of a new session in `memory`. The old content of `memory` is ignored. `earlier`
    /// are the session bits that the image has until the first change, if they are those of a
    /// session whose changes it has; otherwise 0.
    pub(crate) fn new(memory: Arc<dyn StateMemory>, geometry: Geometry, earlier: u64) -> Self {
        // Images of version 2 have no autoclear bits.
        let session = if geometry.version >= 3 { new_session() } else { 0 };
        let log = Self::of_session(Arc::clone(&memory), geometry, session);
        memory.store(EARLIER_SESSION_WORD, earlier);
        log
    }

    /// As [`new`](Self::new), of the session with these autoclear bits.
    pub(crate) fn of_session(
        memory: Arc<dyn StateMemory>,
        geometry: Geometry,
        session: u64,
    ) -> Self {
        // Without the magic number, the log counts as empty while the other words change.
        memory.store(MAGIC_WORD, 0);
        memory.store(HEAD_WORD, 0);
        memory.store(TAIL_WORD, 0);
        memory.store(GEOMETRY_WORD, geometry_word(geometry));
        memory.store(SESSION_WORD, session);
        memory.store(EARLIER_SESSION_WORD, 0);
        memory.store(MAGIC_WORD, MAGIC);
        let reserved = least_reserved(&*memory);
        Self { memory: Some(memory), session, reserved, ..Self::default() }
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.memory.is_some()
    }

    /// The autoclear bits that an image has while this log records its changes; 0 without memory.
    pub(crate) fn session(&self) -> u64 {
        self.session
    }

    /// Returns `Blocked` if there is no space for the records of one more change, besides the
    /// `pending` changes that are prepared already.
    pub(crate) fn check_room(&mut self, pending: usize) -> Step<()> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let needed = (pending as u64 + 1) * MAX_RECORDS_PER_CHANGE;
        let capacity = capacity(&**memory);
        let end = (self.head % capacity + needed).min(capacity);
        if self.head - self.tail + needed > capacity || !self.reserve(end) {
            return Err(Blocked::DirtyLimit);
        }
        self.promised = self.head + needed;
        Ok(())
    }

    /// Reserves memory for this many records at the ring's beginning. Returns whether these records
    /// have memory.
    fn reserve(&mut self, records: u64) -> bool {
        let Some(memory) = self.memory.as_ref().filter(|_| records > self.reserved) else {
            return true;
        };
        let ample = records.max(2 * self.reserved).next_multiple_of(RESERVED_AT_A_TIME);
        let found = [ample.min(capacity(&**memory)), records]
            .into_iter()
            .find(|&records| memory.reserve(words_of(records)));
        self.reserved = found.unwrap_or(self.reserved);
        found.is_some()
    }

    /// Whether all changes are on disk.
    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Returns `Blocked`, until a writeback, if there is no space for the records of one change.
    /// The step that prepared the change has checked for the space.
    pub(crate) fn check_promised(&self) -> Step<()> {
        if self.has_room(MAX_RECORDS_PER_CHANGE) { Ok(()) } else { Err(Blocked::DirtyLimit) }
    }

    fn has_room(&self, records: u64) -> bool {
        let Some(memory) = &self.memory else { return true };
        let capacity = capacity(&**memory);
        let end = (self.head % capacity + records).min(capacity);
        self.head - self.tail + records <= capacity && end <= self.reserved
    }

    /// Appends a change that was just made. The step of the change has checked for space.
    pub(crate) fn append(&mut self, record: &RedoRecord, geometry: Geometry) {
        let has_room = self.has_room(1);
        debug_assert!(has_room, "room for a change that was prepared");
        let Some(memory) = self.memory.as_ref().filter(|_| has_room) else { return };
        let capacity = capacity(&**memory);
        let first = FIRST_RECORD + (self.head % capacity) as usize * WORDS_PER_RECORD;
        for (index, word) in (first..).zip(record.words(geometry)) {
            memory.store(index, word);
        }
        self.head += 1;
        memory.store(HEAD_WORD, self.head);
    }

    /// The end of the log now.
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// Records that all changes before `head` are on disk.
    pub(crate) fn trim(&mut self, head: u64) {
        if let Some(memory) = &self.memory
            && self.tail < head
        {
            self.tail = head;
            memory.store(TAIL_WORD, head);
            if self.is_empty() {
                self.begin_anew();
            }
        }
    }

    /// Continues an empty log at the ring's first record, and releases memory that prepared changes
    /// do not need.
    fn begin_anew(&mut self) {
        let Some(memory) = &self.memory else { return };
        let promised = self.promised.saturating_sub(self.head);
        self.head = self.head.next_multiple_of(capacity(&**memory));
        // Between the two stores the tail is ahead of the head, which also means an empty log.
        memory.store(TAIL_WORD, self.head);
        memory.store(HEAD_WORD, self.head);
        (self.tail, self.promised) = (self.head, self.head + promised);
        let kept = promised.max(least_reserved(&**memory));
        if self.reserved > kept {
            memory.release(words_of(kept));
            self.reserved = kept;
        }
    }

    /// The number of records of a log of any image; 0 if the memory is no log of this version.
    pub(crate) fn count(memory: &dyn StateMemory) -> u64 {
        if memory.words() < FIRST_RECORD || memory.load(MAGIC_WORD) != MAGIC {
            return 0;
        }
        let (head, tail) = (memory.load(HEAD_WORD), memory.load(TAIL_WORD));
        head.saturating_sub(tail).min(capacity(memory))
    }

    /// The autoclear bits of an image whose latest changes were made by a process with this log.
    pub(crate) fn session_in(memory: &dyn StateMemory) -> u64 {
        memory.load(SESSION_WORD) & SESSION_BITS
    }

    /// The autoclear bits of an image that a process with this log has opened and not changed, and
    /// that has all changes of earlier sessions; 0 if it may lack some.
    pub(crate) fn earlier_session_in(memory: &dyn StateMemory) -> u64 {
        memory.load(EARLIER_SESSION_WORD) & SESSION_BITS
    }

    /// The records that a log has, the oldest first.
    ///
    /// # Errors
    /// A text with the reason why the memory is not a log of an image of this geometry.
    pub(crate) fn read(
        memory: &dyn StateMemory,
        geometry: Geometry,
    ) -> Result<Vec<RedoRecord>, String> {
        if memory.words() < FIRST_RECORD || memory.load(MAGIC_WORD) == 0 {
            return Ok(Vec::new());
        }
        if memory.load(MAGIC_WORD) != MAGIC {
            return Err("its redo log was written by another version of this program".into());
        }
        let (head, tail, capacity) =
            (memory.load(HEAD_WORD), memory.load(TAIL_WORD), capacity(memory));
        if head <= tail {
            return Ok(Vec::new());
        }
        if memory.load(GEOMETRY_WORD) != geometry_word(geometry) {
            return Err("its redo log is that of an image with another geometry".into());
        }
        if head - tail > capacity {
            return Err(format!("its redo log has records {tail} to {head} of {capacity}"));
        }
        (tail..head)
            .map(|number| {
                let first = FIRST_RECORD + (number % capacity) as usize * WORDS_PER_RECORD;
                let words = std::array::from_fn(|index| memory.load(first + index));
                RedoRecord::from_words(words, geometry)
                    .map_err(|why| format!("record {number} of its redo log {why}"))
            })
            .collect()
    }
}

/// The number of records that fit into the memory.
fn capacity(memory: &dyn StateMemory) -> u64 {
    (memory.words().saturating_sub(FIRST_RECORD) / WORDS_PER_RECORD) as u64
}

/// The number of words of a log with this many records.
fn words_of(records: u64) -> usize {
    FIRST_RECORD + records as usize * WORDS_PER_RECORD
}

/// The number of records that have memory without a reservation.
fn least_reserved(memory: &dyn StateMemory) -> u64 {
    let words = memory.words().min(RESERVED_WORDS);
    (words.saturating_sub(FIRST_RECORD) / WORDS_PER_RECORD) as u64
}

fn geometry_word(geometry: Geometry) -> u64 {
    u64::from(geometry.cluster_bits)
        | u64::from(geometry.extended_l2) << 8
        | u64::from(geometry.has_data_file) << 9
        | u64::from(geometry.version) << 16
}

#[cfg(test)]
mod tests;
