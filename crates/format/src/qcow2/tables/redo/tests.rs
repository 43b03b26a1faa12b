//! Tests of the redo log: the ring, its records, and [`LatestChanges`], the sum of the records.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::*;
use crate::qcow2::layout::entry::{Entry, SubclusterBitmap};

const GEOMETRY: Geometry = Geometry::COMMON;

fn memory(records: usize) -> Arc<Vec<AtomicU64>> {
    let words = FIRST_RECORD + records * WORDS_PER_RECORD;
    Arc::new((0..words).map(|_| AtomicU64::new(0)).collect())
}

fn set(clusters: std::ops::Range<u64>, host: u64) -> RedoRecord {
    let change = RedoChange::Set(Entry::data(GEOMETRY.offset_of(host)));
    RedoRecord { clusters, change }
}

fn zero(clusters: std::ops::Range<u64>) -> RedoRecord {
    RedoRecord { clusters, change: RedoChange::ZeroKeepingHost }
}

fn zeroed(host: u64) -> RedoChange {
    RedoChange::Set(Entry::data(GEOMETRY.offset_of(host)).zeroed_keeping_host())
}

#[test]
fn a_log_has_what_was_appended_and_not_trimmed() {
    let memory = memory(4);
    let mut log = RedoLog::new(memory.clone(), GEOMETRY, 0);
    let records: Vec<_> = (0..7).map(|n| set(n..n + 2, 100 + n)).collect();
    for (number, record) in records.iter().enumerate() {
        log.append(record, GEOMETRY);
        let kept = (number as u64).saturating_sub(1);
        log.trim(kept);
        assert_eq!(RedoLog::read(&*memory, GEOMETRY).unwrap(), records[kept as usize..=number]);
        assert_eq!(RedoLog::count(&*memory), number as u64 + 1 - kept);
    }
    log.trim(7);
    assert_eq!(RedoLog::read(&*memory, GEOMETRY).unwrap(), []);
    assert_eq!(RedoLog::count(&*memory), 0);
    // A writeback that began earlier but ends later does not move the tail back.
    log.append(&records[0], GEOMETRY);
    log.trim(3);
    assert_eq!(RedoLog::read(&*memory, GEOMETRY).unwrap(), records[..1]);
}

#[test]
fn memory_of_any_words_has_a_bounded_number_of_records() {
    let memory = memory(4);
    assert_eq!(RedoLog::count(&*memory), 0, "zeros are no log");
    (0..memory.words()).for_each(|word| memory.store(word, u64::MAX));
    assert_eq!(RedoLog::count(&*memory), 0, "another magic");
    memory.store(MAGIC_WORD, MAGIC);
    assert_eq!(RedoLog::count(&*memory), 0, "head and tail are one");
    memory.store(TAIL_WORD, 3);
    assert_eq!(RedoLog::count(&*memory), 4, "no more than there is room for");
}

#[test]
fn a_change_is_prepared_only_where_its_records_have_room() {
    let mut log = RedoLog::new(memory(7), GEOMETRY, 0);
    assert!(log.check_room(0).is_ok() && log.check_room(1).is_ok());
    assert!(matches!(log.check_room(2), Err(Blocked::DirtyLimit)));
    log.append(&set(0..1, 9), GEOMETRY);
    log.append(&set(0..1, 9), GEOMETRY);
    assert!(log.check_room(0).is_ok());
    assert!(matches!(log.check_room(1), Err(Blocked::DirtyLimit)));
    log.trim(1);
    assert!(log.check_room(1).is_ok());
    assert!(RedoLog::default().check_room(usize::MAX - 1).is_ok());
}

/// Memory of which the host provides only the first `limit` words.
struct Limited {
    words: Arc<Vec<AtomicU64>>,
    limit: usize,
    reserved: Mutex<usize>,
}

impl Limited {
    fn new(records: usize, limit: usize) -> Arc<Self> {
        Arc::new(Self { words: memory(records), limit, reserved: Mutex::new(RESERVED_WORDS) })
    }

    fn reserved(&self) -> usize {
        *self.reserved.lock()
    }
}

impl StateMemory for Limited {
    fn words(&self) -> usize {
        self.words.len()
    }

    fn load(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Relaxed)
    }

    fn store(&self, index: usize, value: u64) {
        assert!(index < self.reserved(), "the host has no memory there");
        self.words[index].store(value, Ordering::Relaxed);
    }

    fn reserve(&self, words: usize) -> bool {
        assert!(words > self.reserved() && words <= self.words());
        let is_there = words <= self.limit;
        if is_there {
            *self.reserved.lock() = words;
        }
        is_there
    }

    fn release(&self, words: usize) {
        assert!(words >= RESERVED_WORDS && words < self.reserved());
        *self.reserved.lock() = words;
    }
}

#[test]
fn a_log_takes_memory_as_it_needs_it_and_gives_it_back_when_it_is_empty() {
    let memory = Limited::new(10_000, usize::MAX);
    let mut log = RedoLog::new(memory.clone(), GEOMETRY, 0);
    for number in 0..9_000 {
        assert!(log.check_room(5).is_ok());
        log.append(&set(number..number + 1, number), GEOMETRY);
        assert!(memory.reserved() <= words_of(3 * number).max(2 * RESERVED_WORDS));
    }
    let read = |memory: &Limited| RedoLog::read(memory, GEOMETRY).unwrap();
    assert_eq!(read(&memory).len(), 9_000);
    // The records wrap around the ring's end. Memory is released only when the log is empty.
    log.trim(8_990);
    for number in 0..2_000 {
        assert!(log.check_room(5).is_ok());
        log.append(&set(number..number + 1, number), GEOMETRY);
    }
    assert_eq!((read(&memory).len(), memory.reserved()), (2_010, memory.words()));
    log.trim(log.head());
    assert_eq!((read(&memory), memory.reserved()), (Vec::new(), RESERVED_WORDS));
    log.append(&set(7..8, 1), GEOMETRY);
    assert_eq!(read(&memory), [set(7..8, 1)]);
}

#[test]
fn changes_that_were_prepared_have_memory_when_an_empty_log_gives_it_back() {
    let memory = Limited::new(10_000, usize::MAX);
    let mut log = RedoLog::new(memory.clone(), GEOMETRY, 0);
    log.append(&set(0..1, 9), GEOMETRY);
    // There is room for 1,001 prepared changes: 1,000 pending ones and one more.
    assert!(log.check_room(1_000).is_ok());
    log.trim(1);
    for number in 0..3 * 1_001 {
        log.append(&set(number..number + 1, 9), GEOMETRY);
    }
    assert_eq!(RedoLog::count(&*memory), 3 * 1_001);
}

#[test]
fn where_the_host_has_no_memory_the_log_is_full_until_it_is_empty() {
    let memory = Limited::new(10_000, 2 * RESERVED_WORDS);
    let mut log = RedoLog::new(memory.clone(), GEOMETRY, 0);
    for _ in 0..3 {
        let mut appended = 0;
        while log.check_room(0).is_ok() {
            log.append(&set(appended..appended + 1, 9), GEOMETRY);
            appended += 1;
        }
        assert!((2_030..2_048).contains(&appended), "{appended}");
        assert!(!log.is_empty());
        log.trim(log.head());
    }
}

#[test]
fn a_new_log_is_empty_whatever_the_memory_held() {
    let memory = memory(4);
    let mut log = RedoLog::new(memory.clone(), GEOMETRY, 0);
    log.append(&set(0..1, 9), GEOMETRY);
    drop(RedoLog::new(memory.clone(), GEOMETRY, 0));
    assert_eq!(RedoLog::read(&*memory, GEOMETRY).unwrap(), []);
}

#[test]
fn nonsense_is_refused() {
    let memory = memory(4);
    let refused = |index: usize, value: u64| {
        let mut log = RedoLog::new(memory.clone(), GEOMETRY, 0);
        log.append(&set(3..5, 9), GEOMETRY);
        assert_eq!(RedoLog::read(&*memory, GEOMETRY).unwrap().len(), 1);
        memory.store(index, value);
        RedoLog::read(&*memory, GEOMETRY).unwrap_err()
    };
    assert!(refused(MAGIC_WORD, MAGIC + 1).contains("another version"));
    assert!(refused(GEOMETRY_WORD, 12).contains("another geometry"));
    assert!(refused(HEAD_WORD, 5).contains("0 to 5 of 4"));
    assert!(refused(FIRST_RECORD, u64::MAX).contains("clusters from cluster"));
    assert!(refused(FIRST_RECORD + 1, 0).contains("about 0 clusters"));
    assert!(refused(FIRST_RECORD + 1, 7 << 32 | 1).contains("kind 7"));
    assert!(refused(FIRST_RECORD + 2, 2).contains("an entry that has reserved bits"));
}

#[test]
fn records_survive_being_stored() {
    let bitmap = SubclusterBitmap { data: 0xff00, zero: 0x1 };
    let host = Entry::data(1 << 30);
    let Entry::Standard { host, .. } = host else { unreachable!() };
    let extended = Geometry { extended_l2: true, ..GEOMETRY };
    let mixed = RedoChange::Set(Entry::Standard { host, subclusters: bitmap });
    for (change, geometry) in [
        (mixed, extended),
        (RedoChange::Set(Entry::ZERO), GEOMETRY),
        (RedoChange::Set(Entry::UNALLOCATED), GEOMETRY),
        (RedoChange::ZeroKeepingHost, GEOMETRY),
    ] {
        let record = RedoRecord { clusters: 1 << 40..(1 << 40) + 512, change };
        let stored = RedoRecord::from_words(record.words(geometry), geometry);
        assert_eq!(stored, Ok(record));
    }
}

#[test]
fn entries_in_a_row_are_one_record() {
    let mut run = EntryRun::default();
    let entries = [(7, 40), (8, 41), (9, 42), (10, 50), (11, 51)];
    let mut records = Vec::new();
    for (cluster, host) in entries {
        let entry = Entry::data(GEOMETRY.offset_of(host));
        records.extend(run.push(cluster, entry, GEOMETRY));
    }
    records.extend(run.push(12, Entry::ZERO, GEOMETRY));
    records.extend(run.push(13, Entry::ZERO, GEOMETRY));
    records.extend(run.finish());
    let zeros = RedoRecord { clusters: 12..14, change: RedoChange::Set(Entry::ZERO) };
    assert_eq!(records, [set(7..10, 40), set(10..12, 50), zeros]);
}

#[test]
fn the_latest_change_of_a_cluster_counts() {
    let latest = |records: &[RedoRecord]| -> Vec<RedoRecord> {
        LatestChanges::of(records, GEOMETRY).iter().collect()
    };
    let changed = |clusters, change| RedoRecord { clusters, change };
    // The newer record covers the middle of an older one, the ends of two, or the whole of two.
    assert_eq!(
        latest(&[set(0..10, 100), set(3..5, 7)]),
        [set(0..3, 100), set(3..5, 7), set(5..10, 105)]
    );
    assert_eq!(
        latest(&[set(0..4, 100), set(6..9, 200), set(2..8, 50)]),
        [set(0..2, 100), set(2..8, 50), set(8..9, 202)]
    );
    assert_eq!(latest(&[set(2..3, 100), set(5..6, 1), set(0..9, 50)]), [set(0..9, 50)]);
    // Zeroed clusters keep their host clusters: those of an older record, else those in the tables.
    assert_eq!(
        latest(&[set(2..6, 100), zero(0..4)]),
        [zero(0..2), changed(2..4, zeroed(100)), set(4..6, 102)]
    );
    assert_eq!(
        latest(&[set(2..3, 100), zero(0..5), zero(1..7)]),
        [zero(0..1), zero(1..2), changed(2..3, zeroed(100)), zero(3..5), zero(5..7)]
    );
    assert_eq!(latest(&[zero(0..5), set(1..3, 8)]), [zero(0..1), set(1..3, 8), zero(3..5)]);
}
