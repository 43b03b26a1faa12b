//! `cargo xtask loom`: the model-checked protocols of the engine crate.
//!
//! The models are unit tests with `loom` in their path, compiled with `--cfg loom`. They have a target
//! folder of their own, because the flag would otherwise rebuild everything twice a run. Finding no model
//! is a failure: a renamed module must not switch the check off.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::process::{self, cargo, stdout_of};
use crate::workspace::Workspace;

/// Runs all models.
pub fn run(workspace: &Workspace) -> Result<()> {
    let mut list = models(workspace);
    list.args(["--", "--list"]);
    let count = stdout_of(list)?.lines().filter(|line| line.ends_with(": test")).count();
    ensure!(count > 0, "no test of blockhouse-engine has loom in its path: the models are gone");
    println!("xtask: {count} loom models");
    process::run(models(workspace))
}

fn models(workspace: &Workspace) -> Command {
    let mut test = cargo(["test", "--package", "blockhouse-engine", "--release", "--lib"]);
    test.arg("--target-dir").arg(workspace.target().join("loom"));
    test.arg("loom").current_dir(workspace.root());
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    test.env("RUSTFLAGS", format!("{flags} --cfg loom"));
    // Link-time optimization costs more here than the models run.
    test.env("CARGO_PROFILE_RELEASE_LTO", "off");
    test
}
