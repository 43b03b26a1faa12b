//! The changes between two readings: rates, and latencies of the requests in between.

use std::collections::BTreeMap;
use std::time::Duration;

use super::model::{DiskReading, Series, Snapshot};

/// The activity of one disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The name.
    pub name: String,
    /// The format.
    pub format: String,
    /// The size in bytes.
    pub size: u64,
    /// The space that the disk occupies on the host, in bytes.
    pub allocated: u64,
    /// The number of its clients.
    pub clients: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests that wait for free space on the host.
    pub held: u64,
    /// The backing file that a request waits for, and the number of seconds that it has waited.
    pub wait: Option<(String, u64)>,
    /// The activity of all requests.
    pub all: Activity,
    /// The activity of reads.
    pub reads: Activity,
    /// The activity of writes.
    pub writes: Activity,
    /// The activity of flushes.
    pub flushes: Activity,
    /// Errors since the server's start.
    pub errors: u64,
    /// The activity by kind of export and operation.
    pub requests: Vec<Detail>,
    /// The activity by stage and operation.
    pub stages: Vec<Detail>,
}

/// The activity of one kind of request.
#[derive(Clone, Debug, PartialEq)]
pub struct Detail {
    /// The kind of export, or the stage.
    pub origin: String,
    /// The operation.
    pub operation: String,
    /// The activity.
    pub activity: Activity,
    /// Errors since the server's start.
    pub errors: u64,
}

/// The activity in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Activity {
    /// Requests a second.
    pub rate: f64,
    /// Bytes a second.
    pub bytes: f64,
    /// The median latency; `None` without requests.
    pub p50: Option<Duration>,
    /// The 99th percentile of the latency.
    pub p99: Option<Duration>,
}

/// The disks of the later reading. A disk that the earlier reading lacks has no rates yet.
pub fn rows(before: &Snapshot, after: &Snapshot) -> Vec<Row> {
    let seconds = after.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
    let row = |(name, disk): (&String, &DiskReading)| {
        row(name, before.disks.get(name).unwrap_or(disk), disk, seconds)
    };
    after.disks.iter().map(row).collect()
}

fn row(name: &str, before: &DiskReading, after: &DiskReading, seconds: f64) -> Row {
    let of = |operations: &[&str]| {
        let mut sum = Series::default();
        for (key, series) in &after.requests {
            if operations.is_empty() || operations.contains(&&*key.1) {
                add(&mut sum, &since(before.requests.get(key), series));
            }
        }
        activity(&sum, seconds)
    };
    Row {
        name: name.to_owned(),
        format: after.format.clone(),
        size: after.size,
        allocated: after.allocated,
        clients: after.clients.values().sum(),
        held: after.held,
        wait: after.wait.clone(),
        in_flight: after.in_flight,
        all: of(&[]),
        reads: of(&["read"]),
        writes: of(&["write", "write_fua", "write_zeroes"]),
        flushes: of(&["flush"]),
        errors: after.requests.values().map(|series| series.errors).sum(),
        requests: details(&before.requests, &after.requests, seconds),
        stages: details(&before.stages, &after.stages, seconds),
    }
}

type AllSeries = BTreeMap<(String, String), Series>;

fn details(before: &AllSeries, after: &AllSeries, seconds: f64) -> Vec<Detail> {
    let detail = |(key, series): (&(String, String), &Series)| Detail {
        origin: key.0.clone(),
        operation: key.1.clone(),
        activity: activity(&since(before.get(key), series), seconds),
        errors: series.errors,
    };
    after.iter().map(detail).collect()
}

/// The activity since `before`. A restarted server counts from 0 again.
fn since(before: Option<&Series>, after: &Series) -> Series {
    let Some(before) = before.filter(|before| before.count <= after.count) else {
        return after.clone();
    };
    let less = |(bound, count): (&u64, &u64)| {
        (*bound, count.saturating_sub(before.buckets.get(bound).copied().unwrap_or(0)))
    };
    Series {
        count: after.count - before.count,
        bytes: after.bytes.saturating_sub(before.bytes),
        errors: after.errors.saturating_sub(before.errors),
        buckets: after.buckets.iter().map(less).collect(),
    }
}

fn add(sum: &mut Series, more: &Series) {
    sum.count += more.count;
    sum.bytes += more.bytes;
    sum.errors += more.errors;
    for (bound, count) in &more.buckets {
        *sum.buckets.entry(*bound).or_default() += count;
    }
}

fn activity(series: &Series, seconds: f64) -> Activity {
    Activity {
        rate: series.count as f64 / seconds,
        bytes: series.bytes as f64 / seconds,
        p50: quantile(&series.buckets, 0.5),
        p99: quantile(&series.buckets, 0.99),
    }
}

/// The upper bound of the bucket that contains the quantile.
fn quantile(buckets: &BTreeMap<u64, u64>, quantile: f64) -> Option<Duration> {
    let count: u64 = buckets.values().sum();
    let rank = ((count as f64 * quantile).ceil() as u64).max(1);
    let mut seen = 0;
    let bucket = buckets.iter().find(|(_, count)| {
        seen += **count;
        seen >= rank
    });
    bucket.map(|(bound, _)| Duration::from_nanos(*bound))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn reading(count: u64, bytes: u64, buckets: &[(u64, u64)]) -> DiskReading {
        let buckets = buckets.iter().copied().collect();
        let series = Series { count, bytes, errors: 0, buckets };
        let requests = BTreeMap::from([(("nbd".to_owned(), "read".to_owned()), series)]);
        DiskReading { requests, ..DiskReading::default() }
    }

    fn snapshot(at: Instant, disk: DiskReading) -> Snapshot {
        let disks = BTreeMap::from([("a".to_owned(), disk)]);
        Snapshot { at, version: String::new(), disks }
    }

    #[test]
    fn rates_and_latencies_are_of_the_interval_alone() {
        let start = Instant::now();
        let before = snapshot(start, reading(100, 1000, &[(1000, 100)]));
        let later = reading(300, 9000, &[(1000, 101), (2000, 101), (4000, 98)]);
        let after = snapshot(start + Duration::from_secs(2), later);
        let row = &rows(&before, &after)[0];
        assert_eq!((row.reads.rate, row.reads.bytes), (100.0, 4000.0));
        assert_eq!(row.reads.p50, Some(Duration::from_micros(2)));
        assert_eq!(row.reads.p99, Some(Duration::from_micros(4)));
        assert_eq!((row.writes.rate, row.writes.p99), (0.0, None));
        assert_eq!(row.all, row.reads);
    }

    #[test]
    fn a_server_that_was_started_anew_counts_from_nothing() {
        let start = Instant::now();
        let before = snapshot(start, reading(100, 1000, &[(1000, 100)]));
        let after = snapshot(start + Duration::from_secs(1), reading(7, 70, &[(1000, 7)]));
        assert_eq!(rows(&before, &after)[0].reads.rate, 7.0);
    }
}
