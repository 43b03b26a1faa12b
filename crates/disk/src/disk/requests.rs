//! The entry points of a disk's requests, and the steps of a request in their order.
//!
//! 1. The request is counted, and its time is measured (except [`take_space`](Disk::take_space)).
//! 2. If the disk has rate limits, the request waits until they admit it
//!    ([`Throttle`](crate::throttle)); the wait is measured separately. No other request waits for
//!    such a request: it holds no claim, and does not count as a change in flight.
//! 3. A change waits while the disk is quiesced ([`super::Quiesce`]), and while an observer
//!    ([`Observers`](crate::observers::Observers)) delays it. Then observers learn that it begins.
//! 4. The access mode and the size of the disk are checked, whatever the export has checked
//!    before. Reason: both may have changed while the request waited.
//! 5. A change claims its range ([`Writer::claim`](crate::write::Writer::claim)).
//! 6. Reads go to the module `layer`, and changes go to the module `write`.
//! 7. Observers learn that the change has ended. One sync makes the change durable as required, if
//!    its writes are not durable by themselves ([`RequestSync`]). Then observers may delay the
//!    reply.
//! 8. A change that gets ENOSPC is held and retried, if the disk's options say so
//!    ([`super::hold`]).
//!
//! Steps 2 and 8 are only for [`submit`](Disk::submit) and [`submit_from`](Disk::submit_from).

use std::pin::pin;

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Fallback, IoVector, Offload, Request, Result, Storage,
    SyncMode, Unmap, WorkBudget, rare,
};
use blockhouse_format::SpaceMode;

use super::Disk;
use super::access::check_writable_at;
use super::held_changes::KeptChange;
use super::in_flight::RequestInFlight;
use super::quiesce::WriteGuard;
use crate::claims::Claim;
use crate::durability::RequestSync;
use crate::image::{Image, UseGuard};
use crate::observers::{ChangeWait, ObservedChange, private_copy};
use crate::options::{DetectZeroes, Discard};
use crate::stats::{ExportKind, Operation};
use crate::throttle::RequestCost;
use crate::write::{CompressResult, ZeroOptions};

/// A change in flight. While a `Turn` exists, the image of the disk is not replaced. The order of
/// the fields matters: observers receive the end of the change before `_guard` ends it.
struct Turn<'a> {
    change: Option<Box<ObservedChange>>,
    image: UseGuard<'a>,
    _guard: WriteGuard<'a>,
}

/// A change that has succeeded, before its sync and its reply. Its image stays open until the sync
/// has completed.
struct Ended<'a> {
    image: UseGuard<'a>,
    /// The futures of observers, which are awaited when the change is durable.
    waits: Vec<ChangeWait>,
}

impl<'a> Turn<'a> {
    /// Ends the turn of a change that was carried out.
    fn end(self) -> Ended<'a> {
        let waits = self.change.map_or_else(Vec::new, |change| (*change).complete());
        Ended { image: self.image, waits }
    }
}

impl<S: Storage> Disk<S> {
    /// Carries out one request.
    ///
    /// The caller polls the future until it is ready: requests wait for each other if they overlap,
    /// or need the same metadata written. A dropped future loses no acknowledged data, but the
    /// outcome of its own change is open: it may be undone, or take effect later, even over newer
    /// writes to the same bytes. So an export that loses its client lets requests in flight
    /// complete.
    ///
    /// # Errors
    /// `ReadOnly` for a change of a read-only disk, `PastEnd` for a write or zero write past the
    /// end, `InvalidInput` for anything else past the end, `Unsupported` for a zero write with
    /// [`Fallback::Forbidden`] that would be slow; or the storage's error.
    /// After a failed flush every flush and durable write fails until the disk is reopened.
    pub async fn submit(&self, request: Request) -> Result<()> {
        self.submit_from(ExportKind::Local, request).await
    }

    /// As [`submit`](Self::submit), counted as a request of this kind of export.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub async fn submit_from(&self, export: ExportKind, request: Request) -> Result<()> {
        let timer = self.request_stats().begin(export, &request);
        let in_flight = RequestInFlight { disk: self, operation: timer.operation() };
        let cost = || {
            let image = self.image();
            let zeroes = image.capabilities().write_zeroes;
            RequestCost::of(&request, image.options.durability, zeroes)
        };
        if let Some(turn) = self.throttle.admit(cost) {
            in_flight.wait(pin!(turn)).await;
        }
        let outcome = match request {
            Request::Read { offset, into } => {
                self.read_probes.note(offset, into.len() as u64);
                if self.copies_on_read() {
                    rare(in_flight.copy_on_read(offset, into)).await
                } else {
                    in_flight.read(offset, into).await
                }
            }
            request => {
                let (request, kept) = KeptChange::of(self, request);
                match (in_flight.carry_out(request).await, kept) {
                    (Err(error), Some(kept)) => rare(kept.retry(in_flight, error)).await,
                    (outcome, _) => outcome,
                }
            }
        };
        timer.end(&outcome);
        if let Err(error) = &outcome {
            self.report_failure(in_flight.operation, error);
        }
        outcome
    }

    /// As [`submit`](Self::submit), for jobs, which have limits of their own and report failures
    /// themselves: the disk's limits do not apply, ENOSPC is not retried, and a read is not copied
    /// into the image.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub async fn submit_unlimited(&self, request: Request) -> Result<()> {
        let timer = self.request_stats().begin(ExportKind::Local, &request);
        let in_flight = RequestInFlight { disk: self, operation: timer.operation() };
        let outcome = in_flight.carry_out(request).await;
        timer.end(&outcome);
        outcome
    }

    /// Makes all completed writes durable ([`Request::Flush`]).
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub async fn flush(&self) -> Result<()> {
        rare(self.submit(Request::Flush)).await
    }

    /// Writes the cluster at `offset` in compressed form, on the thread that polls. `bytes` is one
    /// cluster, or the rest of the disk. Two writes of the same cluster wait for each other. The
    /// disk's limits do not apply.
    ///
    /// # Errors
    /// As a write; `Unsupported` if the format has no compressed clusters, `InvalidInput` for
    /// anything but one cluster.
    pub async fn write_compressed(&self, offset: u64, bytes: &[u8]) -> Result<CompressResult> {
        let (stats, operation) = (self.request_stats(), Operation::Write);
        let timer = stats.begin_operation(ExportKind::Local, operation, bytes.len() as u64);
        let outcome =
            RequestInFlight { disk: self, operation }.write_compressed(offset, bytes).await;
        timer.end(&outcome);
        outcome
    }

    /// Allocates host space for `range` without writing zeros. The caller ensures that `range`
    /// reads as zeros, which it still does afterwards. Returns the part that got no space, at the
    /// end of `range`. The next flush makes the allocation durable.
    ///
    /// # Errors
    /// As a write; `Unsupported` if `mode` is not `Full`, and the storage cannot do it.
    pub(crate) async fn take_space(&self, range: ByteRange, mode: SpaceMode) -> Result<ByteRange> {
        let in_flight = RequestInFlight { disk: self, operation: Operation::WriteZeroes };
        let turn = in_flight.begin_turn(range.offset(), range.length()).await;
        check_writable_at(self, range.offset())?;
        let image = self.image();
        image.check_end(range.offset(), range.length(), ErrorKind::PastEnd)?;
        let claim = in_flight.begin_claim(range).await;
        let left = image.writer().take_space(range, mode).await?;
        drop(claim);
        let sync = begin_sync(image, Durability::None);
        end_change(sync, turn.end()).await?;
        Ok(left)
    }
}

impl<'a, S: Storage> RequestInFlight<'a, S> {
    /// The disk's current image. It stays the same while a change has its [`Turn`]. A read or a
    /// flush takes [`Disk::begin_use`] instead.
    fn image(self) -> &'a Image<S> {
        self.disk.image()
    }

    pub(super) async fn carry_out(self, request: Request) -> Result<()> {
        let (ended, sync) = match request {
            Request::Read { offset, into } => return self.read(offset, into).await,
            Request::Write { offset, from, durability } => {
                let (turn, from) = self.begin_write_turn(offset, from).await?;
                let sync = begin_sync(self.image(), durability);
                self.write(offset, from, &sync).await?;
                (turn.end(), sync)
            }
            Request::WriteZeroes { range, unmap, fallback, durability } => {
                let turn = self.begin_turn(range.offset(), range.length()).await;
                let sync = begin_sync(self.image(), durability);
                let how = ZeroOptions { unmap, fallback, writes_small: false };
                self.write_zeroes(range, how, &sync).await?;
                (turn.end(), sync)
            }
            Request::Discard { range, durability } => {
                let turn = self.begin_turn(range.offset(), range.length()).await;
                let sync = begin_sync(self.image(), durability);
                self.discard(range, &sync).await?;
                (turn.end(), sync)
            }
            Request::Flush => return self.disk.begin_use().layer().flush(SyncMode::Data).await,
            Request::Prefetch { range } => {
                if self.disk.copies_on_read() {
                    self.image().check_inside(range)?;
                    rare(self.copy_ahead(range)).await?;
                }
                let image = self.disk.begin_use();
                image.check_inside(range)?;
                return image.layer().prefetch(range).await;
            }
        };
        end_change(sync, ended).await
    }

    async fn write_compressed(self, offset: u64, bytes: &[u8]) -> Result<CompressResult> {
        let turn = self.begin_turn(offset, bytes.len() as u64).await;
        check_writable_at(self.disk, offset)?;
        let image = self.image();
        let range = image.check_end(offset, bytes.len() as u64, ErrorKind::PastEnd)?;
        let cluster_size = check_one_cluster(image, range)?;
        let sync = begin_sync(image, Durability::None);
        let result = image.writer().write_compressed(range, cluster_size, bytes, &sync).await?;
        end_change(sync, turn.end()).await?;
        Ok(result)
    }

    /// Begins a change of these bytes other than a write, after the waits for quiesce and for
    /// observers.
    async fn begin_turn(self, offset: u64, length: u64) -> Turn<'a> {
        let guard = self.wait_until_unquiesced().await;
        self.wait_for_observers(offset, length).await;
        self.turn(guard, self.disk.observers.begin(offset, length, None))
    }

    fn turn(self, guard: WriteGuard<'a>, change: Option<Box<ObservedChange>>) -> Turn<'a> {
        Turn { change, image: self.image().uses.begin(), _guard: guard }
    }

    /// Begins a write, after the waits for quiesce and for observers. The bytes are copied to
    /// private memory if observers receive them.
    async fn begin_write_turn(self, offset: u64, from: IoVector) -> Result<(Turn<'a>, IoVector)> {
        let guard = self.wait_until_unquiesced().await;
        let length = from.len() as u64;
        self.wait_for_observers(offset, length).await;
        if !self.disk.observers.want_bytes(length) {
            return Ok((self.turn(guard, self.disk.observers.begin(offset, length, None)), from));
        }
        let from = private_copy(from)?;
        Ok((self.turn(guard, self.disk.observers.begin(offset, length, Some(&from))), from))
    }

    /// Waits until no observer delays a change of these bytes.
    async fn wait_for_observers(self, offset: u64, length: u64) {
        for wait in self.disk.observers.hold_off(offset, length) {
            self.wait(pin!(wait)).await;
        }
    }

    async fn wait_until_unquiesced(self) -> WriteGuard<'a> {
        match self.disk.quiesce.try_begin_write() {
            Some(guard) => guard,
            None => self.wait(pin!(self.disk.quiesce.begin_write())).await,
        }
    }

    /// Waits until no conflicting change of these blocks is in flight.
    async fn begin_claim(self, range: ByteRange) -> Claim<'a> {
        self.wait(pin!(self.image().writer().claim(range))).await
    }

    async fn read(self, offset: u64, into: IoVector) -> Result<()> {
        let image = self.disk.begin_use();
        let range = image.check_end(offset, into.len() as u64, ErrorKind::InvalidInput)?;
        if range.is_empty() {
            return Ok(());
        }
        image.layer().read(range, into).await
    }

    // Zero writes and discards are boxed below, so that the future of the common path stays small.

    async fn write(self, offset: u64, from: IoVector, sync: &RequestSync<'_, S>) -> Result<()> {
        check_writable_at(self.disk, offset)?;
        let range = self.image().check_end(offset, from.len() as u64, ErrorKind::PastEnd)?;
        if range.is_empty() {
            return Ok(());
        }
        if let Some(how) = self.zero_options() {
            let is_zero = is_zero(&from).await;
            // Guest memory that has vanished reads as zeros, which must not be stored.
            from.check_intact()?;
            if is_zero {
                return rare(self.write_zeroes(range, how, sync)).await;
            }
        }
        if self.image().options.compress {
            return rare(self.write_clusters(range, from, sync)).await;
        }
        let claim = self.begin_claim(range).await;
        self.image().writer().write(range, from, sync, &claim).await
    }

    /// Writes cluster by cluster: whole clusters in compressed form where that saves space, and
    /// other parts as they are. The thread that polls compresses.
    async fn write_clusters(
        self,
        range: ByteRange,
        mut from: IoVector,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        let image = self.image();
        let size = image.cluster_size().unwrap_or(range.length());
        let mut start = range.offset();
        while start < range.end() {
            let end = range.end().min((start / size + 1) * size);
            let part = ByteRange::between(start, end);
            let rest = from.split_off(part.length() as usize);
            let mut result = CompressResult::Incompressible;
            if check_one_cluster(image, part).is_ok() {
                let mut bytes = vec![0; part.length() as usize];
                from.copy_to(&mut bytes);
                from.check_intact()?;
                result = image.writer().write_compressed(part, size, &bytes, sync).await?;
            }
            if result == CompressResult::Incompressible {
                let claim = self.begin_claim(part).await;
                image.writer().write(part, from, sync, &claim).await?;
            }
            (start, from) = (end, rest);
        }
        Ok(())
    }

    /// The options of the zero write that replaces a write of zeros; `None` if zeros are not
    /// detected.
    fn zero_options(self) -> Option<ZeroOptions> {
        let unmap = match self.image().options.detect_zeroes {
            DetectZeroes::Off => return None,
            DetectZeroes::On => Unmap::Forbidden,
            DetectZeroes::Unmap => Unmap::Allowed,
        };
        Some(ZeroOptions { unmap, fallback: Fallback::Allowed, writes_small: false })
    }

    async fn write_zeroes(
        self,
        range: ByteRange,
        mut how: ZeroOptions,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        check_writable_at(self.disk, range.offset())?;
        self.image().check_end(range.offset(), range.length(), ErrorKind::PastEnd)?;
        if range.is_empty() {
            return Ok(());
        }
        let quick = self.image().capabilities().write_zeroes;
        if how.fallback == Fallback::Forbidden && quick == Offload::Unavailable {
            return Err(self.image().writer().fast_zero_error(range.offset()));
        }
        if self.image().options.discard == Discard::Ignore {
            how.unmap = Unmap::Forbidden;
        }
        let claim = self.begin_claim(range).await;
        rare(self.image().writer().write_zeroes(range, how, sync, &claim)).await
    }

    async fn discard(self, range: ByteRange, sync: &RequestSync<'_, S>) -> Result<()> {
        check_writable_at(self.disk, range.offset())?;
        self.image().check_inside(range)?;
        // Blocks that the range covers only in part stay as they are, except the disk's last block.
        let block = self.image().layer().block_size();
        let start = range.offset().next_multiple_of(block);
        let is_to_end = range.end() == self.image().size();
        let end = if is_to_end { range.end() } else { range.end() & !(block - 1) };
        if start >= end || self.image().capabilities().discard != Offload::Available {
            return Ok(());
        }
        let whole = ByteRange::between(start, end);
        let _claim = self.begin_claim(whole).await;
        rare(self.image().writer().discard(whole, sync)).await
    }
}

/// The size of a cluster, if `range` is exactly one cluster.
fn check_one_cluster<S: Storage>(image: &Image<S>, range: ByteRange) -> Result<u64> {
    let refuse = |kind, what: &str| {
        let error = Error::new(kind, what.to_owned());
        Err(error.on(image.name()).at(range.offset()))
    };
    let (Some(size), Some(_)) = (image.cluster_size(), image.compression()) else {
        return refuse(ErrorKind::Unsupported, "the format has no compressed clusters");
    };
    let wanted = size.min(image.size().saturating_sub(range.offset()));
    if !range.offset().is_multiple_of(size) || range.length() != wanted || range.is_empty() {
        return refuse(ErrorKind::InvalidInput, "only whole clusters are compressed");
    }
    Ok(size)
}

/// The sync of a request, with the durability that the request or the image's options require,
/// whichever is greater.
fn begin_sync<S: Storage>(image: &Image<S>, asked: Durability) -> RequestSync<'_, S> {
    RequestSync::new(image.format(), asked.max(image.options.durability))
}

/// Makes a change that was carried out as durable as required, and waits as long as observers
/// require.
async fn end_change<S: Storage>(sync: RequestSync<'_, S>, ended: Ended<'_>) -> Result<()> {
    let Ended { waits, image } = ended;
    sync.complete().await?;
    drop(image);
    for wait in waits {
        wait.await;
    }
    Ok(())
}

/// Whether every byte is zero. Long memory is scanned in steps.
async fn is_zero(memory: &IoVector) -> bool {
    const STEP: usize = WorkBudget::QUANTUM as usize;
    if memory.len() <= STEP {
        return memory.is_zero();
    }
    rare(async {
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
