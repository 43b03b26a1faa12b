//! What is written but not yet stable: a storage that flushes only where that changes something.
//!
//! Completed writes are counted; a flush notes the count, its generation, when it begins. So:
//!
//! - a flush that finds its generation stable already issues nothing;
//! - one flush runs at a time, and those that come meanwhile wait. When it ends, all whose
//!   generation it covered are done, and the next one covers all the others;
//! - a write that completes while a flush runs is not covered by it;
//! - a native durable write is stable when it completes and is not counted;
//! - a failed flush is remembered: the host has forgotten which bytes are lost and would call the
//!   next one a success. From then on every flush and durable write fails with its errno, until the
//!   storage is opened anew. A failed durable write is a failed flush, too, whatever its errno: what it
//!   reports may be the loss of an older write, and the host reports that once. Only where the storage
//!   knows that nothing else is concerned ([`Error::is_confined`]) the disk goes on, as after a host
//!   that was full for a while;
//! - because the failure of a durable write may concern what a running flush calls stable, a flush
//!   believes its success only when the durable writes that ran beside it have been heard;
//! - where a shared flush is cheaper than FUA on each of several writes in flight, the later ones go
//!   down plainly and share one (group commit);
//! - an operation whose future is dropped may end at any time, so afterwards every flush is issued;
//!   the storage tells the outcome of a dropped flush or durable write to the next flush, as its
//!   contract says.
//!
//! Generations are counted with atomic operations, so that a plain write pays for one addition. A
//! lock is taken by flushes only, and never held while one waits.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use blockhouse_core::sync::{Coalescer, Epochs, ErrorLatch, RunGuard, Turn};
use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, Fua, GroupCommit, IoVector, Result, Storage,
    SyncMode, Unmap, WriteCache,
};

use crate::FlushPolicy;
use crate::stats::FlushStats;

/// What to do about a failed flush.
const FAILED_HINT: &str = "written data may be lost: check the guest's file systems and reopen";

/// A storage and what of it is not stable.
pub(crate) struct Generations<S> {
    storage: S,
    policy: FlushPolicy,
    /// How many writes have completed that only a flush makes stable.
    completed: AtomicU64,
    /// How many operations were given up in flight.
    given_up: AtomicU64,
    /// The first failure, which all later flushes repeat.
    failure: ErrorLatch,
    flushes: Coalescer<Stable>,
    durable_writes: Epochs,
    /// How many durable writes are in flight, whatever way they go.
    durable_in_flight: AtomicUsize,
    pub(crate) stats: FlushStats,
}

/// The generations up to which data, and data with all metadata, is stable.
#[derive(Default)]
struct Stable {
    data: u64,
    full: u64,
}

/// An operation in flight. Dropped before it has been seen to end, it counts as given up.
struct Unseen<'a> {
    given_up: &'a AtomicU64,
}

impl<S: Storage> Generations<S> {
    pub(crate) fn new(storage: S, policy: FlushPolicy) -> Self {
        Self {
            storage,
            policy,
            completed: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            failure: ErrorLatch::new(FAILED_HINT),
            flushes: Coalescer::default(),
            durable_writes: Epochs::new(),
            durable_in_flight: AtomicUsize::new(0),
            stats: FlushStats::default(),
        }
    }

    /// What is below.
    pub(crate) fn storage(&self) -> &S {
        &self.storage
    }

    fn in_flight(&self) -> Unseen<'_> {
        Unseen { given_up: &self.given_up }
    }

    /// The operation has ended and left something to flush, whether it failed or not.
    fn completed(&self, operation: Unseen<'_>) {
        self.completed.fetch_add(1, Ordering::SeqCst);
        operation.seen();
    }

    /// A write that is stable when it succeeds.
    async fn write_durably(&self, offset: u64, from: IoVector) -> Result<()> {
        self.check_failure()?;
        // Declared first, dropped last: a running flush hears of the failure or the dropping.
        let _guard = self.durable_writes.enter();
        let unseen = self.in_flight();
        let outcome = self.storage.write(offset, from, Durability::Data).await;
        if let Err(error) = &outcome
            && !error.is_confined()
        {
            self.failure.set(error);
        }
        unseen.seen();
        self.stats.durable_writes.add(1);
        outcome
    }

    /// The first failure, again and again.
    pub(crate) fn check_failure(&self) -> Result<()> {
        self.failure.check()
    }

    /// The generation that a flush called now must cover.
    fn target(&self, sync: SyncMode) -> u64 {
        // A write given up may have completed just now. And a full flush is never taken for done,
        // because durable writes change metadata without being counted.
        if sync == SyncMode::Full || self.given_up.load(Ordering::SeqCst) > 0 {
            self.completed.fetch_add(1, Ordering::SeqCst) + 1
        } else {
            self.completed.load(Ordering::SeqCst)
        }
    }

    fn turn(&self, target: u64, sync: SyncMode) -> Result<Turn<'_, Stable>> {
        let turn = self.flushes.turn(|stable| stable.generation(sync) >= target);
        // Afterwards: a flush that failed has said so before it let this one have its turn.
        self.check_failure()?;
        Ok(turn)
    }

    async fn run(&self, run: RunGuard<'_, Stable>, sync: SyncMode) -> Result<()> {
        let generation = self.completed.load(Ordering::SeqCst);
        loop {
            let given_up = self.given_up.load(Ordering::SeqCst);
            self.stats.issued.add(1);
            let outcome = self.storage.flush(sync).await;
            if let Err(error) = &outcome {
                self.failure.set(error);
                return outcome;
            }
            self.durable_writes.synchronize().await;
            // The storage tells the outcome of what was given up meanwhile to its next flush.
            if self.given_up.load(Ordering::SeqCst) == given_up {
                break;
            }
        }
        self.check_failure()?;
        run.complete(|stable| stable.advance(generation, sync));
        Ok(())
    }
}

/// The durable writes in flight, with this one among them until it is dropped.
struct Crowd<'a> {
    in_flight: Option<&'a AtomicUsize>,
    /// How many there were when this one came, itself included.
    size: usize,
}

impl<'a> Crowd<'a> {
    fn join(in_flight: &'a AtomicUsize, durability: Durability) -> Self {
        if durability == Durability::None {
            return Self { in_flight: None, size: 0 };
        }
        let size = in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        Self { in_flight: Some(in_flight), size }
    }

    fn is_cheaper_together(&self, capabilities: &Capabilities) -> bool {
        match capabilities.group_commit {
            GroupCommit::Never => false,
            GroupCommit::From(count) => self.size >= count,
        }
    }
}

impl Drop for Crowd<'_> {
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight {
            in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Stable {
    fn generation(&self, sync: SyncMode) -> u64 {
        match sync {
            SyncMode::Data => self.data,
            SyncMode::Full => self.full,
        }
    }

    fn advance(&mut self, generation: u64, sync: SyncMode) {
        self.data = self.data.max(generation);
        if sync == SyncMode::Full {
            self.full = self.full.max(generation);
        }
    }
}

impl Unseen<'_> {
    fn seen(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unseen<'_> {
    fn drop(&mut self) {
        self.given_up.fetch_add(1, Ordering::SeqCst);
    }
}

impl<S: Storage> Storage for Generations<S> {
    fn name(&self) -> &str {
        self.storage.name()
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = self.storage.capabilities();
        match self.policy {
            FlushPolicy::Obey => capabilities,
            FlushPolicy::Ignore => Capabilities { fua: Fua::Ignored, ..capabilities },
        }
    }

    fn size(&self) -> u64 {
        self.storage.size()
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        self.storage.read(offset, into).await
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        let capabilities = self.capabilities();
        let crowd = Crowd::join(&self.durable_in_flight, durability);
        match (durability, capabilities.fua) {
            (Durability::Data, Fua::Native) if !crowd.is_cheaper_together(&capabilities) => {
                return self.write_durably(offset, from).await;
            }
            (Durability::Data | Durability::Full, Fua::Native | Fua::Emulated) => {
                self.check_failure()?;
            }
            (Durability::None, _) | (_, Fua::Ignored) => {}
        }
        let unseen = self.in_flight();
        let outcome = self.storage.write(offset, from, Durability::None).await;
        match capabilities.write_cache {
            WriteCache::Volatile => self.completed(unseen),
            WriteCache::None => unseen.seen(),
        }
        match durability {
            _ if outcome.is_err() => outcome,
            Durability::None => Ok(()),
            Durability::Data => self.flush(SyncMode::Data).await,
            Durability::Full => self.flush(SyncMode::Full).await,
        }
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        let unseen = self.in_flight();
        let outcome = self.storage.write_zeroes(range, unmap).await;
        self.completed(unseen);
        outcome
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        let unseen = self.in_flight();
        let outcome = self.storage.discard(range).await;
        self.completed(unseen);
        outcome
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        if self.capabilities().fua == Fua::Ignored {
            return Ok(());
        }
        let target = self.target(sync);
        let mut waited = false;
        loop {
            match self.turn(target, sync)? {
                Turn::Covered => {
                    let counter = if waited { &self.stats.shared } else { &self.stats.skipped };
                    counter.add(1);
                    return Ok(());
                }
                Turn::Wait(ended) => ended.await,
                Turn::Run(run) => return self.run(run, sync).await,
            }
            waited = true;
        }
    }

    async fn resize(&self, size: u64) -> Result<()> {
        let unseen = self.in_flight();
        let outcome = self.storage.resize(size).await;
        self.completed(unseen);
        outcome
    }

    async fn extend_hint(&self, size: u64) {
        // Changes nothing that anybody was told is stored.
        self.storage.extend_hint(size).await;
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        self.storage.block_status(range).await
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        self.storage.prefetch(range).await
    }
}
