//! `blockhouse check`: is an image what it says?
//!
//! Exit status, as that of `qemu-img check`: 0 nothing is wrong, 1 the check could not be made, 2 the
//! image is corrupt, 3 it has leaks only, 63 the format has nothing to check. What is wrong is told
//! on standard error, the sums on standard output.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use blockhouse_disk::{CheckReport, open_alone};
use blockhouse_engine::{EngineChoice, EventLoop};
use serde_json::json;

use crate::looked_at::LookedAt;

const CORRUPT: u8 = 2;
const LEAKS: u8 = 3;
const NOT_CHECKABLE: u8 = 63;

/// Arguments of `check`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    looked_at: LookedAt,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let looked_at = &arguments.looked_at;
    let (report, format) = EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let disk = open_alone(&looked_at.image, looked_at.options()).await?;
        anyhow::Ok((disk.check().await?, disk.format_name()))
    })?;
    let name = looked_at.image.display().to_string();
    let Some(report) = report else {
        eprintln!("blockhouse: {name}: the format {format} does not support checks");
        return Ok(ExitCode::from(NOT_CHECKABLE));
    };
    for problem in &report.problems {
        eprintln!("blockhouse: {name}: {problem}");
    }
    let text = if looked_at.json { as_json(&name, &report) } else { as_text(&report) };
    // Nobody reading is no failure of ours.
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(match report {
        CheckReport { corruptions: 1.., .. } => ExitCode::from(CORRUPT),
        CheckReport { leaks: 1.., .. } => ExitCode::from(LEAKS),
        _ => ExitCode::SUCCESS,
    })
}

fn as_text(report: &CheckReport) -> String {
    let mut lines = Vec::new();
    let &CheckReport { corruptions, leaks, total_clusters: total, .. } = report;
    if corruptions == 0 && leaks == 0 {
        lines.push("No errors were found on the image.".to_owned());
    }
    if corruptions > 0 {
        lines.push(format!("{corruptions} errors: data may be lost, and more with each write."));
    }
    if leaks > 0 {
        lines.push(format!("{leaks} leaked clusters: they waste space but harm no data."));
    }
    if total > 0 && report.allocated_clusters > 0 {
        let (allocated, compressed) = (report.allocated_clusters, report.compressed_clusters);
        let share = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        lines.push(format!(
            "{allocated}/{total} = {:.2}% allocated, {:.2}% compressed clusters",
            share(allocated, total),
            share(compressed, allocated)
        ));
    }
    lines.push(format!("Image end offset: {}", report.end));
    lines.join("\n")
}

/// As `qemu-img` does, counts of zero are left out.
fn as_json(name: &str, report: &CheckReport) -> String {
    let mut value = json!({ "filename": name, "format": "qcow2", "check-errors": 0 });
    for (key, count) in [
        ("image-end-offset", report.end),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("compressed-clusters", report.compressed_clusters),
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
    ] {
        if count > 0 {
            value[key] = count.into();
        }
    }
    format!("{value:#}")
}
