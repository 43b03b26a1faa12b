//! `serve --io-poll on`: refused at the start where it could never take effect.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use blockhouse_engine::{Engine, EngineReport, check_io_poll};

/// Whether completions on all these images can be polled for. One that is still to be made, with the size
/// `create`, is judged by the folder that it will lie in.
///
/// # Errors
/// The engine cannot, or an image's disk; with what to do.
pub fn check(report: &EngineReport, images: &[PathBuf], create: Option<u64>) -> Result<()> {
    if report.engine != Engine::IoUring {
        bail!(
            "--io-poll on needs the engine io_uring, and this is {report}; allow io_uring, or leave \
             out --io-poll"
        );
    }
    for image in images {
        let folder = match image.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let place = if image.exists() || create.is_none() { image } else { folder };
        // What is not there is the business of opening, which says it better.
        if place.exists() {
            check_io_poll(place)?;
        }
    }
    Ok(())
}
