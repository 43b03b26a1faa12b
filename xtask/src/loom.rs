//! `cargo xtask loom`: the model-checked protocols of the crates core and engine.
//!
//! The models are unit tests with `loom` in their path, compiled with `--cfg loom`. They have a
//! separate target folder, because the flag would otherwise rebuild everything twice a run. If a
//! crate has no model, that is a failure: renaming a module must not disable the check.

use std::process::Command;

use anyhow::{Result, ensure};

use lab_tools::process::{self, cargo, stdout_of};
use lab_tools::workspace::Workspace;

/// The crates that have models.
const PACKAGES: [&str; 2] = ["blockhouse-core", "blockhouse-engine"];

/// Runs all models.
pub fn run(workspace: &Workspace) -> Result<()> {
    PACKAGES.into_iter().try_for_each(|package| run_package(workspace, package))
}

fn run_package(workspace: &Workspace, package: &str) -> Result<()> {
    let mut list = models(workspace, package);
    list.args(["--", "--list"]);
    let count = stdout_of(list)?.lines().filter(|line| line.ends_with(": test")).count();
    ensure!(count > 0, "no test of {package} has loom in its path: the models are gone");
    println!("xtask: {count} loom models of {package}");
    process::run(models(workspace, package))
}

fn models(workspace: &Workspace, package: &str) -> Command {
    let mut test = cargo(["test", "--package", package, "--release", "--lib"]);
    test.arg("--target-dir").arg(workspace.target().join("loom"));
    test.arg("loom").current_dir(workspace.root());
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    test.env("RUSTFLAGS", format!("{flags} --cfg loom"));
    // Link-time optimization costs more here than the models run.
    test.env("CARGO_PROFILE_RELEASE_LTO", "off");
    test
}
