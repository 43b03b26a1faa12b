//! `cargo xtask test`: everything that shows that Blockhouse works, from a bare checkout.
//!
//! The black-box tests find the binary under test in the environment variable `BLOCKHOUSE_BIN`.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::process::{self, cargo, executables};
use crate::workspace::Workspace;
use crate::{apt, loom};

/// Runs all tests, or what `args` (for `cargo test`) select of them; without any, the loom models too.
pub fn run(workspace: &Workspace, args: &[String]) -> Result<()> {
    apt::require(apt::FOR_TESTS)?;
    let release = args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--release");
    let binary = build_binary(workspace, if release { Profile::Release } else { Profile::Dev })?;
    let mut tests = cargo(["test"]);
    if !args.iter().any(|arg| arg == "-p" || arg.starts_with("--package")) {
        tests.arg("--workspace");
    }
    tests.args(args).current_dir(workspace.root()).env("BLOCKHOUSE_BIN", binary);
    process::run(tests)?;
    if args.is_empty() {
        loom::run(workspace)?;
    }
    Ok(())
}

/// How the binary is compiled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Quickly, with debug assertions.
    Dev,
    /// As users get it.
    Release,
}

/// Builds the binary `blockhouse` and returns its path.
pub fn build_binary(workspace: &Workspace, profile: Profile) -> Result<PathBuf> {
    let mut build = cargo(["build", "--package", "blockhouse", "--bin", "blockhouse"]);
    if profile == Profile::Release {
        build.arg("--release");
    }
    build.current_dir(workspace.root());
    let built = executables(build)?.into_iter().find(|(name, _)| name == "blockhouse");
    Ok(built.context("cargo built package blockhouse without naming its binary")?.1)
}
