//! Programs from crates.io that tasks use: they are found on the search path or in `target/tools`,
//! or built now.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};

use lab_tools::process::{cargo, stdout_of};
use lab_tools::workspace::Workspace;

/// The program `name` of this version, without optional features.
pub(crate) fn installed(workspace: &Workspace, name: &str, version: &str) -> Result<PathBuf> {
    let tools = workspace.target().join("tools");
    let ours = tools.join("bin").join(name);
    for candidate in [PathBuf::from(name), ours.clone()] {
        let mut command = Command::new(&candidate);
        command.arg("--version").stderr(Stdio::null());
        let is_it = |output: &[u8]| {
            let told = String::from_utf8_lossy(output);
            told.split_whitespace().last() == Some(version)
        };
        if command.output().is_ok_and(|output| is_it(&output.stdout)) {
            return Ok(candidate);
        }
    }
    let started = Instant::now();
    println!("xtask: installing {name} {version} into {}", tools.display());
    let build = tools.join("build");
    // An unoptimized build is fast, and the program has little to do.
    let mut install = cargo(["install", name, "--version", version, "--locked", "--quiet"]);
    install.args(["--debug", "--no-default-features", "--root"]).arg(&tools);
    install.arg("--target-dir").arg(&build).env("CARGO_PROFILE_DEV_DEBUG", "0");
    stdout_of(install)?;
    std::fs::remove_dir_all(&build)
        .with_context(|| format!("cannot remove {}", build.display()))?;
    println!("xtask: installed {name} in {:.1} s", started.elapsed().as_secs_f64());
    Ok(ours)
}
