//! The check of `serve --io-poll on` at the start: it fails if polling could never take effect.

use std::path::Path;

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_engine::{Engine, EngineReport, check_io_poll};

/// Checks that completions on all these images can be polled for. For an image that does not exist
/// yet, the folder is checked.
///
/// # Errors
/// The engine cannot poll, or an image's device has no poll queues. The error has advice.
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
    // If the path is missing, opening the image returns a better error.
    if place.exists() {
        check_io_poll(place)?;
    }
    Ok(())
}
