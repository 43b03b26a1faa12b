//! QEMU's tools, which some of the images are shown to.

use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// Whether QEMU's tools are installed. Prints one line when they are not.
pub fn is_installed() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let found = output(Command::new("qemu-img").arg("--version")).is_ok();
        if !found {
            eprintln!("SKIPPED: qemu-img is not installed");
        }
        found
    })
}

/// Runs a program without input.
pub fn output(command: &mut Command) -> std::io::Result<Output> {
    command.stdin(Stdio::null()).output()
}
