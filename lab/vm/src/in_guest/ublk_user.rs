//! The commands of a user of block devices, and their output.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use blockhouse_engine::{UblkControl, UblkInfo, ublk_state};
use rustix::process::{Pid, Signal, kill_process};

use super::system;

/// Bytes of an image.
pub const SIZE: u64 = 32 << 20;
/// The first device.
pub const DEVICE: &str = "/dev/ublkb0";

/// The output of a program.
pub struct Said {
    /// Whether it exited with status 0.
    pub is_good: bool,
    /// Standard output.
    pub output: String,
    /// Standard error.
    pub error: String,
}

/// Runs `blockhouse` with these arguments to its end.
pub fn blockhouse(words: &[&str]) -> Result<Said> {
    let mut command = Command::new("blockhouse");
    command.args(words);
    said_by(command)
}

/// Runs a command to its end.
pub fn said_by(mut command: Command) -> Result<Said> {
    let output = command.stdin(Stdio::null()).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let (is_good, output, error) =
        (output.status.success(), text(&output.stdout), text(&output.stderr));
    Ok(Said { is_good, output, error })
}

/// The same, which must succeed; returns its standard output.
pub fn good(words: &[&str]) -> Result<String> {
    let said = blockhouse(words)?;
    ensure!(said.is_good, "{words:?} failed: {}", said.error);
    Ok(said.output)
}

/// Runs a command that must fail, with a last line that has this text.
pub fn bad(words: &[&str], expected: &str) -> Result<()> {
    let said = blockhouse(words)?;
    let mut lines = said.error.lines().filter(|line| line.starts_with("blockhouse: "));
    let line = lines.next_back().unwrap_or(&said.error).to_owned();
    println!("  {}: {line}", words.join(" "));
    ensure!(!said.is_good && line.contains(expected), "expected '{expected}': {}", said.error);
    Ok(())
}

/// Makes a new image; its name determines the format.
pub fn image(name: &str) -> Result<String> {
    let path = format!("/tmp/{name}");
    let _ = std::fs::remove_file(&path);
    good(&["create", &path, &SIZE.to_string()])?;
    Ok(path)
}

/// Attaches an image, and waits for its device.
pub fn attach(image: &str) -> Result<String> {
    let device = good(&["attach", image])?;
    system::disk(device.trim_start_matches("/dev/"))?;
    Ok(device)
}

/// The same without the wrapper script of the program, which delays its start.
pub fn attach_at_once(image: &str) -> Result<String> {
    let mut command = Command::new("/host/bin/blockhouse");
    command.args(["attach", image]).env("LD_LIBRARY_PATH", "/host/lib");
    Ok(lab_tools::process::stdout_of(command)?.trim().to_owned())
}

/// The driver's control devices, with or without a block device.
pub fn devices() -> Result<Vec<PathBuf>> {
    let all = std::fs::read_dir("/dev")?.flatten().map(|entry| entry.path());
    Ok(all.filter(|path| path.to_string_lossy().starts_with("/dev/ublkc")).collect())
}

/// The driver's view of a device.
pub fn info(id: u32) -> Result<Option<UblkInfo>> {
    Ok(UblkControl::open()?.info(id).ok())
}

fn server_of(id: u32) -> Result<Pid> {
    let server = info(id)?.context("there is no device")?.server;
    Pid::from_raw(server).context("the device has no server")
}

/// Kills the server of the first device, and waits until the driver has noticed.
pub fn kill_server() -> Result<()> {
    kill_process(server_of(0)?, Signal::KILL)?;
    system::wait_for("the end of a killed server", || {
        let is_it = |info: UblkInfo| info.state == ublk_state::QUIESCED;
        info(0).ok()?.is_some_and(is_it).then_some(())
    })
}

/// Starts a command without output.
pub fn spawn(words: &[&str]) -> Result<Child> {
    let mut command = Command::new("blockhouse");
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("cannot start blockhouse")
}
