//! The values of all metrics, read when a client requests them.

use std::collections::HashMap;
use std::sync::Weak;
use std::time::{SystemTime, UNIX_EPOCH};

use blockhouse_core::metrics::HistogramReading;
use blockhouse_disk::{
    DiskMetrics, ErrorCount, HostSpace, ImageDisk, RequestMetrics, Stage, StageMetrics,
};

use super::families::{self, Family};

/// A disk that is measured.
#[derive(Clone)]
pub struct MeasuredDisk {
    /// The value of its label `disk`, unique among the disks.
    pub name: String,
    /// The disk. A weak reference: no disk is kept open while file systems are asked for the space
    /// of images.
    pub disk: Weak<ImageDisk>,
    /// The space of its image.
    pub space: HostSpace,
}

/// A value.
#[derive(Clone, Debug)]
pub enum Value {
    /// The value of a counter or a gauge.
    Number(u64),
    /// The values of a histogram.
    Durations(Box<HistogramReading>),
}

/// A value and its labels, in the order of the family's label names.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The values of the labels.
    pub labels: Vec<String>,
    /// The value.
    pub value: Value,
}

/// The samples of a family.
#[derive(Clone, Debug)]
pub struct Samples {
    /// The family of its samples.
    pub family: &'static Family,
    /// The samples; no two have the same labels.
    pub samples: Vec<Sample>,
}

/// The time at which the counters started: the start of this process, or of the first process
/// before a series of hand-overs.
#[derive(Clone, Copy, Debug)]
pub struct StartTime(u64);

impl StartTime {
    /// Now.
    pub fn now() -> Self {
        Self(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()))
    }

    /// A time in seconds after 1970.
    pub(crate) fn from_seconds(seconds: u64) -> Self {
        Self(seconds)
    }

    /// The time in seconds since 1970.
    pub(crate) fn seconds(self) -> u64 {
        self.0
    }
}

/// The values of all metrics at this moment, in the order of [`FAMILIES`](super::FAMILIES).
pub fn gather(started: StartTime, disks: &[MeasuredDisk]) -> Vec<Samples> {
    let mut gathered = Gathered::default();
    gathered.add(&families::BUILD, &[env!("CARGO_PKG_VERSION")], 1);
    gathered.add(&families::START, &[], started.0);
    for MeasuredDisk { name, disk, space } in disks {
        // The disk may have been closed meanwhile.
        let Some(disk) = disk.upgrade() else { continue };
        let metrics = disk.stats().metrics();
        gathered.add_disk(name, &disk);
        gathered.add_space(name, *space);
        gathered.add_totals(name, &metrics);
        metrics.requests.iter().for_each(|one| gathered.add_requests(name, one));
        metrics.stages.iter().for_each(|one| gathered.add_stage(name, one));
    }
    gathered.finish()
}

/// The samples so far, by the name of their family.
#[derive(Default)]
struct Gathered(HashMap<&'static str, Vec<Sample>>);

impl Gathered {
    fn add(&mut self, family: &Family, labels: &[&str], value: u64) {
        self.push(family, labels, Value::Number(value));
    }

    fn add_durations(&mut self, family: &Family, labels: &[&str], value: &HistogramReading) {
        self.push(family, labels, Value::Durations(Box::new(value.clone())));
    }

    fn push(&mut self, family: &Family, labels: &[&str], value: Value) {
        debug_assert_eq!(labels.len(), family.labels.len(), "{}", family.name);
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        self.0.entry(family.name).or_default().push(Sample { labels, value });
    }

    fn add_errors(&mut self, family: &Family, labels: [&str; 3], errors: &[ErrorCount]) {
        let [disk, second, third] = labels;
        for ErrorCount { errno, count } in errors {
            self.add(family, &[disk, second, third, &errno_name(*errno)], *count);
        }
    }

    fn add_disk(&mut self, name: &str, disk: &ImageDisk) {
        self.add(
            &families::DISK_INFO,
            &[name, disk.image().image_format_name(), disk.image().image_name()],
            1,
        );
        self.add(&families::SIZE, &[name], disk.size());
        self.add(&families::HELD, &[name], disk.hold().count());
        if let Some(wait) = disk.stats().backing_wait() {
            self.add(&families::WAIT, &[name, wait.file()], wait.seconds());
        }
        let limits = disk.stats().throttle();
        self.add(&families::THROTTLED, &[name], limits.waiting);
        self.add(&families::DELAYED, &[name], limits.delayed);
        if let Some(cache) = disk.stats().metadata_cache() {
            self.add(&families::CACHE_HITS, &[name], cache.hits);
            self.add(&families::CACHE_MISSES, &[name], cache.misses);
        }
    }

    fn add_space(&mut self, name: &str, HostSpace { allocated, left }: HostSpace) {
        if let Some(allocated) = allocated {
            self.add(&families::ALLOCATED, &[name], allocated);
        }
        if let Some(left) = left {
            self.add(&families::ROOM, &[name], left);
        }
    }

    fn add_totals(&mut self, name: &str, metrics: &DiskMetrics) {
        self.add(&families::IN_FLIGHT, &[name], metrics.in_flight);
        self.add(&families::FLUSHES_SKIPPED, &[name], metrics.flushes_skipped);
        self.add(&families::FLUSHES_SHARED, &[name], metrics.flushes_shared);
        self.add(&families::UNALIGNED, &[name], metrics.bounced);
        self.add(&families::DECOMPRESSED, &[name], metrics.decompressed);
        for one in &metrics.clients {
            let labels = [name, one.export.as_str()];
            self.add(&families::CLIENTS, &labels, one.connected);
            self.add(&families::CONNECTIONS, &labels, one.connections);
        }
    }

    fn add_requests(&mut self, name: &str, one: &RequestMetrics) {
        let labels = [name, one.export.as_str(), one.operation.as_str()];
        self.add(&families::REQUESTS, &labels, one.started);
        self.add(&families::REQUEST_BYTES, &labels, one.bytes);
        self.add_errors(&families::REQUEST_ERRORS, labels, &one.errors);
        self.add_durations(&families::REQUEST_DURATION, &labels, &one.durations);
    }

    fn add_stage(&mut self, name: &str, one: &StageMetrics) {
        let labels = [name, one.stage.as_str(), one.operation];
        self.add_durations(&families::STAGE_DURATION, &labels, &one.durations);
        if one.stage != Stage::Queue {
            self.add(&families::STAGE_BYTES, &labels, one.bytes);
            self.add_errors(&families::STAGE_ERRORS, labels, &one.errors);
        }
    }

    fn finish(mut self) -> Vec<Samples> {
        let samples = |family: &'static Family| Samples {
            family,
            samples: self.0.remove(family.name).unwrap_or_default(),
        };
        families::FAMILIES.iter().map(samples).collect()
    }
}

/// The name as in errno(3) for errnos with which requests fail; a number for others.
fn errno_name(errno: i32) -> String {
    const NAMES: &[(i32, &str)] = &[
        (1, "EPERM"),
        (5, "EIO"),
        (6, "ENXIO"),
        (11, "EAGAIN"),
        (12, "ENOMEM"),
        (14, "EFAULT"),
        (16, "EBUSY"),
        (19, "ENODEV"),
        (22, "EINVAL"),
        (27, "EFBIG"),
        (28, "ENOSPC"),
        (30, "EROFS"),
        (61, "ENODATA"),
        (84, "EILSEQ"),
        (95, "EOPNOTSUPP"),
        (108, "ESHUTDOWN"),
        (110, "ETIMEDOUT"),
        (116, "ESTALE"),
        (117, "EUCLEAN"),
        (121, "EREMOTEIO"),
        (122, "EDQUOT"),
        (125, "ECANCELED"),
    ];
    let name = NAMES.iter().find(|(number, _)| *number == errno);
    name.map_or_else(|| errno.to_string(), |(_, name)| (*name).to_owned())
}
