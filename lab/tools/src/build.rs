//! The binary under test, and what is built beside it.

use std::path::PathBuf;

use anyhow::{Context, Result};

use serde_json::Value;

use crate::process::{artifacts, cargo, executables};
use crate::workspace::Workspace;

/// The environment variable with the path of the binary under test.
pub const BINARY: &str = "BLOCKHOUSE_BIN";

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

/// The programs and the test programs of the workspace, built by one cargo command. Cargo chooses
/// the features of dependencies by the packages that a command names: a command that names one
/// package compiles most of the workspace again.
pub struct Built(Vec<Value>);

impl Built {
    /// Builds them for development.
    ///
    /// # Errors
    /// Cargo fails.
    pub fn all(workspace: &Workspace) -> Result<Self> {
        let mut build = cargo(["build", "--workspace", "--lib", "--bins", "--tests"]);
        build.current_dir(workspace.root());
        artifacts(build).map(Self)
    }

    /// The messages of cargo about them.
    pub fn artifacts(&self) -> &[Value] {
        &self.0
    }

    /// The program of this name, which is no test program.
    ///
    /// # Errors
    /// The workspace has no such program.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let mut programs = self.0.iter().filter(|artifact| {
            artifact["target"]["name"] == name && artifact["profile"]["test"] == false
        });
        let program = programs.find_map(|artifact| artifact["executable"].as_str());
        program.map(Into::into).with_context(|| format!("cargo built no program {name}"))
    }
}

/// The binary in the environment variable `BLOCKHOUSE_BIN`, or else one that is built for
/// development.
///
/// # Errors
/// Cargo fails.
pub fn binary_under_test(workspace: &Workspace) -> Result<PathBuf> {
    match std::env::var_os(BINARY) {
        Some(binary) => Ok(std::path::absolute(binary)?),
        None => build_binary(workspace, Profile::Dev),
    }
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
