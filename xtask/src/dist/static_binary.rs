//! The binary for every Linux of its architecture: it needs no library of the host.
//!
//! With the target of musl installed (`rustup target add x86_64-unknown-linux-musl`) and its C compiler (`musl-gcc`, for
//! zstd) it is linked with musl, else statically with the C library of this machine. Then names of hosts in `nbd://`
//! URIs and of groups need that machine's version of the C library where it runs, because it loads modules (NSS) for them;
//! addresses in numbers need nothing.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use lab_tools::process::{cargo, executables, find_program, stdout_of};

use super::parts::Parts;

/// Builds it and returns its path.
pub(super) fn build(parts: &Parts<'_>) -> Result<PathBuf> {
    let target = target()?;
    println!("xtask: the static binary is for {target}");
    let mut build = cargo(["build", "--package", "blockhouse", "--bin", "blockhouse", "--locked"]);
    let profile = if parts.is_quick { "dev" } else { "dist" };
    build.args(["--profile", profile, "--target", &target]).current_dir(parts.workspace.root());
    // With --target this concerns the binary alone, and not the build scripts.
    build.env("RUSTFLAGS", "-C target-feature=+crt-static");
    let built = executables(build)?.into_iter().find(|(name, _)| name == "blockhouse");
    Ok(built.context("cargo built package blockhouse without naming its binary")?.1)
}

/// That of musl if it can be built here, or this machine's own.
fn target() -> Result<String> {
    let arch = std::env::consts::ARCH;
    let musl = format!("{arch}-unknown-linux-musl");
    let mut directory = Command::new("rustc");
    directory.args(["--print", "target-libdir", "--target", &musl]);
    let is_there = PathBuf::from(stdout_of(directory)?.trim()).is_dir();
    Ok(match is_there && find_program("musl-gcc").is_some() {
        true => musl,
        false => format!("{arch}-unknown-linux-gnu"),
    })
}
