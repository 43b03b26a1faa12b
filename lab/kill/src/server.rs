//! `blockhouse serve` on one image: started, killed at any moment, stopped in order.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::folders::{Folders, Setting};

/// Long, because a debug build on a busy machine starts slowly.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Longer than an orderly end takes.
const STOP_LIMIT: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_micros(500);

/// The parameters that servers are started with, one after the other.
pub struct Serve {
    /// The binary.
    pub binary: PathBuf,
    /// The image.
    pub image: PathBuf,
    /// All options but the sockets.
    pub options: Vec<String>,
    /// The socket for NBD clients.
    pub nbd: Option<PathBuf>,
    /// The listening socket for NBD clients, which is passed to the server as systemd does; if
    /// `None`, the server makes its own.
    pub listener: Option<UnixListener>,
    /// The socket for the guest.
    pub vhost_user: Option<PathBuf>,
    /// The file that all servers append their standard error to.
    pub log: PathBuf,
}

impl Serve {
    /// A server for NBD clients of an image.
    pub fn over_nbd(
        setting: &Setting,
        folders: &Folders,
        image: PathBuf,
        options: Vec<String>,
    ) -> Self {
        Self {
            binary: setting.binary.clone(),
            image,
            options,
            nbd: Some(folders.in_memory("nbd")),
            listener: None,
            vhost_user: None,
            log: folders.log(),
        }
    }

    /// Starts a server without waiting for it.
    pub fn spawn(&self) -> Result<Server> {
        let mut command = Command::new(&self.binary);
        if let Some(listener) = &self.listener {
            // The socket is descriptor 3, and LISTEN_PID is the process's own id.
            let script = r#"exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@""#;
            command = Command::new("sh");
            command.args(["-c", script, "sh"]).arg(&self.binary);
            command.stdin(Stdio::from(std::os::fd::OwnedFd::from(listener.try_clone()?)));
        } else {
            command.stdin(Stdio::null());
        }
        command.arg("serve").arg(&self.image).args(&self.options);
        let mut exports = 0;
        if let Some(socket) = &self.nbd {
            exports += 1;
            command.args(["--nbd", &format!("nbd+unix:///?socket={}", socket.display())]);
        }
        if let Some(socket) = &self.vhost_user {
            exports += 1;
            command.arg("--vhost-user-blk").arg(socket);
        }
        let log = File::options().create(true).append(true).open(&self.log)?;
        let log_start = log.metadata()?.len();
        command.stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().context("cannot start the server")?;
        let stdout = child.stdout.take().context("the server has no output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The receiver is dropped with the server.
                let _ = sender.send(line);
            }
        });
        Ok(Server { child, exports, lines, log: self.log.clone(), log_start })
    }

    /// Starts a server and waits until it is ready.
    pub fn start(&self) -> Result<Server> {
        let mut server = self.spawn()?;
        server.wait_ready()?;
        Ok(server)
    }
}

/// A server; killed when it is dropped.
pub struct Server {
    child: Child,
    exports: usize,
    lines: Receiver<String>,
    log: PathBuf,
    log_start: u64,
}

impl Server {
    /// Waits until all its exports are ready.
    pub fn wait_ready(&mut self) -> Result<()> {
        while self.exports > 0 {
            match self.lines.recv_timeout(START_LIMIT) {
                Ok(line) if line.starts_with("ready ") => self.exports -= 1,
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => bail!("not ready after {START_LIMIT:?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.wait(STOP_LIMIT)?;
                    bail!("the server ended before it was ready: {status}: {}", self.said());
                }
            }
        }
        Ok(())
    }

    /// What this server wrote to standard error.
    pub fn said(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let own = bytes.get(self.log_start as usize..).unwrap_or_default();
        String::from_utf8_lossy(own).trim_end().to_owned()
    }

    /// Whether the server writes this to standard error within `limit`.
    pub fn says(&self, words: &str, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while !self.said().contains(words) {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        true
    }

    /// Kills it.
    ///
    /// # Errors
    /// The server had ended by itself.
    pub fn kill(mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        self.child.kill()?;
        self.child.wait()?;
        match ended {
            None => Ok(()),
            Some(status) => bail!("the server ended by itself: {status}: {}", self.said()),
        }
    }

    /// Asks it to end in order, without waiting.
    pub fn ask_to_stop(&self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM).context("the server is gone")
    }

    /// Stops it in order.
    ///
    /// # Errors
    /// The server does not end, or fails.
    pub fn stop(mut self) -> Result<()> {
        self.ask_to_stop()?;
        let status = self.wait(STOP_LIMIT)?;
        ensure!(status.success(), "the server ended with {status}: {}", self.said());
        Ok(())
    }

    /// Kills it whether it has ended or not.
    pub fn end(self) {}

    fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(Instant::now() < end, "the server still runs after {limit:?}");
            std::thread::sleep(PAUSE);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether the binary keeps a state file.
pub fn has_state(binary: &Path) -> Result<bool> {
    let help = Command::new(binary).args(["serve", "--help"]).output()?;
    Ok(String::from_utf8_lossy(&help.stdout).contains("--state"))
}
