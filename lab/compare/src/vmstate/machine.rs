//! A paused machine of QEMU's, told by its monitor to save and load itself.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::caching::Caching;

const START: Duration = Duration::from_secs(20);
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// Ended when dropped.
pub struct Machine {
    child: Child,
    monitor: BufReader<UnixStream>,
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
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY_DELAY),
                Err(error) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(error).context("QEMU's monitor does not listen");
                }
            }
        };
        let mut machine = Self { child, monitor: BufReader::new(stream) };
        machine.hear()?;
        machine.ask(&json!({"execute": "qmp_capabilities"}))?;
        Ok(machine)
    }

    fn hear(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.monitor.read_line(&mut line).context("QEMU says nothing")?;
        ensure!(!line.is_empty(), "QEMU has ended");
        serde_json::from_str(&line).with_context(|| format!("QEMU says {line:?}"))
    }

    fn ask(&mut self, request: &Value) -> Result<Value> {
        writeln!(self.monitor.get_mut(), "{request}")?;
        loop {
            let mut said = self.hear()?;
            if said.get("return").is_some() {
                return Ok(said["return"].take());
            }
            // Anything else is an event.
            if said.get("error").is_some() {
                bail!("QEMU refuses {request}: {}", said["error"]);
            }
        }
    }

    /// How long a command of the human monitor takes.
    pub fn timed(&mut self, command: &str) -> Result<Duration> {
        let arguments = json!({"command-line": command});
        let request = json!({"execute": "human-monitor-command", "arguments": arguments});
        let began = Instant::now();
        let said = self.ask(&request)?;
        let spent = began.elapsed();
        ensure!(said == "", "{command}: {said}");
        Ok(spent)
    }

    /// Ends it.
    pub fn quit(mut self) -> Result<()> {
        self.ask(&json!({"execute": "quit"}))?;
        let status = self.child.wait()?;
        ensure!(status.success(), "QEMU ended badly: {status}");
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail only when it has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
