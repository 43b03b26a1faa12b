//! Metrics as text: OpenMetrics 1.0, and the older text of Prometheus (0.0.4), which more tools
//! read.
//!
//! The two differ in three things: `_total` in a counter's `# HELP` and `# TYPE`, the end of the
//! text, and the content type.

use std::fmt::Write;

use blockhouse_core::metrics::HistogramReading;

use super::families::{Family, Kind};
use super::gather::{Sample, Samples, Value};

/// The version of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text of Prometheus, version 0.0.4.
    Prometheus,
}

impl Form {
    /// The value of `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// The family's name in `# TYPE` and `# HELP`.
    fn name_of(self, family: &Family) -> &'static str {
        match self {
            Self::OpenMetrics => family.name.strip_suffix("_total").unwrap_or(family.name),
            Self::Prometheus => family.name,
        }
    }
}

/// The metrics as text. Families without samples are left out.
pub fn to_text(gathered: &[Samples], form: Form) -> String {
    let mut text = String::new();
    for Samples { family, samples } in gathered.iter().filter(|one| !one.samples.is_empty()) {
        let name = form.name_of(family);
        line(&mut text, format_args!("# HELP {name} {}", family.help));
        line(&mut text, format_args!("# TYPE {name} {}", family.kind.as_str()));
        samples.iter().for_each(|sample| write_sample(&mut text, family, sample));
    }
    if form == Form::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String does not fail.
    let _ = writeln!(text, "{line}");
}

fn write_sample(text: &mut String, family: &Family, sample: &Sample) {
    debug_assert_eq!(family.kind == Kind::Histogram, matches!(sample.value, Value::Durations(_)));
    let pairs: Vec<_> =
        family.labels.iter().zip(&sample.labels).map(|(name, value)| pair(name, value)).collect();
    let pairs = pairs.join(",");
    match &sample.value {
        Value::Number(number) => write_number(text, family.name, &pairs, *number),
        Value::Durations(durations) => write_histogram(text, family.name, &pairs, durations),
    }
}

fn write_number(text: &mut String, name: &str, pairs: &str, number: u64) {
    if pairs.is_empty() {
        line(text, format_args!("{name} {number}"))
    } else {
        line(text, format_args!("{name}{{{pairs}}} {number}"))
    }
}

fn write_histogram(text: &mut String, name: &str, pairs: &str, durations: &HistogramReading) {
    for (bound, count) in durations.powers_of_two() {
        let le = bound.as_secs_f64();
        line(text, format_args!("{name}_bucket{{{pairs},le=\"{le:?}\"}} {count}"));
    }
    let (count, sum) = (durations.count(), durations.sum());
    line(text, format_args!("{name}_bucket{{{pairs},le=\"+Inf\"}} {count}"));
    line(text, format_args!("{name}_sum{{{pairs}}} {}.{:09}", sum.as_secs(), sum.subsec_nanos()));
    line(text, format_args!("{name}_count{{{pairs}}} {count}"));
}

/// A label; characters that would end its value early are escaped.
fn pair(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

#[cfg(test)]
mod tests {
    use blockhouse_core::metrics::Histogram;

    use super::super::families::{BUILD, CONNECTIONS, REQUEST_DURATION, SIZE};
    use super::*;

    fn number(family: &'static Family, labels: &[&str], value: u64) -> Samples {
        let labels = labels.iter().map(|label| label.to_string()).collect();
        Samples { family, samples: vec![Sample { labels, value: Value::Number(value) }] }
    }

    #[test]
    fn the_two_forms_differ_in_names_of_counters_and_the_end() {
        let gathered = [number(&CONNECTIONS, &["a", "nbd"], 7), number(&SIZE, &["a"], 512)];
        let common = "# HELP blockhouse_disk_size_bytes The size of the disk as its guest sees it.\n\
                      # TYPE blockhouse_disk_size_bytes gauge\n\
                      blockhouse_disk_size_bytes{disk=\"a\"} 512\n";
        let counter = "blockhouse_client_connections_total{disk=\"a\",export=\"nbd\"} 7\n";
        for (form, name, end) in [
            (Form::OpenMetrics, "blockhouse_client_connections", "# EOF\n"),
            (Form::Prometheus, "blockhouse_client_connections_total", ""),
        ] {
            let expected = format!(
                "# HELP {name} Clients that there were so far.\n# TYPE {name} counter\n{counter}{common}{end}"
            );
            assert_eq!(to_text(&gathered, form), expected);
        }
    }

    #[test]
    fn a_label_cannot_break_out_of_its_quotes() {
        let text = to_text(&[number(&BUILD, &["a\"b\\c\nd"], 1)], Form::Prometheus);
        assert!(text.ends_with("blockhouse_build_info{version=\"a\\\"b\\\\c\\nd\"} 1\n"), "{text}");
    }

    #[test]
    fn a_histogram_has_cumulative_buckets_its_sum_and_its_count() {
        let histogram = Histogram::default();
        [1_000, 1_001, 3_000_000_000].into_iter().for_each(|time| histogram.record(time));
        let value = Value::Durations(Box::new(histogram.read()));
        let labels = ["a", "nbd", "read"].map(str::to_owned).to_vec();
        let samples = vec![Sample { labels, value }];
        let text = to_text(&[Samples { family: &REQUEST_DURATION, samples }], Form::OpenMetrics);
        let name = "blockhouse_request_duration_seconds";
        let labels = "disk=\"a\",export=\"nbd\",operation=\"read\"";
        for line in [
            format!("{name}_bucket{{{labels},le=\"1e-6\"}} 1"),
            format!("{name}_bucket{{{labels},le=\"2e-6\"}} 2"),
            format!("{name}_bucket{{{labels},le=\"4.194304\"}} 3"),
            format!("{name}_bucket{{{labels},le=\"134.217728\"}} 3"),
            format!("{name}_bucket{{{labels},le=\"+Inf\"}} 3"),
            format!("{name}_sum{{{labels}}} 3.000002001"),
            format!("{name}_count{{{labels}}} 3"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
