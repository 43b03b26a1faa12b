//! The common parts of all packages of one `cargo xtask dist`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use lab_tools::process;
use lab_tools::workspace::Workspace;

/// The parts of all packages.
pub(super) struct Parts<'a> {
    pub(super) workspace: &'a Workspace,
    /// Man pages, completions, option reference, schema, licences: a folder that is made anew each
    /// time.
    pub(super) staging: PathBuf,
    /// The folder for the packages.
    pub(super) output: PathBuf,
    /// Whether to pack fast rather than small.
    pub(super) is_quick: bool,
    /// The time of all files in archives, in seconds since 1970.
    pub(super) time: String,
}

impl Parts<'_> {
    /// Runs the binary to generate the files that it makes from its definitions.
    pub(super) fn generate(&self, binary: &Path) -> Result<()> {
        let mut generate = Command::new(binary);
        generate.arg("__generate").arg(&self.staging);
        process::run(generate)
    }

    /// The version of the binary.
    pub(super) fn version(&self) -> Result<String> {
        version(self.workspace)
    }
}

/// The version of the binary.
pub(super) fn version(workspace: &Workspace) -> Result<String> {
    let packages = workspace.packages();
    let cli = packages.iter().find(|package| package["name"] == "blockhouse");
    let version = cli.and_then(|package| package["version"].as_str());
    Ok(version.context("cargo metadata has no version of blockhouse")?.to_owned())
}

/// The time of the commit in seconds since 1970, or the value of `SOURCE_DATE_EPOCH`.
pub(super) fn commit_time(workspace: &Workspace) -> Result<String> {
    if let Ok(time) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(time);
    }
    let mut log = Command::new("git");
    log.args(["log", "-1", "--format=%ct"]).current_dir(workspace.root());
    Ok(process::stdout_of(log)?.trim().to_owned())
}
