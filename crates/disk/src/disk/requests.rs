//! The one choke point of all requests.
//!
//! 1. Every request is counted, measured and checked against the size and the access of the disk,
//!    whatever the export checked before.
//! 2. It waits for its turn, which is measured apart, if the disk has limits on its rates
//!    ([`Throttle`](crate::throttle)). Nothing else waits for it meanwhile: it holds no claim, and
//!    does not count as a change in flight.
//! 3. A change waits for its turn, too: while the image is changed as a whole ([`super::Quiesce`]),
//!    and claims its range ([`Writer::claim`](crate::write::Writer::claim)).
//! 4. `layer` reads, `write` changes.
//! 5. What the writes left to be made durable is completed, once ([`RequestSync`]).
//! 6. A change that finds no room is held and carried out again, if the disk's options say so
//!    ([`super::hold`]).
//! 7. Observers ([`Observers`](crate::observers::Observers)) may hold a change off before it
//!    begins, are told of it when it begins and when it has ended, and may hold its answer off.

use std::pin::pin;

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Fallback, IoVector, Offload, Request, Result, Storage,
    SyncMode, Unmap, WorkBudget,
};
use blockhouse_format::SpaceMode;

use super::Disk;
use super::image_use::UseGuard;
use super::quiesce::WriteGuard;
use crate::claims::Claim;
use crate::durability::RequestSync;
use crate::observers::{ChangeWait, ObservedChange, private_copy};
use crate::options::{DetectZeroes, Discard};
use crate::read_probe::ReadProbe;
use crate::stats::{ExportKind, Operation};
use crate::throttle::RequestCost;
use crate::write::{CompressResult, ZeroOptions};

/// A change in flight: while it exists, no other image takes the place of the one that it goes to.
/// Observers are told of it before it counts as ended.
struct Turn<'a> {
    change: Option<Box<ObservedChange>>,
    image: UseGuard<'a>,
    _guard: WriteGuard<'a>,
}

/// A change that was carried out and is not answered yet. Its image stays open, because the change
/// is made durable there.
struct Ended<'a> {
    image: UseGuard<'a>,
    /// The waits after that.
    waits: Vec<ChangeWait>,
}

impl<'a> Turn<'a> {
    /// The change was carried out.
    fn end(self) -> Ended<'a> {
        let waits = self.change.map_or_else(Vec::new, |change| (*change).complete());
        Ended { image: self.image, waits }
    }
}

impl<S: Storage> Disk<S> {
    /// Carries out one request.
    ///
    /// The future is to be polled until it is ready: requests wait for each other where they
    /// overlap, and where they need the same tables written. One that is dropped loses nothing that
    /// was acknowledged, but what it began may take effect at any later time, also after newer
    /// writes to the same bytes, or be undone; so an export that loses its client lets the
    /// requests in flight come to their end.
    ///
    /// # Errors
    /// `ReadOnly` for a change of a read-only disk, `PastEnd` for a write or zero write past the
    /// end, `InvalidInput` for anything else past the end, `Unsupported` for a
    /// [`FastOnly`](Fallback::Forbidden) zero write that would be slow; or what the storage
    /// answered. After a failed flush every flush and durable write fails until the disk is
    /// opened anew.
    pub async fn submit(&self, request: Request) -> Result<()> {
        self.submit_from(ExportKind::Local, request).await
    }

    /// As [`submit`](Self::submit), counted as a request of this kind of export.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub async fn submit_from(&self, export: ExportKind, request: Request) -> Result<()> {
        let timer = self.request_stats().begin(export, &request);
        let operation = timer.operation();
        if let Some(turn) = self.throttle.admit(|| self.cost(&request)) {
            self.request_stats().wait(operation, pin!(turn)).await;
        }
        let outcome = match request {
            Request::Read { offset, into } => {
                self.read_probes.note(offset, into.len() as u64);
                match self.copies_on_read() {
                    false => self.submit_read(offset, into).await,
                    true => Box::pin(self.copy_on_read(offset, into)).await,
                }
            }
            request => {
                let (request, kept) = self.keep_change(request);
                match (self.carry_out(request, operation).await, kept) {
                    (Err(error), Some(kept)) => {
                        Box::pin(self.retry_held(kept, error, operation)).await
                    }
                    (outcome, _) => outcome,
                }
            }
        };
        timer.end(&outcome);
        if let Err(error) = &outcome {
            self.report_failure(operation, error);
        }
        outcome
    }

    /// As [`submit`](Self::submit), without a turn among the requests that share the disk's limits:
    /// for jobs, which have limits of their own, and tell of failures themselves.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub async fn submit_unlimited(&self, request: Request) -> Result<()> {
        let timer = self.request_stats().begin(ExportKind::Local, &request);
        let outcome = self.carry_out(request, timer.operation()).await;
        timer.end(&outcome);
        outcome
    }

    /// Looks for reads of exactly these ranges by the disk's exports: whether another disk is this
    /// one by another name. One probe at a time: another one takes the place of this.
    pub fn probe_reads(&self, ranges: Vec<ByteRange>) -> ReadProbe<'_> {
        self.read_probes.begin(ranges)
    }

    pub(super) async fn carry_out(&self, request: Request, operation: Operation) -> Result<()> {
        let (ended, sync) = match request {
            Request::Read { offset, into } => return self.submit_read(offset, into).await,
            Request::Write { offset, from, durability } => {
                let (turn, from) = self.begin_write_turn(operation, offset, from).await?;
                let sync = self.begin_sync(durability);
                self.submit_write(offset, from, operation, &sync).await?;
                (turn.end(), sync)
            }
            Request::WriteZeroes { range, unmap, fallback, durability } => {
                let turn = self.begin_turn(operation, range.offset(), range.length()).await;
                let sync = self.begin_sync(durability);
                let how = ZeroOptions { unmap, fallback, writes_small: false };
                self.submit_zeroes(range, how, operation, &sync).await?;
                (turn.end(), sync)
            }
            Request::Discard { range, durability } => {
                let turn = self.begin_turn(operation, range.offset(), range.length()).await;
                let sync = self.begin_sync(durability);
                self.submit_discard(range, &sync).await?;
                (turn.end(), sync)
            }
            Request::Flush => return self.begin_use().layer().flush(SyncMode::Data).await,
            Request::Prefetch { range } => {
                self.check_inside(range)?;
                if self.copies_on_read() {
                    Box::pin(self.copy_ahead(range)).await?;
                }
                return self.begin_use().layer().prefetch(range).await;
            }
        };
        end_change(sync, ended).await
    }

    /// All writes completed so far become durable. As [`Request::Flush`].
    pub async fn flush(&self) -> Result<()> {
        self.submit(Request::Flush).await
    }

    /// Stores `bytes`, which are those of the one cluster at `offset` (fewer where the disk ends
    /// before the cluster does), in compressed form. Compresses on the thread that polls. Two
    /// writes of the same cluster wait for each other.
    ///
    /// # Errors
    /// As a write; `Unsupported` where the format has no compressed clusters, `InvalidInput` for
    /// anything but one cluster.
    pub async fn write_compressed(&self, offset: u64, bytes: &[u8]) -> Result<CompressResult> {
        let stats = self.request_stats();
        let timer = stats.begin_operation(ExportKind::Local, Operation::Write, bytes.len() as u64);
        let outcome = self.execute_compressed(offset, bytes).await;
        timer.end(&outcome);
        outcome
    }

    async fn execute_compressed(&self, offset: u64, bytes: &[u8]) -> Result<CompressResult> {
        let turn = self.begin_turn(Operation::Write, offset, bytes.len() as u64).await;
        self.check_access(offset)?;
        let range = self.check_end(offset, bytes.len() as u64, ErrorKind::PastEnd)?;
        let cluster_size = self.check_one_cluster(range)?;
        let sync = self.begin_sync(Durability::None);
        let result = self.writer().write_compressed(range, cluster_size, bytes, &sync).await?;
        end_change(sync, turn.end()).await?;
        Ok(result)
    }

    /// Gives `range`, which reads as zeros before and after, space of its own without sending
    /// zeros, as far as that can be; what is left of it, from where it could not on. Durable
    /// with the next flush.
    ///
    /// # Errors
    /// As a write; `Unsupported` where space is to be set aside, and the storage cannot.
    pub(crate) async fn take_space(&self, range: ByteRange, mode: SpaceMode) -> Result<ByteRange> {
        let turn = self.begin_turn(Operation::WriteZeroes, range.offset(), range.length()).await;
        self.check_access(range.offset())?;
        self.check_end(range.offset(), range.length(), ErrorKind::PastEnd)?;
        let claim = self.begin_claim(Operation::WriteZeroes, range).await;
        let left = self.writer().take_space(range, mode).await?;
        drop(claim);
        let sync = self.begin_sync(Durability::None);
        end_change(sync, turn.end()).await?;
        Ok(left)
    }

    /// The request's share of the disk's limits.
    fn cost(&self, request: &Request) -> Option<RequestCost> {
        RequestCost::of(request, self.options().durability, self.capabilities().write_zeroes)
    }

    /// The sync that a request's writes and its end need to be as durable as it asks, and at least
    /// as durable as the disk's options ask.
    fn begin_sync(&self, asked: Durability) -> RequestSync<'_, S> {
        RequestSync::new(self.format(), asked.max(self.options().durability))
    }

    /// Waits until the image may be changed, for a change of these bytes other than a write.
    async fn begin_turn(&self, operation: Operation, offset: u64, length: u64) -> Turn<'_> {
        let guard = self.wait_until_unquiesced(operation).await;
        self.wait_for_observers(operation, offset, length).await;
        self.turn(guard, self.observers.begin(offset, length, None))
    }

    fn turn<'a>(&'a self, guard: WriteGuard<'a>, change: Option<Box<ObservedChange>>) -> Turn<'a> {
        Turn { change, image: self.current().uses.begin(), _guard: guard }
    }

    /// Waits until the image may be changed, for a write. The bytes are in memory of its own where
    /// observers are shown them.
    async fn begin_write_turn(
        &self,
        operation: Operation,
        offset: u64,
        from: IoVector,
    ) -> Result<(Turn<'_>, IoVector)> {
        let guard = self.wait_until_unquiesced(operation).await;
        let length = from.len() as u64;
        self.wait_for_observers(operation, offset, length).await;
        if !self.observers.want_bytes(length) {
            return Ok((self.turn(guard, self.observers.begin(offset, length, None)), from));
        }
        let from = private_copy(from)?;
        Ok((self.turn(guard, self.observers.begin(offset, length, Some(&from))), from))
    }

    /// Waits until no observer holds a change of these bytes off.
    async fn wait_for_observers(&self, operation: Operation, offset: u64, length: u64) {
        for wait in self.observers.hold_off(offset, length) {
            self.request_stats().wait(operation, pin!(wait)).await;
        }
    }

    async fn wait_until_unquiesced(&self, operation: Operation) -> WriteGuard<'_> {
        match self.quiesce.try_begin_write() {
            Some(guard) => guard,
            None => self.request_stats().wait(operation, pin!(self.quiesce.begin_write())).await,
        }
    }

    /// Waits until no other change of these blocks is in the way.
    async fn begin_claim(&self, operation: Operation, range: ByteRange) -> Claim<'_> {
        self.request_stats().wait(operation, pin!(self.writer().claim(range))).await
    }

    async fn submit_read(&self, offset: u64, into: IoVector) -> Result<()> {
        let range = self.check_end(offset, into.len() as u64, ErrorKind::InvalidInput)?;
        if range.is_empty() {
            return Ok(());
        }
        let image = self.begin_use();
        image.layer().read(range, into).await
    }

    // Zero writes and discards are boxed below, so that the future of the common way stays small.

    async fn submit_write(
        &self,
        offset: u64,
        from: IoVector,
        operation: Operation,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        self.check_access(offset)?;
        let range = self.check_end(offset, from.len() as u64, ErrorKind::PastEnd)?;
        if range.is_empty() {
            return Ok(());
        }
        if let Some(how) = self.zero_options() {
            let is_zero = is_zero(&from).await;
            // Zeros in the place of a guest's lost memory are not to be stored.
            from.check_intact()?;
            if is_zero {
                return Box::pin(self.submit_zeroes(range, how, operation, sync)).await;
            }
        }
        let claim = self.begin_claim(operation, range).await;
        self.writer().write(range, from, sync, &claim).await
    }

    /// How a write of zeros is made a zero write, if it is to be one.
    fn zero_options(&self) -> Option<ZeroOptions> {
        let unmap = match self.options().detect_zeroes {
            DetectZeroes::Off => return None,
            DetectZeroes::On => Unmap::Forbidden,
            DetectZeroes::Unmap => Unmap::Allowed,
        };
        Some(ZeroOptions { unmap, fallback: Fallback::Allowed, writes_small: false })
    }

    async fn submit_zeroes(
        &self,
        range: ByteRange,
        mut how: ZeroOptions,
        operation: Operation,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        self.check_access(range.offset())?;
        self.check_end(range.offset(), range.length(), ErrorKind::PastEnd)?;
        if range.is_empty() {
            return Ok(());
        }
        let quick = self.capabilities().write_zeroes;
        if how.fallback == Fallback::Forbidden && quick == Offload::Unavailable {
            return Err(self.writer().fast_zero_error(range.offset()));
        }
        if self.options().discard == Discard::Ignore {
            how.unmap = Unmap::Forbidden;
        }
        let claim = self.begin_claim(operation, range).await;
        Box::pin(self.writer().write_zeroes(range, how, sync, &claim)).await
    }

    async fn submit_discard(&self, range: ByteRange, sync: &RequestSync<'_, S>) -> Result<()> {
        self.check_access(range.offset())?;
        self.check_inside(range)?;
        // Blocks that the range covers only in part stay as they are, but for the disk's last one.
        let block = self.layer().block_size();
        let start = range.offset().next_multiple_of(block);
        let is_to_end = range.end() == self.size();
        let end = if is_to_end { range.end() } else { range.end() & !(block - 1) };
        if start >= end || self.capabilities().discard != Offload::Available {
            return Ok(());
        }
        let whole = ByteRange::between(start, end);
        let _claim = self.begin_claim(Operation::Discard, whole).await;
        Box::pin(self.writer().discard(whole, sync)).await
    }

    pub(crate) fn check_inside(&self, range: ByteRange) -> Result<()> {
        self.check_end(range.offset(), range.length(), ErrorKind::InvalidInput).map(|_| ())
    }

    /// The range, if all of it is on the disk; otherwise an error of this kind.
    pub(super) fn check_end(&self, offset: u64, length: u64, kind: ErrorKind) -> Result<ByteRange> {
        let size = self.size();
        match ByteRange::new(offset, length) {
            Some(range) if range.end() <= size => Ok(range),
            _ => {
                let what = format!("{length} bytes reach past the end of {size} bytes");
                Err(Error::new(kind, what).on(self.name()).at(offset))
            }
        }
    }

    /// The size of a cluster, if `range` is exactly one.
    fn check_one_cluster(&self, range: ByteRange) -> Result<u64> {
        let refuse = |kind, what: &str| {
            let error = Error::new(kind, what.to_owned());
            Err(error.on(self.name()).at(range.offset()))
        };
        let (Some(size), Some(_)) = (self.cluster_size(), self.compression()) else {
            return refuse(ErrorKind::Unsupported, "the format has no compressed clusters");
        };
        let wanted = size.min(self.size().saturating_sub(range.offset()));
        if !range.offset().is_multiple_of(size) || range.length() != wanted || range.is_empty() {
            return refuse(ErrorKind::InvalidInput, "only whole clusters are compressed");
        }
        Ok(size)
    }
}

/// Makes a change that was carried out as durable as it asks, and waits for what observers have it
/// wait for.
async fn end_change<S: Storage>(sync: RequestSync<'_, S>, ended: Ended<'_>) -> Result<()> {
    let Ended { waits, image } = ended;
    sync.complete().await?;
    drop(image);
    for wait in waits {
        wait.await;
    }
    Ok(())
}

/// Whether every byte is zero. Long memory that is, is looked at in steps.
async fn is_zero(memory: &IoVector) -> bool {
    const STEP: usize = WorkBudget::QUANTUM as usize;
    if memory.len() <= STEP {
        return memory.is_zero();
    }
    Box::pin(async {
        let budget = WorkBudget::new();
        for start in (0..memory.len()).step_by(STEP) {
            if !memory.is_zero_at(start, STEP) {
                return false;
            }
            budget.spend(WorkBudget::QUANTUM).await;
        }
        true
    })
    .await
}
