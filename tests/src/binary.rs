//! The binary under test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The binary `blockhouse`: the file that `BLOCKHOUSE_BIN` names; else it is built once, with the
/// profile of the running test and into its target folder.
///
/// # Panics
/// When it cannot be built.
pub fn blockhouse() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| match std::env::var_os("BLOCKHOUSE_BIN") {
        Some(path) => std::path::absolute(path).expect("BLOCKHOUSE_BIN names a file"),
        None => build(),
    })
}

/// Copies the binary to this path, by another process: a process that a test beside this one starts
/// would inherit the copy's descriptor for writing, and the copy could not be executed meanwhile.
///
/// # Panics
/// If there is no room.
pub fn copy_blockhouse(to: &Path) {
    let status = Command::new("cp").arg(blockhouse()).arg(to).status().expect("cp starts");
    assert!(status.success(), "cannot copy the binary: {status}");
}

fn build() -> PathBuf {
    let output = output_folder();
    let release = output.ends_with("release");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--package", "blockhouse", "--bin", "blockhouse"]);
    build.args(release.then_some("--release"));
    build.arg("--target-dir").arg(output.parent().expect("it is inside of the target folder"));
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    let status = build.status().expect("cargo starts");
    assert!(status.success(), "cannot build the binary under test: {status}");
    output.join("blockhouse")
}

/// The folder of cargo's output for the profile of this program. Test programs are in a subfolder
/// of it, binaries are not.
fn output_folder() -> PathBuf {
    let program = std::env::current_exe().expect("a program knows its own file");
    let folder = program.parent().expect("a file is in a folder");
    if folder.ends_with("deps") {
        folder.parent().expect("cargo runs tests from PROFILE/deps").into()
    } else {
        folder.into()
    }
}

/// A folder on a disk for files of tests: `CARGO_TARGET_TMPDIR`, which cargo does not set for
/// libraries.
pub(crate) fn temporary_folder() -> PathBuf {
    let output = output_folder();
    let folder = output.parent().expect("it is inside of the target folder").join("tmp");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    folder
}
