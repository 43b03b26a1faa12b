//! Counters of a disk: cheap enough to be always on.
//!
//! They are relaxed and spread over shards by thread, so that threads do not fight over a cache line
//! on every request; a reading is a sum, exact when nothing is in flight.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use blockhouse_core::Request;

const SHARDS: usize = 8;

/// A reading of a disk's counters, all since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Reads asked for.
    pub reads: u64,
    /// Bytes asked for by reads.
    pub read_bytes: u64,
    /// Writes asked for.
    pub writes: u64,
    /// Bytes given by writes.
    pub written_bytes: u64,
    /// Zero writes asked for.
    pub zero_writes: u64,
    /// Discards asked for.
    pub discards: u64,
    /// Flushes asked for.
    pub flushes: u64,
    /// Requests that are not through.
    pub in_flight: u64,
    /// Pieces of requests that were copied because they were not aligned.
    pub bounced: u64,
    /// Compressed clusters that were decompressed.
    pub decompressed: u64,
    /// Writes that went down with native FUA.
    pub durable_writes: u64,
    /// Flushes that went to the storage.
    pub flushes_issued: u64,
    /// Flushes that found everything stable.
    pub flushes_skipped: u64,
    /// Flushes that another one covered.
    pub flushes_shared: u64,
}

/// One counter.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What the flush optimisation did.
#[derive(Default)]
pub(crate) struct FlushStats {
    pub(crate) issued: Counter,
    pub(crate) skipped: Counter,
    pub(crate) shared: Counter,
    pub(crate) durable_writes: Counter,
}

/// What requests did.
#[derive(Default)]
pub(crate) struct Stats {
    shards: [Shard; SHARDS],
}

/// One thread's share, on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Shard {
    reads: Counter,
    read_bytes: Counter,
    writes: Counter,
    written_bytes: Counter,
    zero_writes: Counter,
    discards: Counter,
    flushes: Counter,
    started: Counter,
    ended: Counter,
    bounced: Counter,
    decompressed: Counter,
}

/// A request in flight, until it is dropped.
pub(crate) struct RequestGuard<'a>(&'a Stats);

impl Stats {
    /// Counts a request in.
    pub(crate) fn begin(&self, request: &Request) -> RequestGuard<'_> {
        let shard = self.shard();
        shard.started.add(1);
        match request {
            Request::Read { into, .. } => {
                shard.reads.add(1);
                shard.read_bytes.add(into.len() as u64);
            }
            Request::Write { from, .. } => {
                shard.writes.add(1);
                shard.written_bytes.add(from.len() as u64);
            }
            Request::WriteZeroes { .. } => shard.zero_writes.add(1),
            Request::Discard { .. } => shard.discards.add(1),
            Request::Flush => shard.flushes.add(1),
            Request::Prefetch { .. } => {}
        }
        RequestGuard(self)
    }

    /// Counts a write in that will be compressed.
    pub(crate) fn begin_compressed(&self, length: usize) -> RequestGuard<'_> {
        let shard = self.shard();
        shard.started.add(1);
        shard.writes.add(1);
        shard.written_bytes.add(length as u64);
        RequestGuard(self)
    }

    pub(crate) fn bounced(&self) {
        self.shard().bounced.add(1);
    }

    pub(crate) fn decompressed(&self) {
        self.shard().decompressed.add(1);
    }

    /// With the flushes of all storages.
    pub(crate) fn read(&self, storages: &[&FlushStats]) -> Counters {
        let flushes = |counter: fn(&FlushStats) -> &Counter| -> u64 {
            storages.iter().map(|flushes| counter(flushes).get()).sum()
        };
        let sum = |counter: fn(&Shard) -> &Counter| -> u64 {
            self.shards.iter().map(|shard| counter(shard).get()).sum()
        };
        // Ends first: a request that ends meanwhile then counts as in flight, never as minus one.
        let ended = sum(|shard| &shard.ended);
        Counters {
            reads: sum(|shard| &shard.reads),
            read_bytes: sum(|shard| &shard.read_bytes),
            writes: sum(|shard| &shard.writes),
            written_bytes: sum(|shard| &shard.written_bytes),
            zero_writes: sum(|shard| &shard.zero_writes),
            discards: sum(|shard| &shard.discards),
            flushes: sum(|shard| &shard.flushes),
            in_flight: sum(|shard| &shard.started).saturating_sub(ended),
            bounced: sum(|shard| &shard.bounced),
            decompressed: sum(|shard| &shard.decompressed),
            durable_writes: flushes(|one| &one.durable_writes),
            flushes_issued: flushes(|one| &one.issued),
            flushes_skipped: flushes(|one| &one.skipped),
            flushes_shared: flushes(|one| &one.shared),
        }
    }

    fn shard(&self) -> &Shard {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static MINE: Cell<usize> = const { Cell::new(usize::MAX) };
        }
        let mut mine = MINE.get();
        if mine == usize::MAX {
            mine = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
            MINE.set(mine);
        }
        &self.shards[mine]
    }
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        self.0.shard().ended.add(1);
    }
}
