//! Tools that run once and end: their wall time and all their processor time.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use crate::servers::{Format, Programs};
use lab_tools::process::line;

/// Which tool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// Ours.
    Ours,
    /// `qemu-img`.
    QemuImg,
    /// The same, which bypasses the page cache when it writes.
    QemuImgDirect,
}

/// The cost of a run.
#[derive(Clone, Copy)]
pub struct Times {
    wall: Duration,
    cpu: Duration,
}

impl Times {
    /// Wall time and processor time.
    pub fn in_seconds(self) -> (f64, f64) {
        (self.wall.as_secs_f64(), self.cpu.as_secs_f64())
    }

    /// Wall time and processor time.
    pub fn in_milliseconds(self) -> (f64, f64) {
        (self.wall.as_secs_f64() * 1e3, self.cpu.as_secs_f64() * 1e3)
    }
}

/// Measures the tool's `info` on `image`.
pub fn info(tool: Tool, programs: &Programs, format: Format, image: &Path) -> Result<Times> {
    let mut command = program(tool, programs);
    command.arg("info");
    match tool {
        Tool::Ours => command.args(["--format", format.name()]),
        Tool::QemuImg | Tool::QemuImgDirect => command.args(["-f", format.name()]),
    };
    command.arg(image);
    timed(command, || Ok(()))
}

/// Copies `source` to `target`, each a format and a path, with the tool's fastest options. The time
/// ends when the target is durable: ours syncs it, and that of `qemu-img` is synced afterwards.
pub fn convert(
    tool: Tool,
    programs: &Programs,
    source: (Format, &Path),
    target: (Format, &Path),
) -> Result<Times> {
    let mut command = program(tool, programs);
    command.arg("convert");
    match tool {
        Tool::Ours => &mut command,
        Tool::QemuImg => command.args(["-m", "16", "-W"]),
        Tool::QemuImgDirect => command.args(["-m", "16", "-W", "-t", "none"]),
    };
    command.args(["-f", source.0.name(), "-O", target.0.name()]).args([source.1, target.1]);
    timed(command, || match tool {
        Tool::Ours => Ok(()),
        Tool::QemuImg | Tool::QemuImgDirect => Ok(std::fs::File::open(target.1)?.sync_all()?),
    })
}

fn program(tool: Tool, programs: &Programs) -> Command {
    match tool {
        Tool::Ours => Command::new(&programs.blockhouse),
        Tool::QemuImg | Tool::QemuImgDirect => Command::new("qemu-img"),
    }
}

/// Runs `command` and then `finish`.
pub(crate) fn timed(mut command: Command, finish: impl FnOnce() -> Result<()>) -> Result<Times> {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let before = children()?;
    let started = Instant::now();
    let status = command.status().with_context(|| format!("cannot start {}", line(&command)))?;
    ensure!(status.success(), "{} failed: {status}", line(&command));
    finish()?;
    let wall = started.elapsed();
    Ok(Times { wall, cpu: children()?.saturating_sub(before) })
}

/// Processor time of all children that have ended.
fn children() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("cannot read the children's usage")?;
    let microseconds =
        usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Ok(Duration::from_micros(microseconds.unsigned_abs()))
}
