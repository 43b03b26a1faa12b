//! The version of the program.

/// The version, with the commit if the sources are in git (build.rs).
pub const VERSION: &str = env!("BLOCKHOUSE_VERSION");
