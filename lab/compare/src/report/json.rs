//! The report as JSON: every round of every measurement, for other programs.

use anyhow::Result;
use serde_json::{Value, json};

use super::{Environment, Figure};
use crate::results::{RowResult, StorageResult};

/// The whole report, as one JSON object.
pub fn render(environment: &Environment, results: &[StorageResult]) -> Result<String> {
    with_storages(environment, results.iter().map(storage).collect())
}

/// The whole report, given the part of each storage.
pub fn with_storages(environment: &Environment, storages: Vec<Value>) -> Result<String> {
    let versions: serde_json::Map<String, Value> =
        environment.versions.iter().map(|(name, text)| (name.clone(), json!(text))).collect();
    let report = json!({
        "processor": environment.processor,
        "kernel": environment.kernel,
        "versions": versions,
        "serve-args": environment.serve_args,
        "rounds": environment.rounds,
        "seconds": environment.seconds,
        "storages": storages,
    });
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}

fn storage(result: &StorageResult) -> Value {
    json!({
        "storage": result.storage.description(),
        "bytes": result.storage.size(),
        "rows": result.rows.iter().map(row).collect::<Vec<_>>(),
    })
}

fn row(result: &RowResult) -> Value {
    let servers: serde_json::Map<String, Value> = result
        .servers
        .iter()
        .map(|(kind, rounds)| {
            let figures = json!({
                "rate": result.rounds(Figure::Rate, *kind),
                "server-cpu-us": result.rounds(Figure::ServerCpu, *kind),
                "client-cpu-us": result.rounds(Figure::ClientCpu, *kind),
                "p50-us": result.rounds(Figure::MedianLatency, *kind),
                "p99-us": result.rounds(Figure::P99Latency, *kind),
                "requests": rounds.iter().map(|measured| measured.requests).collect::<Vec<_>>(),
                "verified": rounds.iter().map(|measured| measured.verified).collect::<Vec<_>>(),
            });
            (kind.name().to_owned(), figures)
        })
        .collect();
    json!({ "row": result.row.name, "unit": result.unit(), "servers": servers })
}
