//! A reading of a server's metrics, as far as the view shows them.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

/// All disks at a moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The time of the reading.
    pub at: Instant,
    /// The server's version.
    pub version: String,
    /// The disks, by name.
    pub disks: BTreeMap<String, DiskReading>,
}

/// The metrics of one disk.
#[derive(Clone, Debug, Default)]
pub struct DiskReading {
    /// The format.
    pub format: String,
    /// The size in bytes.
    pub size: u64,
    /// The space that the disk occupies on the host, in bytes.
    pub allocated: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests that wait for free space on the host.
    pub held: u64,
    /// The file that the oldest read of a backing file waits for, and the number of seconds that it
    /// has waited.
    pub wait: Option<(String, u64)>,
    /// Clients of each kind of export.
    pub clients: BTreeMap<String, u64>,
    /// Counters by kind of export and operation.
    pub requests: BTreeMap<(String, String), Series>,
    /// Counters by stage and operation.
    pub stages: BTreeMap<(String, String), Series>,
}

/// The counters of one kind of request.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// The number of requests that have ended.
    pub count: u64,
    /// The bytes of these requests.
    pub bytes: u64,
    /// The number of requests that failed.
    pub errors: u64,
    /// The number of requests whose duration is at most this bound, in nanoseconds, but above the
    /// previous bound.
    pub buckets: BTreeMap<u64, u64>,
}

/// A sample of any metric.
#[derive(Deserialize)]
struct Sample {
    labels: BTreeMap<String, String>,
    #[serde(default)]
    value: u64,
    #[serde(default)]
    count: u64,
    #[serde(default)]
    buckets: Vec<(Option<f64>, u64)>,
}

impl Sample {
    fn label(&self, name: &str) -> String {
        self.labels.get(name).cloned().unwrap_or_default()
    }
}

impl Snapshot {
    /// Parses the server's answer. Metrics with unknown names are ignored, because the server may
    /// be newer; their samples must have the known form.
    ///
    /// # Errors
    /// The answer is not a server's metrics.
    pub fn parse(answer: &Value) -> Result<Self> {
        let families = answer.as_object().context("the answer is no list of metrics")?;
        let mut snapshot =
            Self { at: Instant::now(), version: String::new(), disks: BTreeMap::new() };
        for (name, samples) in families {
            let Some(name) = name.strip_prefix("blockhouse_") else { continue };
            let samples: Vec<Sample> = serde_json::from_value(samples.clone())
                .with_context(|| format!("cannot understand the metric {name}"))?;
            samples.iter().for_each(|sample| snapshot.add(name, sample));
        }
        Ok(snapshot)
    }

    fn add(&mut self, name: &str, sample: &Sample) {
        if name == "build_info" {
            self.version = sample.label("version");
        }
        let Some(disk) = sample.labels.get("disk") else { return };
        let disk = self.disks.entry(disk.clone()).or_default();
        match name {
            "disk_info" => disk.format = sample.label("format"),
            "disk_size_bytes" => disk.size = sample.value,
            "disk_allocated_bytes" => disk.allocated = sample.value,
            "disk_requests_in_flight" => disk.in_flight = sample.value,
            "held_requests" => disk.held = sample.value,
            "disk_wait_seconds" => disk.wait = Some((sample.label("file"), sample.value)),
            "clients" => drop(disk.clients.insert(sample.label("export"), sample.value)),
            _ => disk.add_to_series(name, sample),
        }
    }
}

impl DiskReading {
    fn add_to_series(&mut self, name: &str, sample: &Sample) {
        let (all, first, name) = match (name.strip_prefix("request"), name.strip_prefix("stage")) {
            (Some(name), _) => (&mut self.requests, "export", name),
            (_, Some(name)) => (&mut self.stages, "stage", name),
            (None, None) => return,
        };
        let series = all.entry((sample.label(first), sample.label("operation"))).or_default();
        match name {
            "_bytes_total" => series.bytes = sample.value,
            // One sample for each errno.
            "_errors_total" => series.errors += sample.value,
            "_duration_seconds" => {
                series.count = sample.count;
                series.buckets = sample.buckets.iter().map(nanoseconds).collect();
            }
            _ => {}
        }
    }
}

/// The last bucket has no bound.
fn nanoseconds(&(bound, count): &(Option<f64>, u64)) -> (u64, u64) {
    (bound.map_or(u64::MAX, |bound| (bound * 1e9).round() as u64), count)
}
