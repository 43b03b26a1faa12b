//! `blockhouse serve` on a Unix socket, on the host or in a guest: started, killed, upgraded, or
//! stopped in order.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blockhouse_engine::wait_readable;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// A server that listens; killed when it is dropped.
pub struct Server {
    process: Process,
    socket: PathBuf,
}

/// A process that serves.
enum Process {
    /// A child of this process.
    Child(Child),
    /// A server that another server started in an upgrade; its pidfd (`pidfd_open(2)`).
    Other(OwnedFd),
}

/// The longest time until a server ends after it was asked to.
const END_LIMIT: Duration = Duration::from_secs(60);

/// How a server exports its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// To NBD clients, with an empty export name.
    Nbd,
    /// As a vhost-user-blk device, whose queues the server reads itself.
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
    /// Starts `serve`, a command line that lacks only the option of the export, and waits until the
    /// server says that it is ready at `socket`.
    pub fn start(mut serve: Command, export: Export, socket: &Path) -> Result<Self> {
        // A server that was killed leaves its socket.
        let _ = std::fs::remove_file(socket);
        serve.args(export.words(socket));
        Self::spawn(serve, socket)
    }

    /// As [`start`](Self::start), as the first block device of the kernel's ublk driver.
    pub fn start_ublk(mut serve: Command, device: &Path) -> Result<Self> {
        serve.args(["--ublk", "0"]);
        Self::spawn(serve, device)
    }

    fn spawn(mut serve: Command, socket: &Path) -> Result<Self> {
        serve.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = serve.spawn().context("cannot start blockhouse")?;
        let stdout = child.stdout.take().context("the server has no output")?;
        let server = Self { process: Process::Child(child), socket: socket.to_owned() };
        match BufReader::new(stdout).lines().next() {
            Some(Ok(line)) if line.starts_with("ready ") => Ok(server),
            other => bail!("the server did not get ready: {other:?}"),
        }
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The processor time of its threads so far, in nanoseconds.
    pub fn processor_time(&self) -> Result<u64> {
        let Process::Child(child) = &self.process else { bail!("the server was upgraded") };
        let tasks = format!("/proc/{}/task", child.id());
        let mut time = 0;
        for task in std::fs::read_dir(tasks).context("the server is gone")? {
            // Documentation/scheduler/sched-stats.rst: the first number.
            let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
            let first = text.split_whitespace().next().context("the kernel counts no time")?;
            time += first.parse::<u64>()?;
        }
        Ok(time)
    }

    /// Tells the server that the length of its image may have changed.
    pub fn look_at_length(&self) -> Result<()> {
        self.signal(Signal::HUP)
    }

    /// Upgrades the server to another process with `blockhouse upgrade` of `program`. Returns for
    /// how long requests waited, in milliseconds.
    pub fn upgrade(&mut self, program: &Path) -> Result<f64> {
        let mut upgrade = Command::new(program);
        upgrade.arg("upgrade").arg("--control").arg(control(&self.socket));
        let told = lab_tools::process::stdout_of(upgrade)?;
        // "process 123 serves now; requests waited for 4.5 ms"
        let mut words = told.split_whitespace();
        let process = words.by_ref().find_map(|word| word.parse().ok());
        let gap = words.rev().find_map(|word| word.parse().ok());
        let process = process.and_then(Pid::from_raw).context("upgrade tells of no process")?;
        let gap = gap.context("upgrade tells no gap")?;
        let next = pidfd_open(process, PidfdFlags::empty()).context("the new server is gone")?;
        self.wait()?;
        self.process = Process::Other(next);
        Ok(gap)
    }

    /// Kills the server with SIGKILL, like a crash.
    pub fn kill(mut self) -> Result<()> {
        self.signal(Signal::KILL)?;
        match &mut self.process {
            Process::Child(child) => child.wait().map(drop)?,
            Process::Other(process) => wait_for_end(process)?,
        }
        Ok(())
    }

    /// Stops the server in order; it must exit with status 0.
    pub fn stop(mut self) -> Result<()> {
        self.signal(Signal::TERM)?;
        self.wait()
    }

    /// Waits for its end. The exit status, which is known only of a child, must be 0.
    fn wait(&mut self) -> Result<()> {
        match &mut self.process {
            Process::Child(child) => {
                let status = child.wait()?;
                ensure!(status.success(), "the server ended with {status}");
                Ok(())
            }
            Process::Other(process) => wait_for_end(process),
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let sent = match &self.process {
            Process::Child(child) => kill_process(Pid::from_child(child), signal),
            Process::Other(process) => pidfd_send_signal(process, signal),
        };
        sent.context("the server is gone")
    }
}

/// Waits until a process that is not a child has ended.
fn wait_for_end(process: &OwnedFd) -> Result<()> {
    let has_ended = wait_readable(process, Instant::now() + END_LIMIT)?;
    ensure!(has_ended, "the server has not ended in {END_LIMIT:?}");
    Ok(())
}

/// The path of the control socket, for upgrades, of a server that listens at `socket` or serves
/// that device.
pub fn control(socket: &Path) -> PathBuf {
    let is_device = socket.starts_with("/dev");
    let folder = if is_device { Some(Path::new("/tmp")) } else { socket.parent() };
    let mut name = socket.file_name().unwrap_or_default().to_owned();
    name.push(".control");
    folder.unwrap_or(Path::new("")).join(name)
}

impl Drop for Server {
    fn drop(&mut self) {
        // All of these fail only if the process has ended already.
        let _ = self.signal(Signal::KILL);
        if let Process::Child(child) = &mut self.process {
            let _ = child.wait();
        }
    }
}
