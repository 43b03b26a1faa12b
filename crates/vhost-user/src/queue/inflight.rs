//! In-flight I/O tracking: memory of the front-end that records the requests in flight. If a server
//! is killed, the next server executes these requests again.
//!
//! The layout and the order of stores are those of the vhost-user specification for split queues
//! ("Inflight I/O tracking"): after each single store, a new server can find in the memory which
//! requests to resubmit. Requests are resubmitted in the order in which they came. The memory after
//! the queues' parts holds the state of the write cache, because the guest does not set that state
//! again.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blockhouse_core::WriteCache;
use blockhouse_engine::{SharedMemory, VolatileSlice};
use rustix::fs::{MemfdFlags, SealFlags};

/// Bytes of the header before a queue's entries, and of an entry.
const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;

/// Offsets in the header.
const VERSION: usize = 8;
const COUNT: usize = 10;
const LAST_BATCH: usize = 12;
const USED: usize = 14;

/// Offsets in an entry.
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// The version of this layout.
const OUR_VERSION: u16 = 1;

/// Bytes of the device's part, past the queues.
const DEVICE_BYTES: usize = 64;
/// The write cache's states, in the first byte of the device's part.
const UNKNOWN: u8 = 0;
const VOLATILE: u8 = 1;
const DURABLE: u8 = 2;

/// Bytes of one queue's part.
fn part(entries: u16) -> usize {
    (HEAD_BYTES + ENTRY_BYTES * usize::from(entries)).next_multiple_of(64)
}

/// Bytes for `queues` queues of `entries` entries.
pub fn size(queues: u16, entries: u16) -> usize {
    part(entries) * usize::from(queues) + DEVICE_BYTES
}

/// A memory file of `size` bytes, sealed against changes of its size. Reason: the server maps the
/// file, and if the front-end truncated it, an access to a removed page would end the connection.
///
/// # Errors
/// The kernel's.
pub fn new_file(size: u64) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("blockhouse-inflight", flags)?;
    rustix::fs::ftruncate(&file, size)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// The part of queue `index`; `None` if the memory is too small for this part.
pub fn queue(memory: &Arc<SharedMemory>, index: u16, entries: u16) -> Option<VolatileSlice> {
    let start = part(entries) * usize::from(index);
    VolatileSlice::new(Arc::clone(memory), start, part(entries)).filter(|view| view.is_aligned(8))
}

/// The device's part. `None` if the memory has no such part, because another program made the
/// memory.
pub fn device(memory: &Arc<SharedMemory>, queues: u16, entries: u16) -> Option<VolatileSlice> {
    VolatileSlice::new(Arc::clone(memory), part(entries) * usize::from(queues), DEVICE_BYTES)
}

/// The state of the write cache that an earlier server stored; `None` if no server stored one.
pub fn write_cache(device: &VolatileSlice) -> Option<WriteCache> {
    match device.load_u8(0) {
        VOLATILE => Some(WriteCache::Volatile),
        DURABLE => Some(WriteCache::None),
        UNKNOWN.. => None,
    }
}

/// Stores the state of the write cache.
pub fn keep_write_cache(device: &VolatileSlice, cache: WriteCache) {
    let byte = match cache {
        WriteCache::Volatile => VOLATILE,
        WriteCache::None => DURABLE,
    };
    device.store_u8(0, byte);
}

/// The in-flight log of one queue.
pub struct InflightQueue {
    view: VolatileSlice,
    entries: u16,
    counter: u64,
    /// Requests in the used ring whose entries are not cleared yet.
    batch: Vec<u16>,
}

/// The state that a queue resumes with.
pub struct Recovery {
    /// Requests to be executed again, the oldest first.
    pub resubmit: Vec<u16>,
    /// The number of the next available entry, if the log was in use before.
    pub last_avail_idx: Option<u16>,
}

impl InflightQueue {
    /// Opens a queue's part, which an earlier server may have used. `used` is the number of the
    /// next entry in the used ring. `None` if the part is too small.
    pub fn open(view: VolatileSlice, entries: u16, used: u16) -> Option<(Self, Recovery)> {
        if view.len() < HEAD_BYTES + ENTRY_BYTES * usize::from(entries) {
            return None;
        }
        let mut log = Self { view, entries, counter: 0, batch: Vec::new() };
        let is_new = log.view.load_u16(VERSION, Relaxed) != OUR_VERSION;
        if is_new {
            log.view.store_u16(COUNT, entries);
            log.view.store_u16(USED, used);
            log.view.store_u16(VERSION, OUR_VERSION);
        } else {
            log.clear_last_batch(used);
        }
        let resubmit = log.inflight_heads();
        let last_avail_idx = (!is_new).then(|| used.wrapping_add(resubmit.len() as u16));
        Some((log, Recovery { resubmit, last_avail_idx }))
    }

    fn entry(&self, head: u16) -> usize {
        HEAD_BYTES + ENTRY_BYTES * usize::from(head)
    }

    /// Clears the entries of the last batch if it was published.
    fn clear_last_batch(&mut self, used: u16) {
        let known = self.view.load_u16(USED, Relaxed);
        let mut head = self.view.load_u16(LAST_BATCH, Relaxed);
        // The front-end can write any value to this memory, so the loop is bounded by the number of
        // entries.
        for _ in 0..used.wrapping_sub(known).min(self.entries) {
            if head >= self.entries {
                break;
            }
            let entry = self.entry(head);
            self.view.store_u8(entry, 0);
            head = self.view.load_u16(entry + NEXT, Relaxed);
        }
        self.view.store_u16(USED, used);
    }

    /// The requests that were begun and did not complete, the oldest first.
    fn inflight_heads(&mut self) -> Vec<u16> {
        // The counters are copied before the sort: the front-end may change them concurrently, and
        // a sort by changing keys may panic.
        let mut begun: Vec<(u64, u16)> = (0..self.entries)
            .filter(|&head| self.view.load_u8(self.entry(head)) == 1)
            .map(|head| (self.view.load_u64(self.entry(head) + COUNTER, Relaxed), head))
            .collect();
        begun.sort_unstable();
        self.counter = begun.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        begun.into_iter().map(|(_, head)| head).collect()
    }

    /// Marks a request as in flight.
    pub fn begin(&mut self, head: u16) {
        let entry = self.entry(head);
        self.view.store_u64(entry + COUNTER, self.counter);
        self.view.store_u8(entry, 1);
        self.counter = self.counter.wrapping_add(1);
    }

    /// Adds a request to the batch: its entry in the used ring is written, but not published.
    pub fn end(&mut self, head: u16) {
        let last = self.view.load_u16(LAST_BATCH, Relaxed);
        self.view.store_u16(self.entry(head) + NEXT, last);
        self.view.store_u16(LAST_BATCH, head);
        self.batch.push(head);
    }

    /// Clears the batch: the used ring is published up to `used`.
    pub fn published(&mut self, used: u16) {
        while let Some(head) = self.batch.pop() {
            self.view.store_u8(self.entry(head), 0);
        }
        self.view.store_u16(USED, used);
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::FaultDomain;

    use super::*;

    fn memory(entries: u16) -> Arc<SharedMemory> {
        let file = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let size = size(2, entries);
        rustix::fs::ftruncate(&file, size as u64).unwrap();
        Arc::new(SharedMemory::map(&file, 0, size, &FaultDomain::unconnected()).unwrap())
    }

    fn open(memory: &Arc<SharedMemory>, used: u16) -> (InflightQueue, Recovery) {
        InflightQueue::open(queue(memory, 1, 8).unwrap(), 8, used).unwrap()
    }

    #[test]
    fn a_new_log_has_nothing_to_resubmit() {
        let memory = memory(8);
        let (_, recovery) = open(&memory, 700);
        assert!(recovery.resubmit.is_empty() && recovery.last_avail_idx.is_none());
        let (_, recovery) = open(&memory, 700);
        assert_eq!(recovery.last_avail_idx, Some(700));
    }

    #[test]
    fn requests_in_flight_are_resubmitted_in_order() {
        let memory = memory(8);
        let (mut log, _) = open(&memory, 10);
        [5, 2, 7].into_iter().for_each(|head| log.begin(head));
        log.end(2);
        log.published(11);
        log.begin(2);
        drop(log);
        let (mut log, recovery) = open(&memory, 11);
        assert_eq!((recovery.resubmit, recovery.last_avail_idx), (vec![5, 7, 2], Some(14)));
        // The second recovery continues the counter of the first.
        log.begin(0);
        assert_eq!(open(&memory, 11).1.resubmit, [5, 7, 2, 0]);
    }

    #[test]
    fn a_batch_that_was_published_but_not_cleared_is_over() {
        let memory = memory(8);
        let (mut log, _) = open(&memory, 65535);
        [1, 2, 3].into_iter().for_each(|head| log.begin(head));
        log.end(3);
        log.end(1);
        // Killed before the index was published: all are resubmitted.
        assert_eq!(open(&memory, 65535).1.resubmit, [1, 2, 3]);
        // Killed after the index was published.
        let recovery = open(&memory, 1).1;
        assert_eq!((recovery.resubmit, recovery.last_avail_idx), (vec![2], Some(2)));
    }

    #[test]
    fn nonsense_in_the_memory_is_harmless() {
        let memory = memory(8);
        drop(open(&memory, 0));
        for offset in 0..memory.len() {
            memory.write(offset, &[0xff]);
        }
        let view = queue(&memory, 1, 8).unwrap();
        view.store_u16(VERSION, OUR_VERSION);
        drop(open(&memory, 4));
        assert!(queue(&memory, 2, 8).is_none() && queue(&memory, 0, 1024).is_none());
    }

    #[test]
    fn counters_that_change_while_they_are_sorted_are_harmless() {
        const ENTRIES: u16 = 1024;
        let memory = memory(ENTRIES);
        let part = || queue(&memory, 0, ENTRIES).unwrap();
        let (mut log, _) = InflightQueue::open(part(), ENTRIES, 0).unwrap();
        (0..ENTRIES).for_each(|head| log.begin(head));
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let view = part();
                let mut number = 1u64;
                while !over.load(Relaxed) {
                    for head in 0..usize::from(ENTRIES) {
                        number = number.wrapping_mul(6364136223846793005).wrapping_add(1);
                        view.store_u64(HEAD_BYTES + ENTRY_BYTES * head + COUNTER, number);
                    }
                }
            });
            // Ends the thread also when this one panics.
            let _ends = Ends(&over);
            for _ in 0..100 {
                let (_, recovery) = InflightQueue::open(part(), ENTRIES, 0).unwrap();
                let mut heads = recovery.resubmit;
                heads.sort_unstable();
                assert!(heads.into_iter().eq(0..ENTRIES), "each once");
            }
        });
    }

    struct Ends<'a>(&'a std::sync::atomic::AtomicBool);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    #[test]
    fn the_write_cache_is_remembered() {
        let memory = memory(8);
        let device = device(&memory, 2, 8).unwrap();
        assert_eq!(write_cache(&device), None);
        for cache in [WriteCache::Volatile, WriteCache::None] {
            keep_write_cache(&device, cache);
            assert_eq!(write_cache(&device), Some(cache));
        }
    }
}
