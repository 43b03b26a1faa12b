//! A disk that lives in memory and virtual time.
//!
//! Guarantees: the guarantees of [`Storage`] and no more. Operations end in any order. A crash
//! keeps any part of the data that is not stable. The death of the process keeps all ended
//! operations, and any part of those in flight. A discarded range has any content, unless the
//! configuration says zeros. Data that a failed flush covered is treated as clean: later flushes do
//! not write it. A misaligned operation, which a caller must not start, panics.

use std::future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, IoVector,
    Offload, Result, Storage, SyncMode, Unmap, errno,
};
use fastrand::Rng;
use parking_lot::Mutex;

use crate::clock::Oneshot;
use crate::faults::Failure;
use crate::media::{Media, SECTOR};
use crate::process::Process;
use crate::state::State;
use crate::wrapped;
use crate::{Clock, Config, Fault, Latency, Operation, Sim, Size, Support};

/// A simulated disk. A clone is another handle of the same disk. A [close](Storage::close) concerns
/// one handle: if the disk [needs a close](Config::needs_close), a later operation through this
/// handle panics.
pub struct SimDisk {
    shared: Arc<Shared>,
    is_closed: AtomicBool,
    /// The storage whose methods are called instead.
    wrapped: Option<Arc<dyn wrapped::Wrapped>>,
}

struct Shared {
    clock: Clock,
    process: Process,
    alignment: Alignment,
    fua: Fua,
    needs_close: bool,
    /// The known size: the size of the file, without growth by operations whose futures were
    /// dropped.
    size: AtomicU64,
    state: Mutex<State>,
    /// Operations that wait for [`SimDisk::release`]; `None`: all end by themselves.
    held: Mutex<Option<Vec<u64>>>,
}

impl SimDisk {
    /// A disk with `content`, all of it stable, in the simulation `sim`.
    pub fn new(sim: &Sim, config: Config, content: Vec<u8>) -> Self {
        Self::with(sim, State::new(config, Media::new(content), sim.fork_prng()))
    }

    fn with(sim: &Sim, state: State) -> Self {
        Self::over(Arc::new(Shared {
            clock: sim.clock().clone(),
            process: sim.process().clone(),
            alignment: state.config.alignment,
            fua: state.config.fua,
            needs_close: state.config.needs_close,
            size: state.media.size().into(),
            state: Mutex::new(state),
            held: Mutex::default(),
        }))
    }

    fn over(shared: Arc<Shared>) -> Self {
        Self { shared, is_closed: AtomicBool::new(false), wrapped: None }
    }

    /// A storage of another kind under this type, for example one that is wrong on purpose. Only
    /// the methods of [`Storage`] concern that storage.
    pub fn wrapping(storage: impl Storage + Send + Sync) -> Self {
        let unused = Self::new(&Sim::new(0), Config::default(), Vec::new());
        Self { wrapped: Some(Arc::new(storage)), ..unused }
    }

    /// The operations since the last call, in the order in which they started.
    pub fn take_log(&self) -> Vec<Operation> {
        std::mem::take(&mut self.shared.state.lock().log)
    }

    /// Whether an operation has failed, with any errno except EOPNOTSUPP.
    pub fn has_failed(&self) -> bool {
        self.shared.state.lock().failed > 0
    }

    /// Whether a flush or durable write has failed. Users of the disk may remember the failure.
    pub(crate) fn has_failed_sync(&self) -> bool {
        self.shared.state.lock().failed_syncs > 0
    }

    /// Whether a close has failed.
    pub(crate) fn has_failed_close(&self) -> bool {
        self.shared.state.lock().failed_closes > 0
    }

    /// How many operations started and how many ended.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.shared.state.lock();
        (state.started, state.ended)
    }

    /// Appends `bytes` durably, as another program does: a volume manager to a block device. There
    /// is no notification: the known size stays until a write reaches past it.
    pub fn lengthen(&self, bytes: &[u8]) {
        self.shared.state.lock().media.append(bytes);
    }

    /// Sets the latency of later operations.
    pub fn set_latency(&self, latency: Latency) {
        self.shared.state.lock().config.latency = latency;
    }

    /// Holds operations: from now on none ends, as if the disk did not respond.
    pub fn hold(&self) {
        self.shared.held.lock().get_or_insert_default();
    }

    /// Ends the [held](Self::hold) operations; later ones end by themselves.
    pub fn release(&self) {
        let held = self.shared.held.lock().take();
        for id in held.into_iter().flatten() {
            let completion = self.shared.state.lock().end(id);
            completion.notify();
        }
    }

    /// Adds a fault.
    pub fn fail(&self, fault: Fault) {
        self.shared.state.lock().faults.add(fault);
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.shared.state.lock().faults.clear();
    }

    /// Bytes that a crash at this moment might leave, chosen by `random`. The disk stays usable.
    pub fn crash(&self, random: &mut Rng) -> Vec<u8> {
        self.shared.state.lock().crash(random)
    }

    /// The disk after a power loss at this moment, without faults, in the simulation `next`.
    /// `random` chooses the content. This disk stays usable.
    #[must_use]
    pub fn after_power_loss(&self, next: &Sim, random: &mut Rng) -> Self {
        let image = self.crash(random);
        Self::new(next, self.shared.state.lock().config.clone(), image)
    }

    /// The disk after the death of this process at this moment, without faults, in the simulation
    /// `next`. It has all ended operations, though not stable, and parts of those in flight, chosen
    /// by `random`. This disk stays usable.
    #[must_use]
    pub fn after_death(&self, next: &Sim, random: &mut Rng) -> Self {
        Self::with(next, self.shared.state.lock().after_death(random))
    }

    /// The current content, as a read sees it.
    pub fn content(&self) -> Vec<u8> {
        let state = self.shared.state.lock();
        let mut bytes = vec![0; state.media.size() as usize];
        state.media.read(0, &mut bytes);
        bytes
    }

    /// Starts an operation and waits for its end.
    async fn operate(&self, operation: Operation, vector: Option<IoVector>) -> Result<()> {
        if !self.shared.process.step() {
            return future::pending().await;
        }
        let is_closed = self.is_closed.load(Ordering::Acquire);
        assert!(!is_closed, "an operation after the close: {operation:?}");
        let (id, outcome) = self.start(operation, vector);
        let guard = OperationGuard { disk: self, id };
        let failure = outcome.wait().await;
        drop(guard);
        self.note_size(operation, failure);
        match failure {
            None => Ok(()),
            Some(Failure { errno: code, loses_older }) => {
                let what = format!("cannot carry out {:?}", operation.kind());
                let error = Error::host(what, io::Error::from_raw_os_error(code)).on(self.name());
                let error = match operation.range() {
                    Some(range) => error.at(range.offset()),
                    None => error,
                };
                // ENOSPC: at most a part of the range was written.
                let is_confined = code == errno::ENOSPC && !loses_older;
                Err(if is_confined { error.confined() } else { error })
            }
        }
    }

    /// Updates the known size after an operation.
    fn note_size(&self, operation: Operation, failure: Option<Failure>) {
        let size = &self.shared.size;
        match (operation, failure) {
            (Operation::Write(range, _) | Operation::PrepareZeroes(range), None) => {
                size.fetch_max(range.end(), Ordering::Relaxed);
            }
            (Operation::Write(..) | Operation::PrepareZeroes(_), Some(_)) => {
                size.fetch_max(self.shared.state.lock().media.size(), Ordering::Relaxed);
            }
            (Operation::Resize(new), None) => size.store(new, Ordering::Relaxed),
            (Operation::Lengthen(new), None) => {
                size.fetch_max(new, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    fn start(
        &self,
        operation: Operation,
        vector: Option<IoVector>,
    ) -> (u64, Oneshot<Option<Failure>>) {
        let (id, outcome, delay) = self.shared.state.lock().start(operation, vector);
        let disk = self.clone();
        self.shared.clock.schedule(delay, move || {
            if !disk.shared.process.step() {
                return;
            }
            if let Some(held) = &mut *disk.shared.held.lock() {
                return held.push(id);
            }
            let completion = disk.shared.state.lock().end(id);
            completion.notify();
        });
        (id, outcome)
    }

    /// Waits until no detached durable operation (with a dropped future) is in flight.
    async fn wait_for_detached(&self) {
        loop {
            let ended = self.shared.state.lock().wait_for_detached();
            match ended {
                Some(ended) => ended.wait().await,
                None => return,
            }
        }
    }

    fn assert_aligned(&self, range: ByteRange, vector: Option<&IoVector>) {
        let alignment = self.shared.alignment;
        let block = u64::from(alignment.offset);
        let is_last_block = range.offset().is_multiple_of(block)
            && (range.end() == self.size() || range.end() == self.size().next_multiple_of(512))
            && range.length() < block;
        let is_aligned = range.is_aligned(block) || is_last_block;
        assert!(is_aligned, "misaligned operation on {range}: {alignment:?}");
        let memory = vector.is_none_or(|vector| {
            vector.is_aligned(alignment.memory as usize, alignment.offset as usize)
        });
        assert!(memory, "misaligned memory {vector:?} for {range}: {alignment:?}");
    }
}

/// Notices when the future that waits for a durable operation is dropped.
struct OperationGuard<'a> {
    disk: &'a SimDisk,
    id: u64,
}

impl Drop for OperationGuard<'_> {
    fn drop(&mut self) {
        self.disk.shared.state.lock().drop_future(self.id);
    }
}

/// Returns the result of the method of the wrapped storage, if there is one.
macro_rules! forward {
    ($disk:ident, $($call:tt)+) => {
        if let Some(wrapped) = &$disk.wrapped {
            return wrapped.$($call)+;
        }
    };
}

impl Storage for SimDisk {
    fn name(&self) -> &str {
        forward!(self, name());
        "simulated disk"
    }

    fn capabilities(&self) -> Capabilities {
        forward!(self, capabilities());
        let state = self.shared.state.lock();
        let offload = |support| match support {
            Support::No => Offload::Unavailable,
            Support::Yes | Support::FailsOnFirstUse => Offload::Available,
        };
        Capabilities {
            fua: state.config.fua,
            fua_cost: state.config.fua_cost,
            write_cache: state.config.write_cache,
            group_commit: state.config.group_commit,
            alignment: state.config.alignment,
            write_zeroes: offload(state.config.write_zeroes),
            prepare_zeroes: offload(state.config.prepare_zeroes),
            discard: offload(state.config.discard),
            read_after_discard: state.config.read_after_discard,
        }
    }

    fn size(&self) -> u64 {
        forward!(self, size());
        self.shared.size.load(Ordering::Relaxed)
    }

    fn grows_with_zeros(&self) -> bool {
        forward!(self, grows_with_zeros());
        self.shared.state.lock().config.size == Size::Grows
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        forward!(self, read(offset, into).await);
        let range = ByteRange::between(offset, offset + into.len() as u64);
        self.assert_aligned(range, Some(&into));
        self.operate(Operation::Read(range), Some(into)).await
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        forward!(self, write(offset, from, durability).await);
        let range = ByteRange::between(offset, offset + from.len() as u64);
        self.assert_aligned(range, Some(&from));
        let is_whole = range.is_aligned(self.shared.alignment.offset.into());
        match durability {
            Durability::None => {}
            Durability::Data if self.shared.fua == Fua::Native && is_whole => {}
            Durability::Data | Durability::Full => {
                let what = "no single write is as durable as this";
                let error = Error::new(ErrorKind::Unsupported, what).on(self.name());
                return Err(error.at(offset));
            }
        }
        self.operate(Operation::Write(range, durability), Some(from)).await
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        forward!(self, write_zeroes(range, unmap).await);
        self.assert_aligned(range, None);
        assert!(range.end() <= self.size(), "a zero write past the end: {range}");
        self.operate(Operation::WriteZeroes(range, unmap), None).await
    }

    /// Puts zeros into the cache, as a write does.
    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        forward!(self, prepare_zeroes(range, held).await);
        self.assert_aligned(range, None);
        self.operate(Operation::PrepareZeroes(range), Some(held)).await
    }

    async fn free_space(&self) -> Result<Option<u64>> {
        forward!(self, free_space().await);
        Ok(self.shared.state.lock().config.free_space)
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        forward!(self, discard(range).await);
        self.assert_aligned(range, None);
        assert!(range.end() <= self.size(), "a discard past the end: {range}");
        self.operate(Operation::Discard(range), None).await
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        forward!(self, flush(sync).await);
        self.wait_for_detached().await;
        let lost = self.shared.state.lock().unreported_errno.take();
        if let Some(errno) = lost {
            let source = io::Error::from_raw_os_error(errno);
            let what = "cannot flush: a detached sync failed";
            return Err(Error::host(what, source).on(self.name()));
        }
        self.operate(Operation::Flush(sync), None).await
    }

    fn check_size(&self, size: u64) -> Result<()> {
        forward!(self, check_size(size));
        if self.shared.state.lock().config.size == Size::Grows || size == self.size() {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(errno::EOPNOTSUPP);
        Err(Error::host("cannot resize", source).on(self.name()))
    }

    async fn resize(&self, size: u64) -> Result<()> {
        forward!(self, resize(size).await);
        self.operate(Operation::Resize(size), None).await
    }

    /// The number of changes that have started, in nanoseconds.
    async fn last_change(&self) -> Result<Option<Duration>> {
        forward!(self, last_change().await);
        Ok(Some(Duration::from_nanos(self.shared.state.lock().changes)))
    }

    async fn extend_hint(&self, size: u64) {
        forward!(self, extend_hint(size).await);
        // An error is ignored, because a storage may refuse the hint.
        let _ = self.operate(Operation::Lengthen(size), None).await;
    }

    /// Reports sectors of zeros as holes.
    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        forward!(self, block_status(range).await);
        self.operate(Operation::Status(range), None).await?;
        let state = self.shared.state.lock();
        let is_hole = |sector: u64| {
            let mut bytes = [0; SECTOR];
            state.media.read(sector * SECTOR as u64, &mut bytes);
            bytes == [0; SECTOR]
        };
        let first = range.offset() / SECTOR as u64;
        let last = range.end().div_ceil(SECTOR as u64);
        let hole = is_hole(first);
        let end = (first..last).find(|&sector| is_hole(sector) != hole).unwrap_or(last);
        let end = (end * SECTOR as u64).min(range.end());
        Ok((if hole { Allocation::Hole } else { Allocation::Data }, end - range.offset()))
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        forward!(self, prefetch(range).await);
        self.operate(Operation::Prefetch(range), None).await
    }

    fn needs_close(&self) -> bool {
        forward!(self, needs_close());
        self.shared.needs_close
    }

    async fn close(&self) -> Result<()> {
        forward!(self, close().await);
        if !self.needs_close() || self.is_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let closed = self.operate(Operation::Close, None).await;
        self.is_closed.store(true, Ordering::Release);
        closed
    }
}

impl Clone for SimDisk {
    fn clone(&self) -> Self {
        let wrapped = self.wrapped.clone();
        Self { wrapped, ..Self::over(Arc::clone(&self.shared)) }
    }
}
