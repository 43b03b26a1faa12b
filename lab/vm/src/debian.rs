//! A Debian system with systemd, for guests that install our package.
//!
//! Guarantee: the system is what mmdebstrap makes of a release's packages, with nothing of this
//! project, and no guest changes it: each guest unpacks it anew. The system is made once and kept
//! in the cache; removing it there makes a new one of the newest packages.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use lab_tools::apt;
use lab_tools::process::{cargo, run};

/// A release whose service manager keeps the file descriptors of services (systemd 254 and later).
const SUITE: &str = "trixie";
const MIRROR: &str = "http://deb.debian.org/debian";
/// The packages in addition to those of a minimal system.
const PACKAGES: &str = "systemd-sysv,apparmor,qemu-utils,libnbd-bin";

/// The archive of the system's files, which is made first unless it is in `cache`.
///
/// # Errors
/// The error names the tools that are missing on this host.
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
