//! Running other programs: inherit the terminal or capture the output; a failure names the command.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A cargo command of the same toolchain as the running one.
pub fn cargo<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(args: I) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).stdin(Stdio::null());
    command
}

/// `apt-get`, which asks nothing and prints errors alone.
pub(crate) fn apt_get(args: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    command.args(["--quiet=2", "--option", "Dpkg::Use-Pty=0"]).args(args);
    command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    // Standard output only lists unpacked packages; errors go to standard error.
    command.stdout(Stdio::null());
    command
}

/// Runs `command` on this terminal; anything but exit status 0 is an error.
pub fn run(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", line(&command)))?;
    if !status.success() {
        bail!("{} failed: {status}", line(&command));
    }
    Ok(())
}

/// Runs `command` and returns its standard output; anything but exit status 0 is an error.
pub fn stdout_of(mut command: Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", line(&command)))?;
    if !output.status.success() {
        bail!("{} failed: {}", line(&command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} wrote no UTF-8", line(&command)))
}

/// Runs the cargo command `build` and returns its messages about what it built.
pub fn artifacts(mut build: Command) -> Result<Vec<Value>> {
    build.arg("--message-format=json-render-diagnostics");
    let messages = stdout_of(build)?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(messages.filter(|message| message["reason"] == "compiler-artifact").collect())
}

/// Runs the cargo command `build` and returns the names and paths of the binaries that it built.
pub fn executables(build: Command) -> Result<Vec<(String, PathBuf)>> {
    let binary = |artifact: &Value| {
        let name = artifact["target"]["name"].as_str()?;
        Some((name.to_owned(), artifact["executable"].as_str()?.into()))
    };
    Ok(artifacts(build)?.iter().filter_map(binary).collect())
}

/// Whether `command` starts and exits with status 0; its output is dropped.
pub fn succeeds(mut command: Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// The file that the name `program` stands for on the search path.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Administrators' tools are often missing from an ordinary user's search path.
    let also = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(also)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// `command` as a person would type it.
pub fn line(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}
