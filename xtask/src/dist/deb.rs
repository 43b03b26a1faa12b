//! The Debian package, by cargo-deb from the description in crates/cli/Cargo.toml.
//!
//! cargo-deb is installed into `target/tools` if it is missing.

use std::path::Path;
use std::process::Stdio;

use anyhow::Result;

use lab_tools::process;

use super::files;
use super::parts::Parts;
use crate::tools;

const VERSION: &str = "3.8.0";

/// Packs `binary`.
pub(super) fn make(parts: &Parts<'_>, binary: &Path) -> Result<()> {
    let tool = tools::installed(parts.workspace, "cargo-deb", VERSION)?;
    files::copy_stripped(binary, &parts.staging.join("bin"))?;
    files::write(&parts.staging.join("copyright"), copyright(parts)?)?;
    let manifest = parts.workspace.root().join("crates/cli/Cargo.toml");
    let mut pack = std::process::Command::new(tool);
    // Uses the system's compressor, because the tool itself is built without optimization.
    pack.args(["--compress-system", "--no-build", "--no-strip", "--no-dbgsym", "--quiet"]);
    pack.args(parts.is_quick.then_some("--fast"));
    pack.arg("--manifest-path").arg(manifest).arg("--output").arg(&parts.output);
    pack.env("SOURCE_DATE_EPOCH", &parts.time).stdin(Stdio::null());
    process::run(pack)
}

/// The licences, in the form of Debian's packages. The text of Apache-2.0 is on every Debian
/// system.
fn copyright(parts: &Parts<'_>) -> Result<String> {
    let mit = files::read(&parts.workspace.root().join("LICENSE-MIT"))?;
    Ok(format!(
        "Licensed under Apache-2.0 (/usr/share/common-licenses/Apache-2.0) or MIT, at your choice. What is linked\n\
         into the program, and its licences, is in /usr/share/doc/blockhouse/THIRD-PARTY.txt.\n\
         \n{mit}"
    ))
}
