//! A disk that lives in memory and virtual time.
//!
//! It keeps every promise of [`Storage`] and not one more: operations end in any order, a crash
//! keeps whatever it likes of what is not stable, a discarded range holds anything, a failed flush
//! counts as done. What a caller must not do (misaligned operations) makes it panic.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use blockhouse_core::{
    ByteRange, Capabilities, Durability, Error, Fua, IoVector, Offload, Result, Status, Storage,
    Sync, Unmap, WriteCache, errno,
};
use fastrand::Rng;
use parking_lot::Mutex;

use crate::clock::Signal;
use crate::faults::FaultPlan;
use crate::media::{Media, SECTOR, Snapshot, Underway};
use crate::{Config, Fault, Operation, OperationKind, Sim, Support};

/// A simulated disk. Clones are the same disk.
#[derive(Clone)]
pub struct SimDisk(Arc<Shared>);

struct Shared {
    clock: crate::Clock,
    config: Config,
    state: Mutex<State>,
}

struct State {
    media: Media,
    faults: FaultPlan,
    random: Rng,
    write_zeroes: Support,
    discard: Support,
    log: Vec<Operation>,
    started: u64,
    ended: u64,
    in_flight: BTreeMap<u64, InFlight>,
    /// The error of a durable operation whose future was dropped; the next flush answers it.
    lost_errno: Option<i32>,
    waiting_for_abandoned: Vec<Signal<()>>,
}

/// A started operation. It belongs to the disk until it ends, whoever waits.
struct InFlight {
    operation: Operation,
    vector: Option<IoVector>,
    /// What it writes, or what it has read already.
    bytes: Option<Vec<u8>>,
    snapshot: Option<Snapshot>,
    errno: Option<i32>,
    abandoned: bool,
    outcome: Signal<Option<i32>>,
}

impl SimDisk {
    /// A disk with `content`, all of it stable, in the simulation `sim`.
    pub fn new(sim: &Sim, config: Config, content: Vec<u8>) -> Self {
        let state = State {
            media: Media::new(content),
            faults: FaultPlan::default(),
            random: sim.fork_random(),
            write_zeroes: config.write_zeroes,
            discard: config.discard,
            log: Vec::new(),
            started: 0,
            ended: 0,
            in_flight: BTreeMap::new(),
            lost_errno: None,
            waiting_for_abandoned: Vec::new(),
        };
        Self(Arc::new(Shared { clock: sim.clock().clone(), config, state: Mutex::new(state) }))
    }

    /// The operations since the last call, in the order in which they started.
    pub fn take_log(&self) -> Vec<Operation> {
        std::mem::take(&mut self.0.state.lock().log)
    }

    /// How many operations started and how many ended.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.0.state.lock();
        (state.started, state.ended)
    }

    /// Adds a reason to fail.
    pub fn fail(&self, fault: Fault) {
        self.0.state.lock().faults.add(fault);
    }

    /// From now on nothing fails any more.
    pub fn clear_faults(&self) {
        self.0.state.lock().faults.clear();
    }

    /// What a crash at this moment might leave behind, by `random`. The disk goes on.
    pub fn crash(&self, random: &mut Rng) -> Vec<u8> {
        let state = self.0.state.lock();
        let underway: Vec<_> = state.in_flight.iter().filter_map(InFlight::underway).collect();
        state.media.crash(&underway, random)
    }

    /// What a read of everything would see now.
    pub fn content(&self) -> Vec<u8> {
        let state = self.0.state.lock();
        let mut bytes = vec![0; state.media.size() as usize];
        state.media.read(0, &mut bytes);
        bytes
    }

    /// Starts an operation and waits for its end.
    async fn operate(&self, operation: Operation, vector: Option<IoVector>) -> Result<()> {
        let (id, outcome) = self.start(operation, vector);
        let waiting = Waiting { disk: self, id };
        let errno = outcome.wait().await;
        drop(waiting);
        match errno {
            None => Ok(()),
            Some(code) => {
                let what = format!("cannot carry out {:?}", operation.kind());
                let error = Error::host(what, io::Error::from_raw_os_error(code)).on(self.name());
                Err(match operation.range() {
                    Some(range) => error.at(range.offset()),
                    None => error,
                })
            }
        }
    }

    fn start(&self, operation: Operation, vector: Option<IoVector>) -> (u64, Signal<Option<i32>>) {
        let mut guard = self.0.state.lock();
        let state = &mut *guard;
        let id = state.started;
        state.started += 1;
        state.log.push(operation);
        let refusal = state.refusal(operation.kind());
        let outcome = Signal::new();
        let in_flight = InFlight {
            operation,
            bytes: state.bytes_of(operation, vector.as_ref()),
            vector,
            snapshot: matches!(operation, Operation::Flush(_)).then(|| state.media.snapshot()),
            errno: state.faults.decide(operation.kind(), &mut state.random).or(refusal),
            abandoned: false,
            outcome: outcome.clone(),
        };
        state.in_flight.insert(id, in_flight);
        let latency = &self.0.config.latency;
        let delay = match operation.kind() {
            OperationKind::Flush => latency.of_flush(&mut state.random),
            OperationKind::DurableWrite => {
                latency.of_data(&mut state.random) + latency.of_flush(&mut state.random)
            }
            _ => latency.of_data(&mut state.random),
        };
        drop(guard);
        let disk = self.clone();
        self.0.clock.schedule(delay, move || disk.end(id));
        (id, outcome)
    }

    fn end(&self, id: u64) {
        let mut state = self.0.state.lock();
        let mut done = state.in_flight.remove(&id).expect("an operation ends once");
        state.ended += 1;
        if done.errno == Some(errno::EOPNOTSUPP) {
            // Refused: nothing changed.
        } else if done.errno.is_some() {
            state.fail(id, &done, &self.0.config);
        } else {
            state.succeed(id, &mut done, &self.0.config);
        }
        let mut released = Vec::new();
        if done.abandoned {
            state.lost_errno = state.lost_errno.or(done.errno);
            released = std::mem::take(&mut state.waiting_for_abandoned);
        }
        drop(state);
        // What the vector guards is released before anybody hears of the end.
        drop(done.vector.take());
        done.outcome.set(done.errno);
        released.iter().for_each(|signal| signal.set(()));
    }

    /// Waits until no durable operation without a future is in flight.
    async fn abandoned_ended(&self) {
        loop {
            let signal = {
                let mut state = self.0.state.lock();
                if !state.in_flight.values().any(|operation| operation.abandoned) {
                    return;
                }
                let signal = Signal::new();
                state.waiting_for_abandoned.push(signal.clone());
                signal
            };
            signal.wait().await;
        }
    }

    fn assert_aligned(&self, range: ByteRange, vector: Option<&IoVector>) {
        let alignment = self.0.config.alignment;
        let block = u64::from(alignment.offset);
        let is_last_block = range.offset().is_multiple_of(block)
            && range.end() == self.size()
            && range.length() < block;
        let is_aligned = range.is_aligned(block) || is_last_block;
        assert!(is_aligned, "misaligned operation on {range}: {alignment:?}");
        let memory = vector.is_none_or(|vector| {
            vector.is_aligned(alignment.memory as usize, alignment.offset as usize)
        });
        assert!(memory, "misaligned memory {vector:?} for {range}: {alignment:?}");
    }
}

impl State {
    /// What the operation stores, as far as that is decided when it starts; for reads that see the
    /// content of the start rather than that of the end, what they see.
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
            (Operation::WriteZeroes(..), _) => Some(vec![0; length]),
            (Operation::Discard(_), _) => match self.random.u8(..3) {
                0 => None,
                1 => Some(vec![0; length]),
                _ => Some((0..length).map(|_| self.random.u8(..)).collect()),
            },
            _ => None,
        }
    }

    /// The errno of an operation that the disk does not have, found out by using it.
    fn refusal(&mut self, kind: OperationKind) -> Option<i32> {
        let support = match kind {
            OperationKind::WriteZeroes => &mut self.write_zeroes,
            OperationKind::Discard => &mut self.discard,
            _ => return None,
        };
        if *support == Support::RefusesOnUse {
            *support = Support::No;
            return Some(errno::EOPNOTSUPP);
        }
        (*support == Support::No).then_some(errno::EOPNOTSUPP)
    }

    fn succeed(&mut self, id: u64, done: &mut InFlight, config: &Config) {
        match done.operation {
            Operation::Read(range) => {
                let bytes = done.bytes.take().unwrap_or_else(|| {
                    let mut bytes = vec![0; range.length() as usize];
                    self.media.read(range.offset(), &mut bytes);
                    bytes
                });
                done.vector.as_mut().expect("a read has memory").copy_from(&bytes);
            }
            Operation::Write(range, durability) => {
                let bytes = done.bytes.as_ref().expect("a write has bytes");
                self.media.write(id, range.offset(), bytes);
                let is_durable = durability != Durability::None && config.fua == Fua::Native;
                if is_durable || config.write_cache == WriteCache::None {
                    self.media.make_stable(range);
                }
            }
            Operation::WriteZeroes(range, _) | Operation::Discard(range) => {
                if let Some(bytes) = &done.bytes {
                    self.media.write(id, range.offset(), bytes);
                }
            }
            Operation::Flush(sync) => {
                let snapshot = done.snapshot.as_ref().expect("a flush has a snapshot");
                if config.fua != Fua::None {
                    self.media.settle(snapshot, sync == Sync::Full);
                }
            }
            Operation::Resize(size) => self.media.set_size(size),
            Operation::Status(_) | Operation::Prefetch(_) => {}
        }
    }

    /// Leaves what a failed operation leaves. For want of room nothing was begun; otherwise writes
    /// may have got anywhere, and a sync may have lost what it covered.
    fn fail(&mut self, id: u64, done: &InFlight, config: &Config) {
        if done.errno == Some(errno::ENOSPC) && done.operation.kind() != OperationKind::Flush {
            return;
        }
        if let (Some(range), Some(bytes)) = (done.operation.range(), &done.bytes)
            && !matches!(done.operation, Operation::Read(_))
        {
            self.media.write_torn(id, range.offset(), bytes, &mut self.random);
            if done.operation.is_durable() {
                self.media.lose_range(range, &mut self.random);
            } else if done.operation.kind() == OperationKind::Write
                && config.write_cache == WriteCache::None
            {
                self.media.make_stable(range);
            }
        }
        if let Some(snapshot) = &done.snapshot {
            self.media.lose(snapshot, &mut self.random);
        }
    }
}

impl InFlight {
    fn underway<'a>((&id, operation): (&u64, &'a Self)) -> Option<Underway<'a>> {
        if matches!(operation.operation, Operation::Read(_)) || operation.errno.is_some() {
            return None;
        }
        let offset = operation.operation.range()?.offset();
        Some(Underway { write: id, offset, bytes: operation.bytes.as_ref()? })
    }
}

/// Notices when the future that waits for a durable operation is dropped.
struct Waiting<'a> {
    disk: &'a SimDisk,
    id: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.disk.0.state.lock();
        if let Some(operation) = state.in_flight.get_mut(&self.id) {
            operation.abandoned = operation.operation.is_durable();
        }
    }
}

impl Storage for SimDisk {
    fn name(&self) -> &str {
        "simulated disk"
    }

    fn capabilities(&self) -> Capabilities {
        let state = self.0.state.lock();
        let offload = |support| match support {
            Support::No => Offload::Unavailable,
            Support::Yes | Support::RefusesOnUse => Offload::Available,
        };
        let config = &self.0.config;
        Capabilities {
            fua: config.fua,
            write_cache: config.write_cache,
            group_commit: config.group_commit,
            alignment: config.alignment,
            write_zeroes: offload(state.write_zeroes),
            discard: offload(state.discard),
        }
    }

    fn size(&self) -> u64 {
        self.0.state.lock().media.size()
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        let range = ByteRange::between(offset, offset + into.len() as u64);
        self.assert_aligned(range, Some(&into));
        self.operate(Operation::Read(range), Some(into)).await
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        let range = ByteRange::between(offset, offset + from.len() as u64);
        self.assert_aligned(range, Some(&from));
        if self.0.config.fua == Fua::Native || durability == Durability::None {
            return self.operate(Operation::Write(range, durability), Some(from)).await;
        }
        self.operate(Operation::Write(range, Durability::None), Some(from)).await?;
        if self.0.config.fua == Fua::None {
            return Ok(());
        }
        self.flush(if durability == Durability::Full { Sync::Full } else { Sync::Data }).await
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        self.assert_aligned(range, None);
        assert!(range.end() <= self.size(), "a zero write past the end: {range}");
        self.operate(Operation::WriteZeroes(range, unmap), None).await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        self.assert_aligned(range, None);
        assert!(range.end() <= self.size(), "a discard past the end: {range}");
        self.operate(Operation::Discard(range), None).await
    }

    async fn flush(&self, sync: Sync) -> Result<()> {
        self.abandoned_ended().await;
        let lost = self.0.state.lock().lost_errno.take();
        if let Some(errno) = lost {
            let source = io::Error::from_raw_os_error(errno);
            let what = "cannot flush: an earlier operation that nobody waited for failed";
            return Err(Error::host(what, source).on(self.name()));
        }
        self.operate(Operation::Flush(sync), None).await
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.operate(Operation::Resize(size), None).await
    }

    /// Sectors of zeros are holes.
    async fn status(&self, range: ByteRange) -> Result<(Status, u64)> {
        self.operate(Operation::Status(range), None).await?;
        let content = self.content();
        let is_hole = |sector: u64| {
            let start = sector as usize * SECTOR;
            content[start..(start + SECTOR).min(content.len())].iter().all(|&byte| byte == 0)
        };
        let first = range.offset() / SECTOR as u64;
        let last = range.end().div_ceil(SECTOR as u64);
        let hole = is_hole(first);
        let end = (first..last).find(|&sector| is_hole(sector) != hole).unwrap_or(last);
        let end = (end * SECTOR as u64).min(range.end());
        Ok((if hole { Status::Hole } else { Status::Data }, end - range.offset()))
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        self.operate(Operation::Prefetch(range), None).await
    }
}
