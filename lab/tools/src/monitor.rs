//! QEMU's monitor (QMP), through which virtual machines and qemu-storage-daemon are managed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Longer than any command used here takes on a busy host.
const TIMEOUT: Duration = Duration::from_secs(300);

/// A connection to a monitor.
pub struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects to the monitor that listens at `socket`.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("cannot connect to QEMU's monitor")?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        monitor.message().context("QEMU's monitor does not greet")?;
        monitor.command("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Runs a command and returns its result; an error has QEMU's error text.
    pub fn command(&mut self, name: &str, arguments: &Value) -> Result<Value> {
        let line = json!({ "execute": name, "arguments": arguments }).to_string() + "\n";
        self.stream.get_mut().write_all(line.as_bytes()).context("QEMU's monitor is gone")?;
        loop {
            // QEMU may send events before the answer.
            let mut message = self.message()?;
            if let Some(returned) = message.get_mut("return") {
                return Ok(returned.take());
            }
            if let Some(error) = message.get("error") {
                bail!("QEMU refuses {name}: {}", error["desc"].as_str().unwrap_or_default());
            }
        }
    }

    fn message(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.stream.read_line(&mut line).context("QEMU's monitor is silent")?;
        serde_json::from_str(&line).with_context(|| format!("QEMU's monitor said: {line}"))
    }
}
