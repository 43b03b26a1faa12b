//! `blockhouse serve` in the guest.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::client::Client;

/// A server on a Unix socket; killed when it is dropped.
pub struct Server {
    child: Child,
    socket: PathBuf,
    names: Vec<String>,
}

impl Server {
    /// Serves `images`, each under the name of its file, or one under no name.
    pub fn start(images: &[&Path], options: &[&str]) -> Result<Self> {
        let socket = PathBuf::from("/tmp/nbd.sock");
        // Left behind by one that was killed.
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("blockhouse");
        command.arg("serve").args(images).args(options);
        command.arg("--nbd").arg(format!("nbd+unix:///?socket={}", socket.display()));
        let mut child =
            command.stdout(Stdio::piped()).spawn().context("cannot start blockhouse")?;
        let stdout = child.stdout.take().context("the server has no output")?;
        let mut lines = BufReader::new(stdout).lines();
        for _ in images {
            match lines.next() {
                Some(Ok(line)) if line.starts_with("ready ") => {}
                other => bail!("the server did not get ready: {other:?}"),
            }
        }
        let name = |path: &&Path| match images {
            [_] => String::new(),
            _ => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        };
        let names = images.iter().map(name).collect();
        Ok(Self { child, socket, names })
    }

    /// A connection to the image that was given at `index`.
    pub fn connect(&self, index: usize) -> Result<Client> {
        Client::connect(&self.socket, &self.names[index])
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Kills it at once, as a crash would.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Stops it in order; it must end well.
    pub fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when it has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
