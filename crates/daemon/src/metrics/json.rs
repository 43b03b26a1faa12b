//! Metrics as JSON: the numbers of the text form, and quantiles with a finer resolution than its
//! buckets.

use blockhouse_core::metrics::{HistogramReading, upper_bound};
use serde_json::{Map, Value as Json, json};

use super::gather::{Sample, Samples, Value};

/// An object with a member for each family that has samples. Each member is a list of samples: the
/// labels, and the `value`; for a histogram instead `count`, `sum`, `p50`, `p99` (in seconds; null
/// if nothing was recorded) and `buckets`. `buckets` lists the buckets that are not empty, each as
/// its upper bound in seconds (null for the last, which has none) and its count of durations.
pub fn to_json(gathered: &[Samples]) -> Json {
    let family = |one: &Samples| {
        let samples = one.samples.iter().map(|sample| sample_to_json(one, sample)).collect();
        (one.family.name.to_owned(), Json::Array(samples))
    };
    let with_samples = gathered.iter().filter(|one| !one.samples.is_empty());
    Json::Object(with_samples.map(family).collect())
}

fn sample_to_json(family: &Samples, sample: &Sample) -> Json {
    let labels = family.family.labels.iter().zip(&sample.labels);
    let labels: Map<_, _> =
        labels.map(|(name, value)| ((*name).to_owned(), Json::from(value.as_str()))).collect();
    match &sample.value {
        Value::Number(number) => json!({ "labels": labels, "value": number }),
        Value::Durations(durations) => histogram_to_json(&labels, durations),
    }
}

fn histogram_to_json(labels: &Map<String, Json>, durations: &HistogramReading) -> Json {
    let quantile = |quantile| durations.quantile(quantile).map(|time| time.as_secs_f64());
    let bound = |bucket| upper_bound(bucket).map(|bound| bound as f64 / 1e9);
    let buckets = durations.buckets().iter().enumerate().filter(|(_, count)| **count > 0);
    let buckets: Vec<_> = buckets.map(|(bucket, count)| (bound(bucket), count)).collect();
    json!({
        "labels": labels,
        "count": durations.count(),
        "sum": durations.sum().as_secs_f64(),
        "p50": quantile(0.5),
        "p99": quantile(0.99),
        "buckets": buckets,
    })
}
