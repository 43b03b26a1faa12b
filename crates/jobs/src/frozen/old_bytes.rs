//! What a disk held at one moment, of the parts that have changed since: copied before they change.
//!
//! Guarantees: a change is made when the old bytes of all granules that it touches are in the scratch disk, or the backup
//! has failed. So a granule that is not `saved` after it was read, while the backup has not failed, holds what it held at
//! the moment. A change waits for the copies of the granules that it touches first, for nothing else, and no longer than
//! the timer says: readers hold nothing off. An error of the scratch disk, and one that is full, fails the backup and never
//! the change. At most `MAX_COPIES` copies of `MAX_COPY` bytes are in memory.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use async_lock::Semaphore;
use blockhouse_core::sync::Condvar;
use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, IoVector, Request, Result, Storage,
};
use blockhouse_disk::{
    BlockStatus, BlockStatusCache, ChangeId, ChangeObserver, ChangeWait, DirtyMap, Disk,
};
use futures_util::future::{Either, select};
use parking_lot::Mutex;

use super::{FailureTeller, FreezeOptions};

/// The unit that is copied as a whole, in bytes.
const GRANULE: u64 = 64 << 10;
/// Bytes of one copy, at most.
const MAX_COPY: u64 = 1 << 20;
/// Copies that are in flight together.
const MAX_COPIES: usize = 16;

/// See the module's page.
pub(super) struct OldBytes<S: Storage> {
    source: Arc<Disk<S>>,
    /// As long as the source. The old bytes are where they were.
    scratch: Disk<S>,
    options: FreezeOptions,
    /// Bytes of the scratch disk in use.
    used: AtomicU64,
    saved: DirtyMap,
    /// Granules that are being copied. None overlap.
    in_flight: Mutex<Vec<ByteRange>>,
    /// A copy ended, or the backup failed.
    ended: Condvar,
    copies: Semaphore,
    failure: OnceLock<String>,
    teller: FailureTeller,
}

/// What is to be done next for a change.
enum Next<'a, S: Storage> {
    /// Nothing: all old bytes are saved, or the backup has failed.
    Nothing,
    /// Copy these granules.
    Copy(Copying<'a, S>),
}

/// Granules that are being copied, until this is dropped.
struct Copying<'a, S: Storage> {
    old: &'a OldBytes<S>,
    range: ByteRange,
}

impl<S: Storage> Drop for Copying<'_, S> {
    fn drop(&mut self) {
        self.old.in_flight.lock().retain(|range| *range != self.range);
        self.old.ended.notify_all();
    }
}

impl<S: Storage> OldBytes<S> {
    /// Nothing has changed since the moment.
    ///
    /// # Errors
    /// As [`DirtyMap::new`].
    pub(super) fn new(
        source: Arc<Disk<S>>,
        scratch: Disk<S>,
        options: FreezeOptions,
        teller: FailureTeller,
    ) -> Result<Self> {
        let saved = DirtyMap::new(source.size(), GRANULE)?;
        Ok(Self {
            source,
            scratch,
            options,
            used: AtomicU64::new(0),
            saved,
            in_flight: Mutex::default(),
            ended: Condvar::new(),
            copies: Semaphore::new(MAX_COPIES),
            failure: OnceLock::new(),
            teller,
        })
    }

    /// The disk that goes on.
    pub(super) fn source(&self) -> &Arc<Disk<S>> {
        &self.source
    }

    /// The old bytes of what is saved.
    pub(super) fn scratch(&self) -> &Disk<S> {
        &self.scratch
    }

    /// The granules whose old bytes are in the scratch disk.
    pub(super) fn saved(&self) -> &DirtyMap {
        &self.saved
    }

    /// Bytes of the scratch disk in use.
    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Why the backup has failed, if it has.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Saves the old bytes of `range`, or has the backup fail.
    async fn save(self: Arc<Self>, range: ByteRange) {
        let saving = pin!(self.try_save(range));
        let outcome = match &self.options.timer {
            None => saving.await,
            Some(timer) => match select(saving, timer()).await {
                Either::Left((outcome, _)) => outcome,
                Either::Right(_) => {
                    let what = "the scratch file did not answer in time, and the guest goes on";
                    Err(Error::new(ErrorKind::Io, what).on(self.scratch.name()))
                }
            },
        };
        if let Err(error) = outcome {
            let is_full = error.kind() == ErrorKind::NoSpace;
            self.fail(error.to_string());
            if is_full {
                // Others may need the space.
                let (range, durability) =
                    (ByteRange::between(0, self.scratch.size()), Durability::None);
                let _ = self.scratch.submit(Request::Discard { range, durability }).await;
            }
        }
    }

    /// Saves nothing more: as if the backup had failed, without telling.
    pub(super) fn end(&self) {
        // Where it has failed, that stays.
        let _ = self.failure.set("it has ended".into());
        self.ended.notify_all();
    }

    fn fail(&self, why: String) {
        if self.failure.set(why.clone()).is_ok() {
            (self.teller)(&why);
            self.ended.notify_all();
        }
    }

    async fn try_save(&self, range: ByteRange) -> Result<()> {
        loop {
            match self.ended.wait_until(|| self.next(range)).await {
                Next::Nothing => return Ok(()),
                Next::Copy(copying) => {
                    let _permit = self.copies.acquire().await;
                    self.copy(copying.range).await?;
                    self.saved.mark(copying.range);
                }
            }
        }
    }

    /// `None` while another change copies what comes next.
    fn next(&self, range: ByteRange) -> Option<Next<'_, S>> {
        if self.failure.get().is_some() {
            return Some(Next::Nothing);
        }
        let mut in_flight = self.in_flight.lock();
        let run = self.saved.next_clean(range.offset(), MAX_COPY);
        let Some(run) = run.filter(|run| run.offset() < range.end()) else {
            return Some(Next::Nothing);
        };
        // Up to the end of the granule in which the range ends.
        let end = range.end().next_multiple_of(GRANULE).min(run.end());
        let run = ByteRange::between(run.offset(), end);
        if in_flight.iter().any(|other| other.offset() < run.end() && run.offset() < other.end()) {
            return None;
        }
        in_flight.push(run);
        Some(Next::Copy(Copying { old: self, range: run }))
    }

    /// Copies what is not zero, which the scratch disk is where nothing was written.
    async fn copy(&self, range: ByteRange) -> Result<()> {
        let mut cache = BlockStatusCache::default();
        let mut rest = range;
        while !rest.is_empty() {
            let (status, length) = self.source.block_status(rest, &mut cache).await?;
            if status == BlockStatus::Data {
                self.copy_data(rest.truncate(length)).await?;
            }
            rest = rest.skip(length);
        }
        Ok(())
    }

    async fn copy_data(&self, range: ByteRange) -> Result<()> {
        let length = range.length();
        let used = self.used.fetch_add(length, Ordering::Relaxed) + length;
        if used > self.options.scratch_limit {
            let what = format!(
                "the scratch file would have more than its {} bytes",
                self.options.scratch_limit
            );
            let error = Error::new(ErrorKind::NoSpace, what).on(self.scratch.name());
            return Err(error.hint("begin the backup again with a larger --scratch-size"));
        }
        let mut buffer = Buffer::try_new(length as usize)?;
        let (offset, into) = (range.offset(), buffer.lend());
        self.source.submit_unlimited(Request::Read { offset, into }).await?;
        let (from, durability) = (buffer.lend(), Durability::None);
        self.scratch.submit_unlimited(Request::Write { offset, from, durability }).await
    }
}

/// Has the changes of a disk wait for [`OldBytes`].
pub(super) struct Watch<S: Storage>(pub(super) Arc<OldBytes<S>>);

impl<S: Storage + Send + Sync> ChangeObserver for Watch<S> {
    fn hold_off(&self, range: ByteRange) -> Option<ChangeWait> {
        let old = &self.0;
        let range = range.truncate(old.source.size().saturating_sub(range.offset()));
        if range.is_empty() || old.failure.get().is_some() || old.saved.is_all_dirty(range) {
            return None;
        }
        Some(Box::pin(Arc::clone(old).save(range)))
    }

    fn begins(&self, _range: ByteRange, _bytes: Option<&IoVector>) -> ChangeId {
        0
    }

    fn completed(&self, _change: ChangeId, _range: ByteRange) -> Option<ChangeWait> {
        None
    }

    fn abandoned(&self, _change: ChangeId, _range: ByteRange) {}
}
