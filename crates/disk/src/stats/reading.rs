//! Readings of a disk's measurements.

use std::time::Duration;

use blockhouse_core::metrics::HistogramReading;

use super::labels::{ExportKind, HostOperation, Operation, Stage};

/// A reading of a disk's counters since the disk was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Requested reads.
    pub reads: u64,
    /// Bytes of the requested reads.
    pub read_bytes: u64,
    /// Requested writes.
    pub writes: u64,
    /// Bytes of the requested writes.
    pub written_bytes: u64,
    /// Requested zero writes.
    pub zero_writes: u64,
    /// Requested discards.
    pub discards: u64,
    /// Requested flushes.
    pub flushes: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Pieces of requests that were copied because they were not aligned.
    pub bounced: u64,
    /// Compressed clusters that were decompressed.
    pub decompressed: u64,
    /// Writes that reached the storage with native FUA.
    pub durable_writes: u64,
    /// Flushes that reached the storage.
    pub flushes_issued: u64,
    /// Flushes that were skipped, because everything was stable.
    pub flushes_skipped: u64,
    /// Flushes that another flush covered.
    pub flushes_shared: u64,
}

/// All metrics of a disk since it was opened. Operations at the host include the operations on the
/// disk's data file and backing files.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct DiskMetrics {
    /// The requests of each kind of export and operation that occurred.
    pub requests: Vec<RequestMetrics>,
    /// The measurements of each stage and operation that occurred.
    pub stages: Vec<StageMetrics>,
    /// The clients of each kind of export that had a client.
    pub clients: Vec<ClientMetrics>,
    /// Requests in flight.
    pub in_flight: u64,
    /// Pieces of requests that were copied because they were not aligned.
    pub bounced: u64,
    /// Compressed clusters that were decompressed.
    pub decompressed: u64,
    /// Flushes that were skipped, because everything was stable.
    pub flushes_skipped: u64,
    /// Flushes that another flush covered.
    pub flushes_shared: u64,
}

/// Reads and writes of a disk's exports since the disk was opened. Requests of jobs and tools do
/// not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportLoad {
    /// The number of requests that have ended.
    pub requests: u64,
    /// The sum of their durations.
    pub time: Duration,
    /// The number of requests that have begun and not ended.
    pub in_flight: u64,
}

/// Clients of one kind of export: NBD connections in their transmission phase, front-ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientMetrics {
    /// The kind of export.
    pub export: ExportKind,
    /// The number of clients that are connected now.
    pub connected: u64,
    /// The number of clients so far, including the connected ones.
    pub connections: u64,
}

/// Requests of one operation from one kind of export.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RequestMetrics {
    /// The kind of export that sent the requests.
    pub export: ExportKind,
    /// The requests' operation.
    pub operation: Operation,
    /// The number of submitted requests.
    pub started: u64,
    /// The bytes of the requests' ranges.
    pub bytes: u64,
    /// The times from submission to completion of the completed requests, including failed ones.
    pub durations: HistogramReading,
    /// The number of failures with each errno.
    pub errors: Vec<ErrorCount>,
}

/// One stage of requests of one operation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StageMetrics {
    /// The stage.
    pub stage: Stage,
    /// The label of an [`Operation`] for [`Stage::Queue`], else of a [`HostOperation`].
    pub operation: &'static str,
    /// The number of bytes that were moved.
    pub bytes: u64,
    /// The duration of each operation, or of each wait.
    pub durations: HistogramReading,
    /// The number of failures with each errno.
    pub errors: Vec<ErrorCount>,
}

/// The number of failures with one errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCount {
    /// The errno; 0 for all numbers that are not errnos of Linux.
    pub errno: i32,
    /// The number of failures.
    pub count: u64,
}

impl ErrorCount {
    /// Adds the count to a list, which stays sorted by errno and has each errno once.
    pub(super) fn add_to(self, all: &mut Vec<Self>) {
        match all.binary_search_by_key(&self.errno, |one| one.errno) {
            Ok(index) => all[index].count += self.count,
            Err(index) => all.insert(index, self),
        }
    }
}

impl ClientMetrics {
    /// Counts of zero.
    pub fn new(export: ExportKind) -> Self {
        Self { export, connected: 0, connections: 0 }
    }
}

impl RequestMetrics {
    /// Counts of zero.
    pub fn new(export: ExportKind, operation: Operation) -> Self {
        let (started, bytes, errors) = (0, 0, Vec::new());
        Self { export, operation, started, bytes, durations: HistogramReading::default(), errors }
    }
}

impl RequestMetrics {
    /// The number of requests that have not completed, including cancelled ones.
    pub(super) fn unfinished(&self) -> u64 {
        self.started.saturating_sub(self.durations.count())
    }

    fn add(&mut self, other: &Self) {
        self.started += other.started;
        self.bytes += other.bytes;
        self.durations.add(&other.durations);
        other.errors.iter().for_each(|count| count.add_to(&mut self.errors));
    }
}

impl StageMetrics {
    /// Counts of zero. `operation` is the label of an [`Operation`] or a [`HostOperation`].
    pub fn new(stage: Stage, operation: &'static str) -> Self {
        let (bytes, durations) = (0, HistogramReading::default());
        Self { stage, operation, bytes, durations, errors: Vec::new() }
    }
}

impl DiskMetrics {
    /// Adds other counts of the same disk, except the numbers of current clients and requests.
    pub(super) fn add_counted(&mut self, other: &Self) {
        for one in &other.requests {
            let same = |own: &&mut RequestMetrics| {
                (own.export, own.operation) == (one.export, one.operation)
            };
            match self.requests.iter_mut().find(same) {
                Some(sum) => sum.add(one),
                None => self.requests.push(one.clone()),
            }
        }
        other.stages.iter().for_each(|one| one.add_to(&mut self.stages));
        for one in &other.clients {
            match self.clients.iter_mut().find(|own| own.export == one.export) {
                Some(sum) => sum.connections += one.connections,
                None => self.clients.push(ClientMetrics { connected: 0, ..*one }),
            }
        }
        self.bounced += other.bounced;
        self.decompressed += other.decompressed;
        self.flushes_skipped += other.flushes_skipped;
        self.flushes_shared += other.flushes_shared;
    }

    /// A summary of the counts.
    pub fn counters(&self) -> Counters {
        let requests = |operations: &[Operation], number: fn(&RequestMetrics) -> u64| -> u64 {
            let wanted = self.requests.iter().filter(|one| operations.contains(&one.operation));
            wanted.map(number).sum()
        };
        let at_host = |operation: HostOperation| -> u64 {
            let at_host = self.stages.iter().filter(|one| one.stage != Stage::Queue);
            let wanted = at_host.filter(|one| one.operation == operation.as_str());
            wanted.map(|one| one.durations.count()).sum()
        };
        let writes = [Operation::Write, Operation::WriteFua];
        Counters {
            reads: requests(&[Operation::Read], |one| one.started),
            read_bytes: requests(&[Operation::Read], |one| one.bytes),
            writes: requests(&writes, |one| one.started),
            written_bytes: requests(&writes, |one| one.bytes),
            zero_writes: requests(&[Operation::WriteZeroes], |one| one.started),
            discards: requests(&[Operation::Discard], |one| one.started),
            flushes: requests(&[Operation::Flush], |one| one.started),
            in_flight: self.in_flight,
            bounced: self.bounced,
            decompressed: self.decompressed,
            durable_writes: at_host(HostOperation::WriteFua),
            flushes_issued: at_host(HostOperation::Flush),
            flushes_skipped: self.flushes_skipped,
            flushes_shared: self.flushes_shared,
        }
    }
}

impl StageMetrics {
    /// Adds the metrics to a list that has one entry for each stage and operation.
    pub(super) fn add_to(&self, all: &mut Vec<Self>) {
        let same = |own: &&mut Self| (own.stage, own.operation) == (self.stage, self.operation);
        let Some(sum) = all.iter_mut().find(same) else { return all.push(self.clone()) };
        sum.bytes += self.bytes;
        sum.durations.add(&self.durations);
        self.errors.iter().for_each(|count| count.add_to(&mut sum.errors));
    }
}
