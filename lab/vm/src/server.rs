//! `blockhouse serve` on a Unix socket, on the host or in a guest: started, killed, or stopped in order.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// A server that listens; killed when it is dropped.
pub struct Server {
    child: Child,
    socket: PathBuf,
}

/// How a server offers its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// To NBD clients, under no name.
    Nbd,
    /// As a device whose queues the server reads itself.
    VhostUser,
}

impl Export {
    /// The option of `serve`, and its value for this socket.
    fn words(self, socket: &Path) -> [String; 2] {
        match self {
            Self::Nbd => ["--nbd".into(), format!("nbd+unix:///?socket={}", socket.display())],
            Self::VhostUser => ["--vhost-user-blk".into(), socket.display().to_string()],
        }
    }
}

impl Server {
    /// Starts `program serve`, with all its other words in place, and waits until it says that it is
    /// ready at `socket`.
    pub fn start(mut serve: Command, export: Export, socket: &Path) -> Result<Self> {
        // One that was killed leaves its socket behind.
        let _ = std::fs::remove_file(socket);
        serve.args(export.words(socket)).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = serve.spawn().context("cannot start blockhouse")?;
        let stdout = child.stdout.take().context("the server has no output")?;
        let server = Self { child, socket: socket.to_owned() };
        match BufReader::new(stdout).lines().next() {
            Some(Ok(line)) if line.starts_with("ready ") => Ok(server),
            other => bail!("the server did not get ready: {other:?}"),
        }
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// How long its threads have run on processors so far, in nanoseconds.
    pub fn processor_time(&self) -> Result<u64> {
        let tasks = format!("/proc/{}/task", self.child.id());
        let mut time = 0;
        for task in std::fs::read_dir(tasks).context("the server is gone")? {
            // Documentation/scheduler/sched-stats.rst: the first number.
            let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
            let first = text.split_whitespace().next().context("the kernel counts no time")?;
            time += first.parse::<u64>()?;
        }
        Ok(time)
    }

    /// Tells it that its image may have another length.
    pub fn look_at_length(&self) -> Result<()> {
        self.signal(Signal::HUP)
    }

    /// Kills it at once, as a crash would.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Stops it in order; it must end well.
    pub fn stop(mut self) -> Result<()> {
        self.signal(Signal::TERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal).context("the server is gone")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when it has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
