//! The results and their environment, and their form as JSON.
//!
//! results.schema.json describes the JSON; a test checks that the two agree.

mod answers;
pub mod html;
mod plot;
pub mod table;

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use serde_json::{Value, json};

use super::rows::{Published, ROUNDS, Row};
use super::testbed::Testbed;
use crate::output;
use crate::snapshot_list::date;
use crate::version::VERSION;

/// The results of a run, and its environment.
pub struct Report {
    /// When it was measured, in seconds since 1970.
    pub time: u64,
    /// The folder, or the file that was written over.
    pub path: String,
    /// The machine on which it was measured.
    pub machine: Machine,
    /// The disk's storage.
    pub storage: Storage,
    /// The use that was announced before the run: upper bounds.
    pub announced: ResourceUse,
    /// The actual use.
    pub took: ResourceUse,
    /// The results.
    pub rows: Vec<Row>,
    /// The questions that were not measured.
    pub left_out: Vec<Skipped>,
}

/// The resources that a measurement uses.
#[derive(Clone, Copy, Debug)]
pub struct ResourceUse {
    /// How long it takes.
    pub time: Duration,
    /// Bytes that are written to devices; `None` if the kernel does not report them.
    pub written: Option<u64>,
}

impl ResourceUse {
    /// The use of this process since `begin`.
    pub fn since(begin: Instant) -> Self {
        let counts = fs::read_to_string("/proc/self/io").unwrap_or_default();
        let written = counts.lines().find_map(|line| line.strip_prefix("write_bytes: "));
        let written = written.and_then(|number| number.parse().ok());
        Self { time: begin.elapsed(), written }
    }

    fn json(self) -> Value {
        json!({ "seconds": self.time.as_secs_f64(), "bytes-written": self.written })
    }
}

/// A question or case without results.
pub struct Skipped {
    /// The question.
    pub question: &'static str,
    /// The case; `None` if the whole question was skipped.
    pub case: Option<String>,
    /// The reason why there are no results.
    pub why: String,
}

/// The machine.
pub struct Machine {
    /// The processor's own name.
    pub processor: String,
    /// The number of processors.
    pub processors: usize,
    /// The kernel's name and version.
    pub kernel: String,
}

impl Machine {
    /// The machine that this program runs on.
    fn here() -> Self {
        let about = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = about.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let kernel = rustix::system::uname();
        Self {
            processor: name.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: format!(
                "{} {}",
                kernel.sysname().to_string_lossy(),
                kernel.release().to_string_lossy()
            ),
        }
    }
}

/// The storage below the disk.
pub struct Storage {
    /// The file system's name.
    pub file_system: String,
    /// How the page cache is used.
    pub cache: &'static str,
    /// Whether the kernel supports durable writes on this file system.
    pub fua: &'static str,
    /// The device's name and whether it supports FUA.
    pub device: Option<(String, Option<&'static str>)>,
}

impl Report {
    /// The report of these rows.
    pub fn new(
        testbed: &Testbed,
        rows: Vec<Row>,
        left_out: Vec<Skipped>,
        (announced, took): (ResourceUse, ResourceUse),
    ) -> Self {
        let storage = Storage {
            file_system: file_system(testbed.target().path()),
            cache: testbed.cache().as_str(),
            fua: testbed.disk().capabilities().fua.as_str(),
            device: testbed.device().map(|device| (device.name(), device.fua())),
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (time, path) = (now.as_secs(), testbed.target().place());
        Self { time, path, machine: Machine::here(), storage, announced, took, rows, left_out }
    }

    /// When it was measured, by which program, and where, in a sentence.
    pub fn origin(&self) -> String {
        let (time, version) = (date(self.time), VERSION);
        format!("Measured on {time} by blockhouse {version} in {}.", self.path)
    }

    /// The machine and the disk, in a sentence.
    pub fn environment(&self) -> String {
        let Machine { processor, processors, kernel } = &self.machine;
        let Storage { file_system, cache, fua, device } = &self.storage;
        let device = match device {
            None => "device not visible".to_owned(),
            Some((name, fua)) => format!("device {name}, FUA {}", fua.unwrap_or("unknown")),
        };
        format!(
            "{processors} x {processor}, {kernel}; {file_system}, cache mode {cache}, durable writes \
             {fua}; {device}"
        )
    }

    /// The report as JSON.
    pub fn json(&self) -> Value {
        let Machine { processor, processors, kernel } = &self.machine;
        let Storage { file_system, cache, fua, device } = &self.storage;
        json!({
            "version": 1,
            "program": VERSION,
            "time": self.time,
            "path": self.path,
            "machine": { "processor": processor, "processors": processors, "kernel": kernel },
            "storage": {
                "file-system": file_system,
                "cache": cache,
                "durable-writes": fua,
                "device": device.as_ref().map(|(name, fua)| json!({ "name": name, "fua": fua })),
            },
            "announced": self.announced.json(),
            "took": self.took.json(),
            "rounds": ROUNDS,
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
            "left-out": self.left_out.iter().map(|one| json!({
                "question": one.question, "case": one.case, "why": one.why,
            })).collect::<Vec<_>>(),
        })
    }
}

/// Prints JSON to standard output.
pub fn print_json(report: &Report) -> Result<()> {
    output::print(&format!("{:#}", report.json()))
}

/// From `<linux/magic.h>` and the file systems' own headers.
const FILE_SYSTEMS: [(u64, &str); 9] = [
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x2fc1_2fc1, "zfs"),
    (0xf2f5_2010, "f2fs"),
    (0x794c_7630, "overlayfs"),
    (0x6969, "nfs"),
    (0x6573_5546, "fuse"),
];

fn file_system(path: &Path) -> String {
    // `statfs` would describe the file system of the device node, not the device.
    if fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device()) {
        return "block device".into();
    }
    let Ok(found) = rustix::fs::statfs(path) else { return "unknown".into() };
    // The field's width and sign differ between architectures, so only the 32 bits of the magic
    // number are compared.
    let magic = found.f_type as u64 & 0xffff_ffff;
    let known = FILE_SYSTEMS.iter().find(|(number, _)| *number == magic);
    known.map_or_else(|| format!("file system {magic:#x}"), |(_, name)| (*name).to_owned())
}

fn row(row: &Row) -> Value {
    let latency = |quantile| row.latency.value_at_quantile(quantile);
    json!({
        "question": row.question,
        "case": row.case,
        "variant": row.variant,
        "rounds": row.rounds,
        "requests": row.latency.len(),
        "requests-per-second": row.rate,
        "bytes-per-second": row.throughput,
        "latency-ns": { "p50": latency(0.5), "p99": latency(0.99), "p99.9": latency(0.999) },
        "cpu-ns-per-request": row.processor,
        "device": row.device.map(|device| json!({
            "reads": device.reads, "writes": device.writes, "flushes": device.flushes,
        })),
        "ratio": row.ratio.map(|ratio| json!({
            "median": ratio.median, "low": ratio.low, "high": ratio.high,
            "within-noise": ratio.is_noise(),
        })),
        "published-elsewhere": row.published.map(|one| published(&one, row.published_ratio)),
        "note": row.note,
    })
}

fn published(one: &Published, ratio: Option<f64>) -> Value {
    let Published { value, detail } = one;
    json!({ "value": value, "unit": "IOPS", "detail": detail, "ratio": ratio })
}
