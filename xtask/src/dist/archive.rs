//! The static binary with its pages, as `blockhouse-VERSION-ARCH-linux.tar.xz`.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use lab_tools::process;

use super::files;
use super::parts::Parts;

/// Makes the archive.
pub(super) fn make(parts: &Parts<'_>, binary: &Path) -> Result<()> {
    let name = format!("blockhouse-{}-{}-linux", parts.version()?, std::env::consts::ARCH);
    let folder = parts.staging.join("archive").join(&name);
    let (root, staging) = (parts.workspace.root(), &parts.staging);
    files::copy_stripped(binary, &folder)?;
    for file in ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"] {
        files::copy(&root.join(file), &folder)?;
    }
    files::copy(&staging.join("THIRD-PARTY.txt"), &folder)?;
    for file in ["options.md", "control.schema.json"] {
        files::copy(&staging.join(file), &folder)?;
    }
    files::copy_all(&staging.join("man"), &folder.join("man"))?;
    files::copy_all(&staging.join("completions"), &folder.join("completions"))?;
    files::copy_all(&root.join("contrib/systemd"), &folder.join("systemd"))?;
    files::copy_all(&root.join("contrib/apparmor"), &folder.join("apparmor"))?;
    let archive = parts.output.join(format!("{name}.tar.xz"));
    let mut tar = tar(parts, &parts.staging.join("archive"));
    tar.arg("--xz").arg("--file").arg(&archive).arg(&name);
    process::run(tar)?;
    println!("xtask: {}", archive.display());
    Ok(())
}

/// A tar command that packs files of `folder` reproducibly: sorted, owned by root, with one time.
/// The caller adds the names and the archive.
pub(super) fn tar(parts: &Parts<'_>, folder: &Path) -> Command {
    let mut tar = Command::new("tar");
    tar.arg("--directory").arg(folder).arg(format!("--mtime=@{}", parts.time));
    tar.args(["--create", "--format=ustar", "--sort=name", "--owner=0", "--group=0"]);
    tar.args(["--numeric-owner", "--mode=u=rwX,go=rX"]);
    tar
}
