//! The counters of a disk, handed over so that none decreases. The keys are the labels of the
//! metrics. A counter with a label that this version does not know is ignored.

use std::time::Duration;

use blockhouse_core::metrics::{BUCKETS, HistogramReading};
use blockhouse_disk::{
    CacheCounts, ClientMetrics, DiskMetrics, EarlierCounts, ErrorCount, ExportKind, HostOperation,
    Operation, RequestMetrics, Stage, StageMetrics, ThrottleStats,
};
use serde::{Deserialize, Serialize};

/// The values of all counters of a disk.
#[derive(Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Counts {
    /// Requests.
    pub requests: Vec<Requests>,
    /// Stages of requests.
    pub stages: Vec<StageOf>,
    /// For each kind of export how many clients connected, including those that are handed over.
    pub clients: Vec<(String, u64)>,
    /// Four counts: pieces copied for alignment, clusters decompressed, flushes skipped, flushes
    /// shared.
    pub totals: [u64; 4],
    /// Hits and misses of the metadata cache.
    pub cache: [u64; 2],
    /// Requests that limits delayed, and the sum of the delays in nanoseconds.
    pub delayed: [u64; 2],
}

/// Requests of one kind of export and operation.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Requests {
    /// The export's kind.
    pub export: String,
    /// The operation.
    pub operation: String,
    /// The number of submitted requests.
    pub started: u64,
    /// The counters of these requests.
    pub done: Done,
}

/// One stage of one operation.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct StageOf {
    /// The stage.
    pub stage: String,
    /// The operation.
    pub operation: String,
    /// The counters of this stage.
    pub done: Done,
}

/// Bytes, durations and errors.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Done {
    /// Bytes.
    pub bytes: u64,
    /// The sum of the durations in nanoseconds.
    pub time: u64,
    /// The histogram's buckets that are not empty, each with its index.
    pub buckets: Vec<(usize, u64)>,
    /// How often requests failed with each errno.
    pub errors: Vec<(i32, u64)>,
}

impl Done {
    fn of(bytes: u64, durations: &HistogramReading, errors: &[ErrorCount]) -> Self {
        let buckets = durations.buckets().iter().copied().enumerate();
        Self {
            bytes,
            time: durations.sum().as_nanos() as u64,
            buckets: buckets.filter(|(_, count)| *count > 0).collect(),
            errors: errors.iter().map(|error| (error.errno, error.count)).collect(),
        }
    }

    fn durations(&self) -> HistogramReading {
        let mut buckets = [0; BUCKETS];
        for (bucket, count) in &self.buckets {
            // The last bucket has everything longer than the bounds of the others.
            buckets[(*bucket).min(BUCKETS - 1)] += count;
        }
        HistogramReading::new(buckets, Duration::from_nanos(self.time))
    }

    fn errors(&self) -> Vec<ErrorCount> {
        self.errors.iter().map(|&(errno, count)| ErrorCount { errno, count }).collect()
    }
}

impl From<&EarlierCounts> for Counts {
    fn from(counts: &EarlierCounts) -> Self {
        let EarlierCounts { metrics, cache, limits } = counts;
        let requests = metrics.requests.iter().map(|one| Requests {
            export: one.export.as_str().into(),
            operation: one.operation.as_str().into(),
            started: one.started,
            done: Done::of(one.bytes, &one.durations, &one.errors),
        });
        let stages = metrics.stages.iter().map(|one| StageOf {
            stage: one.stage.as_str().into(),
            operation: one.operation.into(),
            done: Done::of(one.bytes, &one.durations, &one.errors),
        });
        let clients = metrics.clients.iter();
        let clients = clients.map(|one| (one.export.as_str().to_owned(), one.connections));
        Self {
            requests: requests.collect(),
            stages: stages.collect(),
            clients: clients.collect(),
            totals: [
                metrics.bounced,
                metrics.decompressed,
                metrics.flushes_skipped,
                metrics.flushes_shared,
            ],
            cache: [cache.hits, cache.misses],
            delayed: [limits.delayed, limits.delayed_time.as_nanos() as u64],
        }
    }
}

impl Counts {
    /// The counts from which the new process continues.
    pub fn earlier(&self) -> EarlierCounts {
        let mut metrics = DiskMetrics::default();
        metrics.requests = self.requests.iter().filter_map(Requests::metrics).collect();
        metrics.stages = self.stages.iter().filter_map(StageOf::metrics).collect();
        metrics.clients = self.clients.iter().filter_map(clients).collect();
        let [bounced, decompressed, skipped, shared] = self.totals;
        (metrics.bounced, metrics.decompressed) = (bounced, decompressed);
        (metrics.flushes_skipped, metrics.flushes_shared) = (skipped, shared);
        let [hits, misses] = self.cache;
        let [delayed, nanoseconds] = self.delayed;
        let mut limits = ThrottleStats::default();
        (limits.delayed, limits.delayed_time) = (delayed, Duration::from_nanos(nanoseconds));
        EarlierCounts { metrics, cache: CacheCounts { hits, misses }, limits }
    }
}

fn export_kind(label: &str) -> Option<ExportKind> {
    ExportKind::ALL.into_iter().find(|kind| kind.as_str() == label)
}

fn clients((export, connections): &(String, u64)) -> Option<ClientMetrics> {
    let mut metrics = ClientMetrics::new(export_kind(export)?);
    metrics.connections = *connections;
    Some(metrics)
}

impl Requests {
    fn metrics(&self) -> Option<RequestMetrics> {
        let mut operations = Operation::ALL.into_iter();
        let operation = operations.find(|operation| operation.as_str() == self.operation)?;
        let mut metrics = RequestMetrics::new(export_kind(&self.export)?, operation);
        (metrics.started, metrics.bytes) = (self.started, self.done.bytes);
        (metrics.durations, metrics.errors) = (self.done.durations(), self.done.errors());
        Some(metrics)
    }
}

impl StageOf {
    fn metrics(&self) -> Option<StageMetrics> {
        let stages = [Stage::Queue, Stage::Host, Stage::Metadata, Stage::Flush];
        let stage = stages.into_iter().find(|stage| stage.as_str() == self.stage)?;
        let requested = Operation::ALL.map(Operation::as_str);
        let at_host = HostOperation::ALL.map(HostOperation::as_str);
        let mut operations = requested.into_iter().chain(at_host);
        let operation = operations.find(|operation| *operation == self.operation)?;
        let mut metrics = StageMetrics::new(stage, operation);
        metrics.bytes = self.done.bytes;
        (metrics.durations, metrics.errors) = (self.done.durations(), self.done.errors());
        Some(metrics)
    }
}
