//! Statistics of requests: number, size, duration, outcome, and time of waits for their turn.

use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use blockhouse_core::metrics::{Counter, Histogram, HistogramReading, PerThread, Timestamp, clock};
use blockhouse_core::{Request, Result};

use super::clients::Clients;
use super::errors::Errors;
use super::labels::{ExportKind, Operation, Stage};
use super::reading::{ExportLoad, RequestMetrics, StageMetrics};

/// The counters of requests of one disk.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    blocks: PerThread<Block>,
    clients: Arc<Clients>,
}

/// The counters of one thread.
#[derive(Debug, Default)]
struct Block {
    bounced: Counter,
    decompressed: Counter,
    requests: [[OnceLock<Box<Requests>>; Operation::ALL.len()]; ExportKind::ALL.len()],
    waits: [OnceLock<Box<Histogram>>; Operation::ALL.len()],
}

/// Requests of one operation from one kind of export.
#[derive(Debug, Default)]
#[repr(C)]
struct Requests {
    started: Counter,
    bytes: Counter,
    durations: Histogram,
    errors: Errors,
    cancelled: Counter,
}

/// The timer of a request in flight. If the timer is dropped before it [ends](Self::end), the
/// request was cancelled: it counts as started, and has no duration.
#[must_use]
pub struct RequestTimer<'a> {
    /// The counters of the thread on which the request began. So the timer is not `Send`, and ends
    /// on that thread.
    requests: &'a Requests,
    operation: Operation,
    began: Timestamp,
    _not_send: PhantomData<*const ()>,
}

impl Block {
    fn requests(&self, export: ExportKind, operation: Operation) -> &Requests {
        self.requests[export as usize][operation as usize].get_or_init(Box::default)
    }
}

impl Stats {
    /// Counts a request as started.
    pub(crate) fn begin(&self, export: ExportKind, request: &Request) -> RequestTimer<'_> {
        let (operation, bytes) = Operation::of(request);
        self.begin_operation(export, operation, bytes)
    }

    /// Counts a request of this many bytes as started.
    pub(crate) fn begin_operation(
        &self,
        export: ExportKind,
        operation: Operation,
        bytes: u64,
    ) -> RequestTimer<'_> {
        let requests = self.blocks.mine().requests(export, operation);
        requests.started.add(1);
        requests.bytes.add(bytes);
        RequestTimer { requests, operation, began: clock::now(), _not_send: PhantomData }
    }

    /// The clients.
    pub(crate) fn clients(&self) -> &Arc<Clients> {
        &self.clients
    }

    pub(crate) fn bounced(&self) {
        self.blocks.mine().bounced.add(1);
    }

    pub(crate) fn decompressed(&self) {
        self.blocks.mine().decompressed.add(1);
    }

    /// Awaits a request's turn, and records the time unless the turn was ready at once.
    pub(crate) async fn wait<F: Future>(
        &self,
        operation: Operation,
        mut turn: Pin<&mut F>,
    ) -> F::Output {
        let mut began = None;
        let output = poll_fn(|context| {
            let poll = turn.as_mut().poll(context);
            if poll.is_pending() {
                began.get_or_insert_with(clock::now);
            }
            poll
        })
        .await;
        if let Some(began) = began {
            let waits = self.blocks.mine().waits[operation as usize].get_or_init(Box::default);
            waits.record(clock::now().nanoseconds_since(began));
        }
        output
    }

    /// Sums over all threads: cancelled requests, pieces that were copied for alignment, and
    /// clusters that were decompressed.
    pub(super) fn totals(&self) -> Totals {
        Totals {
            cancelled: self.blocks.sum(|block| {
                let requests = block.requests.iter().flatten().filter_map(OnceLock::get);
                requests.map(|requests| requests.cancelled.get()).sum()
            }),
            bounced: self.blocks.sum(|block| block.bounced.get()),
            decompressed: self.blocks.sum(|block| block.decompressed.get()),
        }
    }

    /// The metrics of each export and operation with requests.
    pub(super) fn requests(&self) -> Vec<RequestMetrics> {
        let all = ExportKind::ALL.into_iter();
        let all = all.flat_map(|export| Operation::ALL.map(|operation| (export, operation)));
        all.filter_map(|(export, operation)| self.requests_of(export, operation)).collect()
    }

    fn requests_of(&self, export: ExportKind, operation: Operation) -> Option<RequestMetrics> {
        let blocks = self.blocks.iter();
        let mut blocks = blocks
            .filter_map(|block| block.requests[export as usize][operation as usize].get())
            .peekable();
        blocks.peek()?;
        let mut metrics = RequestMetrics::new(export, operation);
        for block in blocks {
            // Durations are read first, so that the sums never show more ended requests than
            // started ones.
            metrics.durations.add(&block.durations.read());
            block.errors.add_to(&mut metrics.errors);
            metrics.started += block.started.get();
            metrics.bytes += block.bytes.get();
        }
        Some(metrics)
    }

    /// Reads and writes of all exports: see [`ExportLoad`].
    pub(crate) fn export_load(&self) -> ExportLoad {
        let exports = ExportKind::ALL.into_iter().filter(|export| *export != ExportKind::Local);
        let operations = [Operation::Read, Operation::Write, Operation::WriteFua];
        let all = exports.flat_map(|export| operations.map(|operation| (export, operation)));
        let (mut durations, mut in_flight) = (HistogramReading::default(), 0);
        for (export, operation) in all {
            for block in self.blocks.iter() {
                if let Some(requests) = block.requests[export as usize][operation as usize].get() {
                    // Ends are read before begins, as in `gather`.
                    let (ended, cancelled) = (requests.durations.read(), requests.cancelled.get());
                    let begun = requests.started.get();
                    in_flight += begun.saturating_sub(ended.count() + cancelled);
                    durations.add(&ended);
                }
            }
        }
        ExportLoad { requests: durations.count(), time: durations.sum(), in_flight }
    }

    /// The waits of each operation that had to wait.
    pub(super) fn waits(&self) -> impl Iterator<Item = StageMetrics> {
        Operation::ALL.into_iter().filter_map(|operation| {
            let mut durations = HistogramReading::default();
            let blocks = self.blocks.iter();
            let waits = blocks.filter_map(|block| block.waits[operation as usize].get());
            waits.for_each(|waits| durations.add(&waits.read()));
            (durations.count() > 0).then(|| StageMetrics {
                stage: Stage::Queue,
                operation: operation.as_str(),
                bytes: 0,
                durations,
                errors: Vec::new(),
            })
        })
    }
}

/// See [`Stats::totals`].
pub(super) struct Totals {
    pub(super) cancelled: u64,
    pub(super) bounced: u64,
    pub(super) decompressed: u64,
}

impl RequestTimer<'_> {
    /// The request's operation.
    pub(crate) fn operation(&self) -> Operation {
        self.operation
    }

    /// Records the duration and the outcome.
    pub fn end<T>(self, outcome: &Result<T>) {
        self.requests.durations.record(clock::now().nanoseconds_since(self.began));
        if let Err(error) = outcome {
            self.requests.errors.count(error.errno());
        }
        std::mem::forget(self);
    }
}

impl Drop for RequestTimer<'_> {
    fn drop(&mut self) {
        self.requests.cancelled.add(1);
    }
}
