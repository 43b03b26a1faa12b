//! A paused QEMU machine, which saves and loads its state by commands to its monitor.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab_tools::monitor::Monitor;
use serde_json::json;

use crate::caching::Caching;

const START: Duration = Duration::from_secs(20);
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// A QEMU process; killed when dropped.
pub struct Machine {
    child: Child,
    monitor: Monitor,
}

impl Machine {
    /// Starts a machine whose memory is the file `memory` of `size` bytes and whose disk is
    /// `image`.
    pub fn start(
        folder: &Path,
        memory: &Path,
        size: u64,
        image: &Path,
        caching: Caching,
    ) -> Result<Self> {
        let socket = folder.join("qmp");
        let cache = match caching {
            Caching::Direct => "cache=none,aio=native",
            Caching::Cached | Caching::Null => "cache=writeback",
        };
        let mebibytes = size >> 20;
        let [memory, image, monitor] = [memory, image, &socket].map(|path| path.display());
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-machine", "pc,accel=tcg,memory-backend=m", "-nodefaults", "-S"]);
        qemu.args(["-display", "none", "-m", &mebibytes.to_string()]).args([
            "-object",
            &format!("memory-backend-file,id=m,share=on,size={size},mem-path={memory}"),
        ]);
        qemu.args(["-drive", &format!("if=none,id=d,format=qcow2,{cache},file={image}")]);
        qemu.args(["-qmp", &format!("unix:{monitor},server=on,wait=off")]);
        let mut child = qemu.stdin(Stdio::null()).spawn().context("cannot start QEMU")?;
        let deadline = Instant::now() + START;
        let monitor = loop {
            match Monitor::connect(&socket) {
                Ok(monitor) => break monitor,
                Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY_DELAY),
                Err(error) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(error);
                }
            }
        };
        Ok(Self { child, monitor })
    }

    /// Runs a command of the human monitor; returns how long it takes.
    pub fn timed(&mut self, command: &str) -> Result<Duration> {
        let arguments = json!({"command-line": command});
        let began = Instant::now();
        let said = self.monitor.command("human-monitor-command", &arguments)?;
        let spent = began.elapsed();
        ensure!(said == "", "{command}: {said}");
        Ok(spent)
    }

    /// Ends it.
    pub fn quit(mut self) -> Result<()> {
        self.monitor.command("quit", &json!({}))?;
        let status = self.child.wait()?;
        ensure!(status.success(), "QEMU ended badly: {status}");
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
