//! `serve --io-poll on`: refused at the start where it could never take effect.

use std::path::Path;

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_engine::{Engine, EngineReport, check_io_poll};

/// Whether completions on all these images can be polled for. One that is still to be made is
/// judged by the folder that it will lie in.
///
/// # Errors
/// The engine cannot, or an image's disk; with what to do.
pub fn check(report: &EngineReport, disks: &[DiskConfig]) -> Result<()> {
    if report.engine != Engine::IoUring {
        bail!(
            "--io-poll on needs the engine io_uring, and this is {report}; allow io_uring, or leave \
             out --io-poll"
        );
    }
    disks.iter().try_for_each(check_disk)
}

/// As [`check`], for one disk.
pub fn check_disk(disk: &DiskConfig) -> Result<()> {
    let image = &*disk.path;
    let folder = match image.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let place = if image.exists() || disk.create.is_none() { image } else { folder };
    // A missing place is the business of opening, which says it better.
    if place.exists() {
        check_io_poll(place)?;
    }
    Ok(())
}
