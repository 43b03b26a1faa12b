//! The version, and counters of nodes.

use std::rc::Rc;

use blockhouse_disk::{DiskMetrics, Operation};
use serde_json::{Value, json};

use super::arguments::Arguments;
use super::context::Context;
use super::errors::Returned;

/// The version of QEMU that the commands follow, and the version of this program.
pub(super) fn version() -> Value {
    json!({
        "qemu": { "major": 10, "minor": 0, "micro": 2 },
        "package": concat!("Blockhouse ", env!("CARGO_PKG_VERSION")),
    })
}

/// `query-block`: there are no devices, only nodes, as in qemu-storage-daemon.
pub(super) async fn devices(_: &Rc<Context>, given: Arguments) -> Returned {
    given.end().map(|()| json!([]))
}

/// `query-blockstats`: counters of the guests' requests to each disk. QEMU keeps them at devices,
/// but there are no devices here.
pub(super) async fn stats(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let of_nodes = given.flag("query-nodes", false)?;
    given.end()?;
    if !of_nodes {
        return Ok(json!([]));
    }
    let state = context.state.borrow();
    let told = context.running.disks().all().into_iter().map(|disk| {
        let node = state.top_of(disk.name());
        json!({
            "node-name": node,
            "stats": counters(&disk.disk.stats().metrics()),
            "parent": {
                "node-name": state.file_of(node),
                "stats": counters(&DiskMetrics::default()),
            },
        })
    });
    Ok(told.collect())
}

/// Kinds of operations: QEMU's word for each kind, and its operations.
const KINDS: &[(&str, &[Operation])] = &[
    ("rd", &[Operation::Read]),
    ("wr", &[Operation::Write, Operation::WriteFua, Operation::WriteZeroes]),
    ("unmap", &[Operation::Discard]),
    ("flush", &[Operation::Flush]),
    ("zone_append", &[]),
];

fn counters(metrics: &DiskMetrics) -> Value {
    let mut told = json!({
        "account_invalid": false,
        "account_failed": true,
        "timed_stats": [],
        // No disk records this offset.
        "wr_highest_offset": 0,
    });
    for (word, operations) in KINDS {
        let (mut count, mut bytes, mut failed, mut time) = (0, 0, 0, 0);
        let of_kind = metrics.requests.iter().filter(|one| operations.contains(&one.operation));
        for one in of_kind {
            let errors: u64 = one.errors.iter().map(|error| error.count).sum();
            count += one.durations.count() - errors.min(one.durations.count());
            bytes += one.bytes;
            failed += errors;
            time += one.durations.sum().as_nanos() as u64;
        }
        told[format!("{word}_operations")] = count.into();
        told[format!("{word}_total_time_ns")] = time.into();
        told[format!("failed_{word}_operations")] = failed.into();
        told[format!("invalid_{word}_operations")] = 0.into();
        if *word != "flush" {
            told[format!("{word}_bytes")] = bytes.into();
            told[format!("{word}_merged")] = 0.into();
        }
    }
    told
}
