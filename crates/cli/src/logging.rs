//! The log on standard error: warnings, and with `--verbose` what a person debugging wants to know.

use tracing::level_filters::LevelFilter;

/// Starts the log of this process.
pub fn start(verbose: bool) {
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::INFO };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(level)
        .with_target(false)
        .without_time()
        .init();
}
