//! A Debian system with systemd, for guests that install our package.
//!
//! Guarantee: it is what mmdebstrap makes of a release's packages, nothing of this project is in
//! it, and no guest changes it: each unpacks it anew. It is made once and kept in the cache;
//! removing it there fetches the newest packages.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use lab_tools::apt;
use lab_tools::process::{cargo, run};

/// The release whose service manager keeps descriptors of services (systemd 254 and later).
const SUITE: &str = "trixie";
const MIRROR: &str = "http://deb.debian.org/debian";
/// The packages in it beside those that every system has.
const PACKAGES: &str = "systemd-sysv,apparmor,qemu-utils,libnbd-bin";

/// The archive of the system's files, made first where it is not in `cache` yet.
///
/// # Errors
/// The tools that are missing on this host.
pub fn system(cache: &Path) -> Result<PathBuf> {
    let archive = cache.join("debian.tar");
    let stamp = cache.join("debian");
    let wanted = format!("{SUITE} minbase {PACKAGES}");
    if std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) && archive.exists() {
        return Ok(archive);
    }
    apt::require(apt::FOR_SYSTEMS)?;
    println!("vm: making a system of Debian {SUITE} in {}", cache.display());
    let mut make = Command::new("mmdebstrap");
    make.args(["--variant=minbase", "--quiet", "--include", PACKAGES, SUITE])
        .arg(&archive)
        .arg(MIRROR);
    run(make)?;
    std::fs::write(&stamp, wanted).context("cannot write to the cache")?;
    Ok(archive)
}

/// The Debian package with this binary, made by `cargo xtask dist` in `folder`.
pub fn package(blockhouse: &Path, folder: &Path) -> Result<PathBuf> {
    let mut dist = cargo(["xtask", "dist", "--deb-of"]);
    dist.arg(blockhouse).arg("--output").arg(folder);
    run(dist)?;
    let files = std::fs::read_dir(folder).context("there are no packages")?.flatten();
    let mut files = files.map(|file| file.path());
    let is_package = |path: &PathBuf| path.extension().is_some_and(|it| it == "deb");
    files.find(is_package).context("cargo xtask dist made no package")
}
