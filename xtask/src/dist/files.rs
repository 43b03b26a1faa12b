//! Files and folders of packages: each error names its path.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use lab_tools::process;

/// Makes a folder and its parents.
pub(super) fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

/// Makes an empty folder; an existing one is removed before.
pub(super) fn make_anew(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    make(folder)
}

/// Copies a file, with its mode, into a folder that is made if it is missing.
pub(super) fn copy(file: &Path, folder: &Path) -> Result<()> {
    make(folder)?;
    let name = file.file_name().with_context(|| format!("{} has no name", file.display()))?;
    let target = folder.join(name);
    fs::copy(file, &target)
        .with_context(|| format!("cannot copy {} to {}", file.display(), target.display()))?;
    Ok(())
}

/// Copies a program without debug information. It keeps the names of functions, for the report of a
/// panic.
pub(super) fn copy_stripped(program: &Path, folder: &Path) -> Result<()> {
    copy(program, folder)?;
    let name = program.file_name().unwrap_or_default();
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg(folder.join(name));
    process::run(strip)
}

/// Copies all files of a folder, which has no folders, into another.
pub(super) fn copy_all(from: &Path, to: &Path) -> Result<()> {
    let list = fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))?;
    for entry in list {
        copy(&entry?.path(), to)?;
    }
    Ok(())
}

/// Writes a file into a folder that is made if it is missing.
pub(super) fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    path.parent().into_iter().try_for_each(make)?;
    fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// Reads a text file.
pub(super) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
