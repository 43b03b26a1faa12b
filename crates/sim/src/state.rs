//! The state of a simulated disk, and the effect of each operation when it ends.

use std::collections::BTreeMap;
use std::time::Duration;

use blockhouse_core::{Fua, IoVector, ReadAfterDiscard, SyncMode, WriteCache, errno};
use fastrand::Rng;

use crate::clock::Oneshot;
use crate::faults::{Failure, FaultPlan};
use crate::media::{FlushSet, InFlightWrite, Media};
use crate::{Config, Operation, OperationKind, Size, Support};

pub(crate) struct State {
    pub(crate) media: Media,
    pub(crate) faults: FaultPlan,
    /// The disk's current abilities; operations that failed at first use are removed.
    pub(crate) config: Config,
    pub(crate) log: Vec<Operation>,
    pub(crate) started: u64,
    pub(crate) ended: u64,
    /// How many operations that change the disk were started.
    pub(crate) changes: u64,
    /// How many operations ended with a failure other than a refusal.
    pub(crate) failed: u64,
    /// How many flushes and durable writes failed.
    pub(crate) failed_syncs: u64,
    pub(crate) failed_closes: u64,
    /// The error of a durable operation whose future was dropped; the next flush reports it.
    pub(crate) unreported_errno: Option<i32>,
    random: Rng,
    in_flight: BTreeMap<u64, InFlight>,
    detached_waiters: Vec<Oneshot<()>>,
}

/// A started operation. It belongs to the disk until it ends, even if its future is dropped.
struct InFlight {
    operation: Operation,
    vector: Option<IoVector>,
    /// The bytes that it writes, or has read already.
    bytes: Option<Vec<u8>>,
    covered: Option<FlushSet>,
    failure: Option<Failure>,
    /// Whether its future was dropped.
    is_detached: bool,
    outcome: Oneshot<Option<Failure>>,
}

/// The work after the end of an operation, to be done without a lock held.
pub(crate) struct Completion {
    vector: Option<IoVector>,
    outcome: Oneshot<Option<Failure>>,
    failure: Option<Failure>,
    released: Vec<Oneshot<()>>,
}

impl State {
    pub(crate) fn new(config: Config, media: Media, random: Rng) -> Self {
        Self {
            media,
            faults: FaultPlan::default(),
            config,
            log: Vec::new(),
            started: 0,
            ended: 0,
            changes: 0,
            failed: 0,
            failed_syncs: 0,
            failed_closes: 0,
            unreported_errno: None,
            random,
            in_flight: BTreeMap::new(),
            detached_waiters: Vec::new(),
        }
    }

    /// Starts an operation. Returns its number, its future outcome, and its latency.
    pub(crate) fn start(
        &mut self,
        operation: Operation,
        vector: Option<IoVector>,
    ) -> (u64, Oneshot<Option<Failure>>, Duration) {
        let id = self.started;
        self.started += 1;
        self.changes += u64::from(operation.is_change());
        self.log.push(operation);
        let refusal = self.refusal(operation.kind()).or(self.past_end(operation));
        let refusal = refusal.map(Failure::of_range);
        let (failure, late) = self.faults.decide(operation.kind(), &mut self.random);
        let failure = failure.or(refusal);
        let loses_older = failure.is_some_and(|failure| failure.loses_older);
        let is_flush_like = loses_older || matches!(operation, Operation::Flush(_));
        let is_refused = failure.is_some_and(|failure| failure.errno == errno::EOPNOTSUPP);
        let has_failed = failure.is_some() && !is_refused && operation.is_durable();
        self.failed_syncs += u64::from(has_failed);
        self.failed_closes += u64::from(failure.is_some() && operation == Operation::Close);
        let outcome = Oneshot::new();
        let in_flight = InFlight {
            operation,
            bytes: self.bytes_of(operation, vector.as_ref()),
            vector,
            covered: is_flush_like.then(|| self.media.flush_set()),
            failure,
            is_detached: false,
            outcome: outcome.clone(),
        };
        self.in_flight.insert(id, in_flight);
        (id, outcome, self.latency(operation.kind()) + late)
    }

    fn latency(&mut self, kind: OperationKind) -> Duration {
        let (latency, random) = (&self.config.latency, &mut self.random);
        match kind {
            OperationKind::Flush => latency.of_flush(random),
            OperationKind::DurableWrite => latency.of_data(random) + latency.of_flush(random),
            _ => latency.of_data(random),
        }
    }

    /// Ends an operation: its effect on the disk happens now.
    pub(crate) fn end(&mut self, id: u64) -> Completion {
        let mut done = self.in_flight.remove(&id).expect("an operation ends once");
        self.ended += 1;
        match done.failure {
            None => self.succeed(id, &mut done),
            // A refused operation changes nothing.
            Some(Failure { errno: errno::EOPNOTSUPP, .. }) => {}
            Some(failure) => {
                self.failed += 1;
                self.fail(id, &done, failure);
            }
        }
        let mut released = Vec::new();
        if done.is_detached {
            let errno = done.failure.map(|failure| failure.errno);
            // An operation that failed with EOPNOTSUPP has lost nothing.
            let errno = errno.filter(|&errno| errno != errno::EOPNOTSUPP);
            self.unreported_errno = self.unreported_errno.or(errno);
            released = std::mem::take(&mut self.detached_waiters);
        }
        Completion { vector: done.vector, outcome: done.outcome, failure: done.failure, released }
    }

    /// The future of an operation is dropped, perhaps before the operation has ended.
    pub(crate) fn drop_future(&mut self, id: u64) {
        if let Some(operation) = self.in_flight.get_mut(&id) {
            operation.is_detached = operation.operation.is_durable();
        }
    }

    /// The event to wait for while a detached durable operation is in flight.
    pub(crate) fn wait_for_detached(&mut self) -> Option<Oneshot<()>> {
        self.in_flight.values().any(|operation| operation.is_detached).then(|| {
            let ended = Oneshot::new();
            self.detached_waiters.push(ended.clone());
            ended
        })
    }

    pub(crate) fn crash(&self, random: &mut Rng) -> Vec<u8> {
        let writes: Vec<_> = self.in_flight.iter().filter_map(InFlight::as_write).collect();
        self.media.crash(&writes, random)
    }

    /// The state for the next process when this one dies now. Operations that have ended took
    /// effect. Each operation in flight takes effect fully, partly or not at all, in any order.
    pub(crate) fn after_death(&self, random: &mut Rng) -> Self {
        let mut next = Self::new(self.config.clone(), self.media.clone(), random.fork());
        // The host reports an error that no process has seen to the next process.
        next.unreported_errno = self.unreported_errno;
        let mut in_flight: Vec<_> = self.in_flight.iter().collect();
        random.shuffle(&mut in_flight);
        for (&id, operation) in in_flight {
            match (random.u8(..3), operation.failure) {
                (0, _) => {}
                (1, None) => next.apply(id, operation),
                (1, Some(failure)) if failure.errno != errno::EOPNOTSUPP => {
                    next.fail(id, operation, failure);
                    if operation.operation.is_durable() {
                        next.unreported_errno = next.unreported_errno.or(Some(failure.errno));
                    }
                }
                _ => next.apply_part(id, operation),
            }
        }
        next
    }

    /// The bytes that a change stores, if they are known at its start. For a read, chosen at
    /// random: the content at its start, or `None` if it returns the content at its end.
    fn bytes_of(&mut self, operation: Operation, vector: Option<&IoVector>) -> Option<Vec<u8>> {
        let length = operation.range()?.length() as usize;
        match (operation, vector) {
            (Operation::Write(..), Some(vector)) => {
                let mut bytes = vec![0; length];
                vector.copy_to(&mut bytes);
                Some(bytes)
            }
            (Operation::Read(range), _) => self.random.bool().then(|| {
                let mut bytes = vec![0; length];
                self.media.read(range.offset(), &mut bytes);
                bytes
            }),
            (Operation::WriteZeroes(..) | Operation::PrepareZeroes(_), _) => Some(vec![0; length]),
            (Operation::Discard(_), _) => match self.random.u8(..3) {
                _ if self.config.read_after_discard == ReadAfterDiscard::Zeros => {
                    Some(vec![0; length])
                }
                0 => None,
                1 => Some(vec![0; length]),
                _ => Some((0..length).map(|_| self.random.u8(..)).collect()),
            },
            _ => None,
        }
    }

    /// The errno of an operation that the disk does not support.
    fn refusal(&mut self, kind: OperationKind) -> Option<i32> {
        let support = match kind {
            OperationKind::DurableWrite if self.config.refuses_fua => {
                return Some(errno::EOPNOTSUPP);
            }
            OperationKind::WriteZeroes => &mut self.config.write_zeroes,
            OperationKind::PrepareZeroes => &mut self.config.prepare_zeroes,
            OperationKind::Discard => &mut self.config.discard,
            _ => return None,
        };
        if *support == Support::FailsOnFirstUse {
            *support = Support::No;
            return Some(errno::EOPNOTSUPP);
        }
        (*support == Support::No).then_some(errno::EOPNOTSUPP)
    }

    /// The errno of an operation that would change the size of a device.
    fn past_end(&self, operation: Operation) -> Option<i32> {
        if self.config.size == Size::Grows {
            return None;
        }
        match operation {
            Operation::Write(range, _) | Operation::PrepareZeroes(range) => {
                (range.end() > self.media.size()).then_some(errno::ENOSPC)
            }
            Operation::Resize(_) => Some(errno::EOPNOTSUPP),
            Operation::Lengthen(_) => Some(errno::EOPNOTSUPP),
            _ => None,
        }
    }

    fn succeed(&mut self, id: u64, done: &mut InFlight) {
        let Operation::Read(range) = done.operation else {
            return self.apply(id, done);
        };
        let bytes = done.bytes.take().unwrap_or_else(|| {
            let mut bytes = vec![0; range.length() as usize];
            self.media.read(range.offset(), &mut bytes);
            bytes
        });
        done.vector.as_mut().expect("a read has memory").copy_from(&bytes);
    }

    /// Applies the effect of an operation that succeeds, other than a read.
    fn apply(&mut self, id: u64, done: &InFlight) {
        match done.operation {
            Operation::Write(range, durability) => {
                let bytes = done.bytes.as_ref().expect("a write has bytes");
                self.media.write(id, range.offset(), bytes);
                if durability.sync().is_some() || self.config.write_cache == WriteCache::None {
                    self.media.make_stable(range);
                }
            }
            Operation::PrepareZeroes(range) => {
                let bytes = done.bytes.as_ref().expect("zeros are bytes");
                self.media.write(id, range.offset(), bytes);
                self.media.leave_anything_past_end(range, &mut self.random);
            }
            Operation::WriteZeroes(range, _) | Operation::Discard(range) => {
                if let Some(bytes) = &done.bytes {
                    self.media.write(id, range.offset(), bytes);
                }
            }
            Operation::Flush(sync) => {
                let covered = done.covered.as_ref().expect("a flush covers a set");
                if self.config.fua != Fua::Ignored {
                    self.media.complete_flush(covered, sync == SyncMode::Full);
                }
            }
            Operation::Resize(size) => self.media.set_size(size),
            Operation::Lengthen(size) => self.media.set_size(size.max(self.media.size())),
            Operation::Read(_)
            | Operation::Status(_)
            | Operation::Prefetch(_)
            | Operation::Close => {}
        }
    }

    /// Applies the effect of an operation that was interrupted: some of the sectors of its write.
    fn apply_part(&mut self, id: u64, operation: &InFlight) {
        if let Some(write) = InFlight::as_write((&id, operation)) {
            let random = &mut self.random;
            self.media.write_torn(write.write, write.offset, write.bytes, random);
            if let Operation::Write(range, _) = operation.operation
                && self.config.write_cache == WriteCache::None
            {
                self.media.make_stable(range);
            }
        }
    }

    /// Applies a failed operation. Any part of a write may have happened, and made a file longer. A
    /// sync may have lost what it covered, unless it failed with ENOSPC.
    fn fail(&mut self, id: u64, done: &InFlight, failure: Failure) {
        let is_full = failure.errno == errno::ENOSPC && !failure.loses_older;
        if let (Some(range), Some(bytes)) = (done.operation.range(), &done.bytes)
            && !matches!(done.operation, Operation::Read(_))
        {
            let inside = match self.config.size {
                Size::Grows => range,
                Size::Fixed => range.truncate(self.media.size().saturating_sub(range.offset())),
            };
            let bytes = &bytes[..inside.length() as usize];
            self.media.write_torn(id, range.offset(), bytes, &mut self.random);
            if done.operation.is_durable() && !is_full {
                self.media.fail_durable_write(range, &mut self.random);
            } else if matches!(done.operation, Operation::Write(..))
                && self.config.write_cache == WriteCache::None
            {
                self.media.make_stable(range);
            }
        }
        if let Some(covered) = &done.covered {
            self.media.fail_flush(covered, &mut self.random);
        }
    }
}

impl Completion {
    /// Returns the memory and wakes the waiting tasks.
    pub(crate) fn notify(self) {
        // The memory behind the vector is released before a waiter sees the end.
        drop(self.vector);
        self.outcome.set(self.failure);
        self.released.iter().for_each(|waiter| waiter.set(()));
    }
}

impl InFlight {
    fn as_write<'a>((&id, operation): (&u64, &'a Self)) -> Option<InFlightWrite<'a>> {
        if matches!(operation.operation, Operation::Read(_)) || operation.failure.is_some() {
            return None;
        }
        let offset = operation.operation.range()?.offset();
        Some(InFlightWrite { write: id, offset, bytes: operation.bytes.as_ref()? })
    }
}
