//! The binary under test.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::process::{cargo, executables};
use crate::workspace::Workspace;

/// How the binary is compiled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Fast to build, with debug assertions.
    Dev,
    /// Optimized, and faster to build than `Dist`.
    Release,
    /// As in packages.
    Dist,
}

/// Builds the binary `blockhouse` and returns its path.
pub fn build_binary(workspace: &Workspace, profile: Profile) -> Result<PathBuf> {
    let mut build = cargo(["build", "--package", "blockhouse", "--bin", "blockhouse"]);
    match profile {
        Profile::Dev => {}
        Profile::Release => _ = build.arg("--release"),
        Profile::Dist => _ = build.args(["--profile", "dist"]),
    }
    build.current_dir(workspace.root());
    let built = executables(build)?.into_iter().find(|(name, _)| name == "blockhouse");
    Ok(built.context("cargo built package blockhouse without naming its binary")?.1)
}
