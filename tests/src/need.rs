//! What a test needs of the machine: `Err` says what is missing, and the test is skipped.
//!
//! With `BLOCKHOUSE_TESTS_SKIP=never` in the environment a skip is a failure, for machines that are
//! meant to have everything.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool::find_program;
use crate::{run, tool};

/// Returns the value, or skips the test.
#[macro_export]
macro_rules! require {
    ($need:expr) => {
        match $need {
            Ok(value) => value,
            Err(reason) => return $crate::need::skip(&reason),
        }
    };
}

/// Prints on standard error that the running test is skipped.
///
/// # Panics
/// When skipping is forbidden.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let never = std::env::var_os("BLOCKHOUSE_TESTS_SKIP").is_some_and(|value| value == "never");
    assert!(!never, "{test} must not be skipped here, but: {reason}");
    // Not with eprintln!, whose output the test harness shows only for failed tests.
    let _ = writeln!(std::io::stderr(), "skipped {test}: {reason}");
}

/// Programs on the search path.
pub fn tools(programs: &[&str]) -> Result<(), String> {
    let missing: Vec<_> =
        programs.iter().filter(|program| find_program(program).is_none()).copied().collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("not installed: {}", missing.join(", "))) }
}

/// A listed mount of `/`. Without one, as in a folder that was entered by chroot(2) and is no mount
/// point, servers start no other program, because it is unknown where they can write.
pub fn root_mount() -> Result<(), String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").map_err(|why| why.to_string())?;
    let is_root = |line: &str| line.split(' ').nth(4) == Some("/");
    if mounts.lines().any(is_root) { Ok(()) } else { Err("the mount of / is not listed".into()) }
}

/// A driver of QEMU's block layer, which may be a module in a package of its own.
pub fn qemu_driver(name: &str) -> Result<(), String> {
    tools(&["qemu-img"])?;
    // Only an existing driver reports which of its options are missing.
    let outcome = run(tool("qemu-img").args(["info", "--image-opts", &format!("driver={name}")]));
    if outcome.stderr.contains("Unknown driver") {
        Err(format!("QEMU has no driver {name}: install qemu-block-extra of its version"))
    } else {
        Ok(())
    }
}

/// The program that checks Prometheus' files: on the search path, or in the folder where `cargo
/// xtask test` has put it.
pub fn promtool() -> Result<PathBuf, String> {
    let unpacked = std::env::var_os("BLOCKHOUSE_PROMTOOL").map(PathBuf::from);
    let found = unpacked.or_else(|| find_program("promtool"));
    found.ok_or_else(|| "not installed: promtool".into())
}

/// The parser of AppArmor's profiles, with the folder of the files that they include: on the search
/// path, or in the folder where `cargo xtask test` has put it.
pub fn apparmor_parser() -> Result<(PathBuf, PathBuf), String> {
    let unpacked = std::env::var_os("BLOCKHOUSE_APPARMOR_PARSER").map(PathBuf::from);
    let found = unpacked.or_else(|| find_program("apparmor_parser"));
    let parser = found.ok_or("not installed: apparmor_parser")?;
    // The files are in the unpacked package of the program, or in the host's root.
    let folders = parser.ancestors().map(|above| above.join("etc/apparmor.d"));
    let folder = folders.into_iter().find(|folder| folder.join("abstractions/base").exists());
    let folder = folder.ok_or_else(|| format!("{}: no abstractions", parser.display()))?;
    Ok((parser, folder))
}

/// A module of the system's Python.
pub fn python_module(name: &str) -> Result<(), String> {
    let outcome = run(Command::new("/usr/bin/python3").args(["-c", &format!("import {name}")]));
    if outcome.status.success() { Ok(()) } else { Err(format!("no Python module {name}")) }
}

/// Root.
pub fn root() -> Result<(), String> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err("needs root".into()) }
}

/// A strace that may trace.
pub fn strace() -> Result<(), String> {
    tools(&["strace"])?;
    let outcome = run(tool("strace").args(["-D", "-f", "-o", "/dev/null", "true"]));
    if outcome.status.success() { Ok(()) } else { Err(format!("cannot trace: {}", outcome.stderr)) }
}

/// A wrapper that mounts a small file system in memory, of `size` bytes, at the folder `at` for one
/// command. Only the command sees it, and it is removed with the command.
pub fn private_tmpfs(at: &Path, size: u64) -> Result<Vec<String>, String> {
    tools(&["unshare", "mount"])?;
    let wrapper = |command: &str| -> Vec<String> {
        let mount = format!("mount -t tmpfs -o size={size} tmpfs '{}'", at.display());
        let script = format!("{mount} && {command}");
        let user = (!rustix::process::geteuid().is_root()).then_some("--map-root-user");
        let words = ["unshare"].into_iter().chain(user).chain(["--mount", "sh", "-c", &script]);
        words.chain(["sh"]).map(str::to_owned).collect()
    };
    let trial = wrapper("true");
    let outcome = run(Command::new(&trial[0]).args(&trial[1..]));
    if !outcome.status.success() {
        return Err(format!("cannot mount in a namespace: {}", outcome.stderr.trim()));
    }
    Ok(wrapper("exec \"$@\""))
}

/// A wrapper that hides /proc from a command.
pub fn without_proc() -> Result<Vec<String>, String> {
    private_tmpfs(Path::new("/proc"), 4096)
}

/// A user without rights: a wrapper that runs a command as nobody, and a copy of `binary` in
/// `folder` that every user may run.
pub fn nobody(folder: &Path, binary: &Path) -> Result<(Vec<String>, PathBuf), String> {
    root()?;
    tools(&["setpriv"])?;
    let wrapper = "setpriv --reuid=65534 --regid=65534 --clear-groups --";
    let wrapper: Vec<String> = wrapper.split(' ').map(str::to_owned).collect();
    let copy = folder.join("blockhouse");
    let copied = std::fs::copy(binary, &copy);
    copied.map_err(|error| format!("cannot copy {}: {error}", binary.display()))?;
    let trial = run(Command::new(&wrapper[0]).args(&wrapper[1..]).arg(&copy).arg("--version"));
    if trial.status.success() { Ok((wrapper, copy)) } else { Err(trial.describe("setpriv")) }
}
