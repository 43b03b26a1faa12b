//! The static binary, for every Linux of its architecture: it needs no library of the host.
//!
//! Guarantee: it has TLS like the Debian package. OpenSSL is built from source and linked in
//! (feature `vendored`), whatever version this machine has, so that there is only one version of
//! it, also for musl.
//!
//! If the musl target (`rustup target add x86_64-unknown-linux-musl`) and its C compiler
//! (`musl-gcc`, for zstd) are installed, the binary is linked with musl, else statically with this
//! machine's C library. In that case, names of hosts in `nbd://` URIs and of groups need the same
//! version of the C library on the machine where the binary runs, because glibc loads modules (NSS)
//! for them. Numeric addresses need nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use lab_tools::apt;
use lab_tools::build::BINARY;
use lab_tools::process::{cargo, executables, find_program, run, stdout_of};

use super::parts::Parts;

/// The name filter of the tests of OpenSSL: servers with certificates and keys for nbdinfo and
/// qemu-img, and clients.
const TESTS: &str = "tls::";

/// The feature that builds OpenSSL from source.
pub(super) const FEATURE: &str = "vendored";

/// Builds it and returns its path.
pub(super) fn build(parts: &Parts<'_>) -> Result<PathBuf> {
    apt::require(apt::FOR_STATIC_BINARY)?;
    let target = target()?;
    println!("xtask: the static binary is for {target}");
    let mut build = cargo(["build", "--package", "blockhouse", "--bin", "blockhouse", "--locked"]);
    let profile = if parts.is_quick { "dev" } else { "dist" };
    build.args(["--profile", profile, "--target", &target]).current_dir(parts.workspace.root());
    build.args(["--features", FEATURE]);
    // With --target, RUSTFLAGS affects only the binary, not the build scripts.
    build.env("RUSTFLAGS", "-C target-feature=+crt-static");
    let built = executables(build)?.into_iter().find(|(name, _)| name == "blockhouse");
    Ok(built.context("cargo built package blockhouse without naming its binary")?.1)
}

/// Runs the black-box tests of TLS with the binary.
pub(super) fn test(parts: &Parts<'_>, binary: &Path) -> Result<()> {
    apt::require(apt::FOR_TLS_TESTS)?;
    let mut test =
        cargo(["test", "--locked", "--package", "blockhouse-tests", "--test", "it", "--"]);
    test.arg(TESTS).current_dir(parts.workspace.root()).env(BINARY, binary);
    test.env("BLOCKHOUSE_TESTS_SKIP", "never");
    run(test)
}

/// The musl target if this machine can build it, else the machine's own target.
fn target() -> Result<String> {
    let arch = std::env::consts::ARCH;
    let musl = format!("{arch}-unknown-linux-musl");
    let mut directory = Command::new("rustc");
    directory.args(["--print", "target-libdir", "--target", &musl]);
    let is_there = PathBuf::from(stdout_of(directory)?.trim()).is_dir();
    Ok(if is_there && find_program("musl-gcc").is_some() {
        musl
    } else {
        format!("{arch}-unknown-linux-gnu")
    })
}
