//! A driver of QEMU's block layer that Debian has as a loadable module, in its package
//! `qemu-block-extra`.
//!
//! QEMU loads only modules of its own build, so the package must have exactly QEMU's version. If
//! QEMU came from Debian's backports, apt would offer the module package of another version. So the
//! package is fetched by version, unpacked into a folder, and QEMU finds that folder by an
//! environment variable. Nothing is installed, and QEMU stays as it is.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::apt::extract;
use crate::backports::Backports;
use crate::process::{apt_get, stdout_of};

/// The environment variable by which QEMU's programs find modules in one more folder.
pub const MODULE_FOLDER: &str = "QEMU_MODULE_DIR";

/// Finds the driver `driver`, or fetches it into `folder`. Returns the value of [`MODULE_FOLDER`]
/// for QEMU's programs, or `None` if they have the driver already.
///
/// # Errors
/// The driver cannot be fetched: the system is not Debian, there is no network, or Debian no longer
/// has QEMU's version.
pub fn find(driver: &str, folder: &Path) -> Result<Option<PathBuf>> {
    if has(driver, None)? {
        return Ok(None);
    }
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat=${Version}", "qemu-utils"]);
    let version = stdout_of(query).context("cannot tell which package QEMU is from")?;
    // The folder has the version in its name, because QEMU cannot load the modules of another
    // version.
    let unpacked = folder.join(format!("qemu-block-extra-{}", version.replace([':', '/'], "_")));
    if let Some(modules) = modules(driver, &unpacked)? {
        return Ok(Some(modules));
    }
    let package = format!("qemu-block-extra={version}");
    if extract(apt_get(&["download", &package]), &unpacked).is_err() {
        extract(Backports::fetch()?.apt_get(&["download", &package]), &unpacked)?;
    }
    match modules(driver, &unpacked)? {
        Some(modules) => Ok(Some(modules)),
        None => bail!("{package} has no module of the driver {driver} that QEMU can load"),
    }
}

/// Whether QEMU has the driver, with the modules of a folder.
fn has(driver: &str, modules: Option<&Path>) -> Result<bool> {
    let mut info = Command::new("qemu-img");
    // Only an existing driver reports which of its options are missing.
    info.args(["info", "--image-opts", &format!("driver={driver}")]).stdin(Stdio::null());
    modules.map(|folder| info.env(MODULE_FOLDER, folder));
    let output = info.output().context("cannot start qemu-img")?;
    Ok(!String::from_utf8_lossy(&output.stderr).contains("Unknown driver"))
}

/// The folder below `unpacked` that has the module, if QEMU can load it.
fn modules(driver: &str, unpacked: &Path) -> Result<Option<PathBuf>> {
    let name = format!("block-{driver}.so");
    // `usr/lib` has a folder for each architecture.
    let Ok(libraries) = unpacked.join("usr/lib").read_dir() else { return Ok(None) };
    for library in libraries {
        let modules = library?.path().join("qemu");
        if modules.join(&name).exists() && has(driver, Some(&modules))? {
            return Ok(Some(modules));
        }
    }
    Ok(None)
}
