//! The names, kinds and meanings of all metrics.
//!
//! A name ends with the unit; names of counters end in `_total`. A label has few values: the names
//! of disks, or a fixed list.

/// How a metric's values behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, from 0 at the start of the server; upgrades do not reset it.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Durations: for each bound the number of durations that were not longer.
    Histogram,
}

impl Kind {
    /// The name in a `# TYPE` line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The name; for a counter with `_total`.
    pub name: &'static str,
    /// How its values behave.
    pub kind: Kind,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// The meaning, in a line.
    pub help: &'static str,
}

/// The labels of requests.
const REQUEST: &[&str] = &["disk", "export", "operation"];
/// The labels of stages.
const STAGE: &[&str] = &["disk", "stage", "operation"];
/// The label of a disk.
const DISK: &[&str] = &["disk"];

macro_rules! families {
    ($($id:ident: $kind:ident $name:literal $labels:expr, $help:literal;)*) => {
        $(pub(super) const $id: Family =
            Family { name: $name, kind: Kind::$kind, labels: $labels, help: $help };)*
        /// All metrics, in the order in which they are written.
        pub const FAMILIES: &[Family] = &[$($id),*];
    };
}

families! {
    BUILD: Gauge "blockhouse_build_info" &["version"], "Always 1; the label says which version runs.";
    START: Gauge "blockhouse_start_time_seconds" &[], "When measuring began, in seconds since 1970; upgrades do not change it.";
    DISK_INFO: Gauge "blockhouse_disk_info" &["disk", "format", "path"], "Always 1; the labels say what the disk is.";
    SIZE: Gauge "blockhouse_disk_size_bytes" DISK, "The size of the disk as its guest sees it.";
    ALLOCATED: Gauge "blockhouse_disk_allocated_bytes" DISK, "The space that the image takes on the host.";
    IN_FLIGHT: Gauge "blockhouse_disk_requests_in_flight" DISK, "Requests in flight: the depth of the disk's queue.";
    HELD: Gauge "blockhouse_held_requests" DISK, "Requests that are held because the host has no room for what they write (serve --on-full hold).";
    ROOM: Gauge "blockhouse_room_left_bytes" DISK, "The room that the host has left for what the guest writes: on the device of a qcow2 image, or in the file system.";
    WAIT: Gauge "blockhouse_disk_wait_seconds" &["disk", "file"], "Seconds since the oldest read of a backing file began that has not been answered; absent while there is none.";
    CLIENTS: Gauge "blockhouse_clients" &["disk", "export"], "Clients of the disk: NBD connections, vhost-user front-ends, and the kernel for each ublk device.";
    CONNECTIONS: Counter "blockhouse_client_connections_total" &["disk", "export"], "Clients that there were so far.";
    REQUESTS: Counter "blockhouse_requests_total" REQUEST, "Requests that were submitted to the disk.";
    REQUEST_BYTES: Counter "blockhouse_request_bytes_total" REQUEST, "The bytes that these requests are about.";
    REQUEST_ERRORS: Counter "blockhouse_request_errors_total" &["disk", "export", "operation", "errno"], "Requests that failed.";
    REQUEST_DURATION: Histogram "blockhouse_request_duration_seconds" REQUEST, "From a request's submission to its completion.";
    STAGE_DURATION: Histogram "blockhouse_stage_duration_seconds" STAGE, "How long each operation of a stage took.";
    STAGE_BYTES: Counter "blockhouse_stage_bytes_total" STAGE, "The bytes that these operations moved.";
    STAGE_ERRORS: Counter "blockhouse_stage_errors_total" &["disk", "stage", "operation", "errno"], "Operations that failed.";
    FLUSHES_SKIPPED: Counter "blockhouse_flushes_skipped_total" DISK, "Flushes that found everything stable and did nothing.";
    FLUSHES_SHARED: Counter "blockhouse_flushes_shared_total" DISK, "Flushes that another flush covered.";
    UNALIGNED: Counter "blockhouse_unaligned_pieces_total" DISK, "Pieces of requests that were copied because they were not aligned.";
    DECOMPRESSED: Counter "blockhouse_decompressed_clusters_total" DISK, "Compressed clusters that were decompressed.";
    THROTTLED: Gauge "blockhouse_throttle_waiting_requests" DISK, "Requests that wait because of the limits of --limit.";
    DELAYED: Counter "blockhouse_throttle_delayed_requests_total" DISK, "Requests that had to wait because of these limits.";
    CACHE_HITS: Counter "blockhouse_metadata_cache_hits_total" DISK, "Look-ups of image metadata that found it in memory.";
    CACHE_MISSES: Counter "blockhouse_metadata_cache_misses_total" DISK, "Look-ups of image metadata that read it from the host.";
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of the table in docs/metrics.md: name, kind, labels, the first sentences of the
    /// meaning.
    fn documented() -> Vec<[String; 4]> {
        let page = include_str!("../../../../docs/metrics.md");
        let rows = page.lines().filter(|line| line.starts_with("| `blockhouse_"));
        let cells = |row: &str| {
            let cells = row.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', ""));
            cells.collect::<Vec<_>>().try_into().expect("four cells")
        };
        rows.map(cells).collect()
    }

    #[test]
    fn the_page_explains_each_metric_and_no_other() {
        let documented = documented();
        let names: Vec<_> = documented.iter().map(|row| row[0].as_str()).collect();
        assert_eq!(names, FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>());
        for (family, [_, kind, labels, meaning]) in FAMILIES.iter().zip(&documented) {
            assert_eq!((kind.as_str(), labels), (family.kind.as_str(), &family.labels.join(", ")));
            assert!(meaning.starts_with(family.help), "{}: {meaning}", family.name);
        }
    }

    #[test]
    fn names_follow_the_rules_of_openmetrics() {
        for family in FAMILIES {
            let Family { name, kind, .. } = family;
            assert!(name.starts_with("blockhouse_"), "{name}");
            assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
            assert_eq!(name.ends_with("_duration_seconds"), *kind == Kind::Histogram, "{name}");
        }
    }

    /// The names of metrics in a text, without the suffixes of histograms.
    fn named(text: &str) -> Vec<&str> {
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let words = text.split(|letter| !is_part(letter));
        let names = words.filter(|word| word.starts_with("blockhouse_"));
        let ends = ["_bucket", "_count", "_sum"];
        let family =
            |name| ends.iter().find_map(|end| str::strip_suffix(name, end)).unwrap_or(name);
        names.map(family).collect()
    }

    #[test]
    fn the_dashboard_and_the_rules_name_metrics_that_there_are() {
        let dashboard = include_str!("../../../../contrib/grafana-dashboard.json");
        let rules = include_str!("../../../../contrib/prometheus-rules.yml");
        let _: serde_json::Value = serde_json::from_str(dashboard).expect("JSON");
        let is_known = |name: &str| FAMILIES.iter().any(|family| family.name == name);
        for (text, least) in [(dashboard, 15), (rules, 5)] {
            let names = named(text);
            let unknown: Vec<_> = names.iter().filter(|name| !is_known(name)).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
            let distinct: std::collections::BTreeSet<_> = names.iter().collect();
            assert!(distinct.len() >= least, "{distinct:?}");
        }
    }
}
