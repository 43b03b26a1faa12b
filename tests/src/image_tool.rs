//! Commands on images: our binary's and those of QEMU's tools.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::{Outcome, Scratch, blockhouse, run, tool};

/// Runs our binary with these arguments.
pub fn command(words: &[&str]) -> Outcome {
    run(Command::new(blockhouse()).args(words))
}

/// Makes an image of this size in the scratch folder; its name determines the format.
pub fn new_image(scratch: &Scratch, name: &str, size: &str) -> PathBuf {
    let path = scratch.path(name);
    command(&["create", str(&path), size]).success();
    path
}

/// Runs qemu-img with these arguments.
pub fn qemu_img(words: &[&str]) -> Outcome {
    run(tool("qemu-img").args(words))
}

/// Checks a qcow2 image that a killed server has left: it may have leaks, and no errors.
#[track_caller]
pub fn check_after_kill(image: &Path) {
    let outcome = qemu_img(&["check", "-f", "qcow2", str(image)]);
    assert!(matches!(outcome.status.code(), Some(0 | 3)), "{}", outcome.describe("leaks at most"));
}

/// Runs these commands in qemu-io; each must succeed.
#[track_caller]
pub fn qemu_io(format: &str, image: &Path, steps: &[&str]) {
    qemu_io_in(Path::new("."), format, image, steps);
}

/// As [`qemu_io`], in this working folder.
#[track_caller]
pub fn qemu_io_in(folder: &Path, format: &str, image: &Path, steps: &[&str]) {
    let mut command = tool("qemu-io");
    command.current_dir(folder).args(["-f", format]);
    for step in steps {
        command.args(["-c", step]);
    }
    let outcome = run(command.arg(image)).success();
    assert!(!outcome.stdout.contains("failed"), "{}", outcome.describe("must do it"));
}

/// A path as an argument of a command line.
pub fn str(path: &Path) -> &str {
    path.to_str().expect("a plain name")
}

/// The output, as JSON.
pub fn json(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| {
        panic!("{}", outcome.describe(&format!("must be JSON ({error})")));
    })
}
