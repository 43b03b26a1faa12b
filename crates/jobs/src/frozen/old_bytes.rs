//! Saves the old content of each part of a disk before the part's first change after one moment.
//!
//! Guarantees: a change begins only when the old bytes of all blocks that it touches are saved
//! (`index`), in memory or in the scratch disk (`log`), or the backup has failed. So if a block is
//! not saved after it was read, and the backup has not failed, the read returned its content at
//! that moment. A change waits for the copies of blocks that are not saved yet, by itself or by
//! another change. A copy waits for the scratch disk only when memory is full. Readers of the
//! backup delay no change. If none of a change's old bytes are saved before the timer expires, the
//! backup fails, and the change continues. A full or failing scratch disk fails the backup and
//! never the change. A long change saves `MAX_PARTS` parts of `PART` bytes at a time. At most
//! `MAX_COPIES` copies of `MAX_READ` bytes are in memory, beside the log's end.

use std::cell::Cell;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use async_lock::Semaphore;
use blockhouse_core::{ByteRange, Error, ErrorKind, IoVector, Request, Result, Storage, rare};
use blockhouse_disk::{BlockStatus, BlockStatusCache, ChangeId, ChangeObserver, ChangeWait, Disk};
use futures_util::future::{Either, select};
use futures_util::{StreamExt, TryStreamExt, stream};

use super::index::{Claim, Claimed, Index};
use super::log::Log;
use super::region::{BLOCK, GRANULE, MAX_LOG, Place};
use super::{FailureTeller, FreezeOptions};

/// Maximum bytes of one read.
const MAX_READ: u64 = 4 * GRANULE;
/// Maximum copies in flight.
const MAX_COPIES: usize = 64;
/// Bytes of one part of a change. The old bytes of a part are saved in order.
const PART: u64 = 4 << 20;
/// Maximum parts of one change that are saved concurrently.
const MAX_PARTS: usize = 16;

/// See the module's page.
pub(super) struct OldBytes<S: Storage> {
    source: Arc<Disk<S>>,
    /// Bytes of the disk at the moment of the freeze.
    size: u64,
    options: FreezeOptions,
    index: Index,
    log: Log<S>,
    copies: Semaphore,
    /// Number of saved parts of claims, of all changes together.
    saved: AtomicU64,
    failure: OnceLock<String>,
    teller: FailureTeller,
}

/// The operations in flight that save one change's old bytes.
#[derive(Default)]
struct Saving {
    /// Reads of the disk in flight.
    reads: Cell<u32>,
    /// Appends to the log in flight.
    appends: Cell<u32>,
    /// Number of these operations that have ended.
    ended: Cell<u64>,
}

/// Counts an operation in flight.
struct InFlight<'a> {
    count: &'a Cell<u32>,
    ended: &'a Cell<u64>,
}

impl<'a> InFlight<'a> {
    fn begin(count: &'a Cell<u32>, saving: &'a Saving) -> Self {
        count.update(|count| count + 1);
        Self { count, ended: &saving.ended }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.count.update(|count| count.saturating_sub(1));
        self.ended.update(|ended| ended + 1);
    }
}

impl<S: Storage> OldBytes<S> {
    /// Creates the state before the freeze: no block is saved yet.
    ///
    /// # Errors
    /// As [`Index::new`].
    pub(super) fn new(
        source: Arc<Disk<S>>,
        scratch: Disk<S>,
        options: FreezeOptions,
        teller: FailureTeller,
    ) -> Result<Self> {
        let size = source.size();
        let index = Index::new(size, options.max_index_bytes)?;
        let log = Log::new(scratch, options.scratch_limit.min(MAX_LOG), options.memory);
        let (copies, failure) = (Semaphore::new(MAX_COPIES), OnceLock::new());
        let saved = AtomicU64::new(0);
        Ok(Self { source, size, options, index, log, copies, saved, failure, teller })
    }

    /// The disk that stays in use.
    pub(super) fn source(&self) -> &Arc<Disk<S>> {
        &self.source
    }

    /// Bytes of the disk at the moment of the freeze.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// The locations of the old bytes.
    pub(super) fn index(&self) -> &Index {
        &self.index
    }

    /// The old bytes that are saved.
    pub(super) fn log(&self) -> &Log<S> {
        &self.log
    }

    /// The reason why the backup has failed or ended, if it has.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Stops saving, as after a failure of the backup, but without a report.
    pub(super) fn end(&self) {
        // An earlier failure stays.
        let _ = self.failure.set("it has ended".into());
        self.stop_waiting();
    }

    fn fail(&self, error: &Error) {
        let why = error.to_string();
        if self.failure.set(why.clone()).is_ok() {
            (self.teller)(&why);
        }
        self.stop_waiting();
    }

    fn stop_waiting(&self) {
        self.log.end();
        self.index.changed().notify_all();
    }

    /// Writes full segments to the scratch disk, until the backup has ended or failed. On return no
    /// write is in flight, and the space of the scratch disk is freed. Guest changes do not wait
    /// for this.
    pub(super) async fn write_behind(&self) {
        if let Err(error) = self.log.write_behind().await {
            self.fail(&error);
        }
        self.log.discard().await;
    }

    /// Saves the old bytes of `range`, or fails the backup.
    async fn save(self: Arc<Self>, range: ByteRange) {
        let saving = Saving::default();
        let parts = parts(range).map(|part| self.save_part(part, &saving));
        let all = stream::iter(parts).buffer_unordered(MAX_PARTS).try_collect::<()>();
        let outcome = match select(pin!(all), pin!(self.time_out(&saving))).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right((error, _)) => Err(error),
        };
        if let Err(error) = outcome {
            self.fail(&error);
        }
    }

    /// Returns an error when the timer expires and no old bytes of a change were saved meanwhile.
    async fn time_out(&self, saving: &Saving) -> Error {
        let Some(timer) = &self.options.timer else { return std::future::pending().await };
        let progress = || match saving.reads.get() + saving.appends.get() {
            // The change waits for copies of other changes.
            0 => (false, self.saved.load(Ordering::Relaxed)),
            _ => (true, saving.ended.get()),
        };
        loop {
            let before = progress();
            timer().await;
            if progress() == before {
                return self.too_slow(saving);
            }
        }
    }

    fn too_slow(&self, saving: &Saving) -> Error {
        let (who, name) = match (saving.reads.get(), saving.appends.get()) {
            (1.., _) => ("the disk itself", self.source.name()),
            (0, 1..) => ("the scratch file", self.log.name()),
            (0, 0) => ("copies of other changes", self.source.name()),
        };
        let what = format!("{who} did not answer in time, and the guest goes on");
        Error::new(ErrorKind::Io, what).on(name)
    }

    async fn save_part(&self, range: ByteRange, saving: &Saving) -> Result<()> {
        let mut rest = range;
        let next = |rest| match self.failure.get() {
            Some(_) => Some(Claim::Nothing),
            None => Some(self.index.claim(rest)).filter(|claim| !matches!(claim, Claim::Wait)),
        };
        while !rest.is_empty() {
            match self.index.changed().wait_until(|| next(rest)).await {
                Claim::Copy(claimed) => {
                    let end = claimed.rest().end();
                    let _permit = self.copies.acquire().await;
                    self.copy(claimed, saving).await?;
                    rest = rest.after(end);
                }
                Claim::Nothing | Claim::Wait => break,
            }
        }
        Ok(())
    }

    /// Copies the claimed bytes that are not zeros.
    async fn copy(&self, mut claimed: Claimed<'_>, saving: &Saving) -> Result<()> {
        let mut cache = BlockStatusCache::default();
        while !claimed.rest().is_empty() {
            let rest = claimed.rest();
            // A short range is read at once: a query of its allocation takes as long as a read.
            if rest.length() > GRANULE {
                let asked = InFlight::begin(&saving.reads, saving);
                let (status, length) = self.source.block_status(rest, &mut cache).await?;
                drop(asked);
                if status != BlockStatus::Data {
                    claimed.finish_zeros(rest.offset() + length);
                    self.save_hole(rest.truncate(length)).await?;
                }
            }
            let range = claimed.first_granules(MAX_READ);
            if !range.is_empty()
                && self.copy_data(&mut claimed, range, saving).await? == Place::Zeros
            {
                self.save_hole(range).await?;
            }
            self.saved.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Records the clusters that `zeros` touches as zeros, as far as they lie in a hole of the
    /// image. Reason: the change turns whole clusters into data, and readers must still see a hole.
    async fn save_hole(&self, zeros: ByteRange) -> Result<()> {
        let Some(cluster) = self.source.image().cluster_size().filter(|size| *size > BLOCK) else {
            return Ok(());
        };
        let start = zeros.offset() - zeros.offset() % cluster;
        let end = zeros.end().next_multiple_of(cluster).min(self.size);
        let mut rest = ByteRange::between(start, end);
        while !rest.is_empty()
            && let Claim::Copy(mut claimed) = self.index.claim(rest)
        {
            let run = claimed.rest();
            let mut cache = BlockStatusCache::default();
            let (status, length) = self.source.block_status(run, &mut cache).await?;
            if status == BlockStatus::Data {
                break;
            }
            claimed.finish_zeros(run.offset() + length);
            // The claim may reach past the cluster.
            rest = rest.after(run.end());
        }
        Ok(())
    }

    /// Copies `range`: the first granules of the claim, or the claimed part of one granule. Returns
    /// the location of the last granule.
    async fn copy_data(
        &self,
        claimed: &mut Claimed<'_>,
        range: ByteRange,
        saving: &Saving,
    ) -> Result<Place> {
        let length = range.length() as usize;
        let mut buffer = self.log.pool().get(length.next_multiple_of(BLOCK as usize))?;
        // The disk may end inside its last block.
        buffer.bytes_mut()[length..].fill(0);
        let (offset, into) = (range.offset(), buffer.lend_range(0, length));
        let read = InFlight::begin(&saving.reads, saving);
        self.source.submit_unlimited(Request::Read { offset, into }).await?;
        drop(read);
        let mut bytes = buffer.bytes();
        let mut place = Place::Source;
        while !bytes.is_empty() {
            let length = claimed.first_granules(GRANULE).length().next_multiple_of(BLOCK);
            let (part, rest) = bytes.split_at(length as usize);
            place = if is_zero(part) {
                Place::Zeros
            } else {
                let _append = InFlight::begin(&saving.appends, saving);
                Place::Log(self.log.append(part).await?)
            };
            claimed.finish_part(place);
            bytes = rest;
        }
        Ok(place)
    }
}

/// The parts of a change, each of which is saved from its start to its end.
fn parts(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let mut rest = range;
    std::iter::from_fn(move || {
        let part = rest.truncate(PART - rest.offset() % PART);
        rest = rest.after(part.end());
        (!part.is_empty()).then_some(part)
    })
}

/// Whether `bytes`, whole blocks, are all zeros.
fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];
    bytes.chunks(ZEROS.len()).all(|block| block == ZEROS)
}

/// Makes the changes of a disk wait for [`OldBytes`].
pub(super) struct Watch<S: Storage>(pub(super) Arc<OldBytes<S>>);

impl<S: Storage + Send + Sync> ChangeObserver for Watch<S> {
    fn hold_off(&self, range: ByteRange) -> Option<ChangeWait> {
        let old = &self.0;
        let range = range.truncate(old.size.saturating_sub(range.offset()));
        if range.is_empty() || old.failure.get().is_some() || old.index.is_saved(range) {
            return None;
        }
        Some(rare(Arc::clone(old).save(range)))
    }

    fn begins(&self, _range: ByteRange, _bytes: Option<&IoVector>) -> ChangeId {
        0
    }

    fn completed(&self, _change: ChangeId, _range: ByteRange) -> Option<ChangeWait> {
        None
    }

    fn abandoned(&self, _change: ChangeId, _range: ByteRange) {}
}
