//! Metrics of a running server, over HTTP.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// The longest time until an answer, on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);

/// All metrics at a moment.
pub struct Metrics(Value);

/// Sends bytes to a socket and returns everything that it receives.
///
/// # Errors
/// An error of the kernel.
pub fn exchange(socket: &Path, bytes: &[u8]) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(bytes)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// The body of the answer for a path; each of `headers` ends with CR and LF.
///
/// # Panics
/// When the status is not 200.
#[track_caller]
pub fn get(socket: &Path, path: &str, headers: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n");
    let answer = exchange(socket, request.as_bytes()).expect("the server answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    assert_eq!(length.and_then(|text| text.parse().ok()), Some(body.len()), "{head}");
    body.to_owned()
}

impl Metrics {
    /// Reads all metrics.
    ///
    /// # Panics
    /// When the server does not answer with them.
    #[track_caller]
    pub fn read(socket: &Path) -> Self {
        Self(serde_json::from_str(&get(socket, "/metrics.json", "")).expect("JSON"))
    }

    /// The samples of a metric that have these labels, and perhaps others.
    pub fn samples(&self, name: &str, labels: &[(&str, &str)]) -> Vec<&Value> {
        let has = |sample: &&Value| {
            labels.iter().all(|(label, value)| sample["labels"][label].as_str() == Some(value))
        };
        self.0[name].as_array().into_iter().flatten().filter(has).collect()
    }

    /// All counters, and the counts of all histograms, with their labels.
    pub fn counters(&self) -> impl Iterator<Item = (String, u64)> {
        let families = self.0.as_object().into_iter().flatten();
        let counters = families
            .filter(|(name, _)| name.ends_with("_total") || name.ends_with("_duration_seconds"));
        counters.flat_map(|(name, samples)| {
            let samples = samples.as_array().into_iter().flatten();
            samples.map(move |sample| (format!("{name}{}", sample["labels"]), number(sample)))
        })
    }

    /// The sum of the values of these samples, or of their counts if they are histograms.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        self.samples(name, labels).into_iter().map(number).sum()
    }
}

fn number(sample: &Value) -> u64 {
    let value = sample.get("value").or(sample.get("count"));
    value.and_then(Value::as_u64).expect("a number")
}
