//! `serve --io-poll on`: refused at the start where it could never take effect.

use std::path::Path;

use anyhow::{Result, bail};
use blockhouse_engine::{Engine, EngineReport, check_io_poll};

/// Whether completions on all these images can be polled for. One that is still to be made is judged by the
/// folder that it will lie in.
///
/// # Errors
/// The engine cannot, or an image's disk; with what to do.
pub fn check<'a>(report: &EngineReport, images: impl Iterator<Item = &'a Path>) -> Result<()> {
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
        let place = if image.exists() { image } else { folder };
        check_io_poll(place)?;
    }
    Ok(())
}
