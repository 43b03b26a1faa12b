//! The servers that are compared: how each is started on an image, measured and ended.
//!
//! A server runs for one measurement, or for all measurements of a row. It listens on a Unix socket
//! in a private folder. It runs in a process group of its own, so that Ctrl-C reaches only us.
//! Dropping it kills it by its pid.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use rustix::process::{Signal, kill_process};

use super::caching::Caching;
use super::interrupt::Interrupt;
use super::light::Content;
use super::rows::{Client, Export};
use super::storage::Storage;
use lab_tools::process::{line, stdout_of};

/// The name of the export, of every server.
pub const EXPORT: &str = "disk";
const START_PATIENCE: Duration = Duration::from_secs(10);
const STOP_PATIENCE: Duration = Duration::from_secs(10);
const LISTEN_PAUSE: Duration = Duration::from_micros(200);
const RETRY_DELAY: Duration = Duration::from_millis(2);

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The disk's bytes and nothing else
    Raw,
    /// A mapping, with clusters of 64 KiB
    Qcow2,
}

impl Format {
    /// The name on our command lines and on QEMU's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// The image that a server serves.
#[derive(Clone, Copy)]
pub struct Image<'a> {
    /// Where it is.
    pub storage: &'a Storage,
    /// The format.
    pub format: Format,
}

/// A server, in one way of running it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Ours, past the host's page cache
    Blockhouse,
    /// Ours, through the host's page cache
    BlockhouseWriteback,
    /// Another build of ours (--baseline), past the host's page cache
    Baseline,
    /// qemu-storage-daemon with Linux AIO, past the page cache
    QsdNative,
    /// qemu-storage-daemon with io_uring, past the page cache
    #[value(name = "qsd-io_uring")]
    QsdIoUring,
    /// qemu-storage-daemon with its worker threads, through the page cache
    QsdCached,
    /// nbdkit's file plugin as it is: through the page cache
    Nbdkit,
    /// nbdkit's file plugin with cache=none: still through the page cache, with its read-ahead and
    /// write-back, and drops the pages that it has used
    NbdkitNocache,
    /// nbdkit's null plugin, without storage: the maximum rate of fio
    NbdkitNull,
    /// A server of ours that only answers: the maximum rate of the light client
    NullServer,
    /// A plain server in C, past the page cache: the limit of one thread and blocking calls
    PlainC,
    /// The plain server in C, through the page cache
    PlainCCached,
}

impl Kind {
    /// The servers of a comparison of raw images, in the order of reports.
    pub const ALL: &[Self] = &[
        Self::Blockhouse,
        Self::BlockhouseWriteback,
        Self::QsdNative,
        Self::QsdIoUring,
        Self::Nbdkit,
        Self::NbdkitNocache,
        Self::NbdkitNull,
        Self::NullServer,
    ];

    /// The servers of a comparison of qcow2 images, in the order of reports.
    pub const QCOW2: &[Self] = &[
        Self::Blockhouse,
        Self::QsdNative,
        Self::QsdIoUring,
        Self::BlockhouseWriteback,
        Self::QsdCached,
    ];

    /// The name in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blockhouse => "blockhouse",
            Self::BlockhouseWriteback => "blockhouse-writeback",
            Self::Baseline => "baseline",
            Self::QsdNative => "qsd-native",
            Self::QsdIoUring => "qsd-io_uring",
            Self::QsdCached => "qsd-cached",
            Self::Nbdkit => "nbdkit",
            Self::NbdkitNocache => "nbdkit-nocache",
            Self::NbdkitNull => "nbdkit-null",
            Self::NullServer => "null-server",
            Self::PlainC => "plain-c",
            Self::PlainCCached => "plain-c-cached",
        }
    }

    /// Whether it is the build of ours that is compared with the other servers.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Blockhouse | Self::BlockhouseWriteback)
    }

    /// How it treats the page cache.
    pub fn caching(self) -> Caching {
        match self {
            Self::Blockhouse
            | Self::Baseline
            | Self::QsdNative
            | Self::QsdIoUring
            | Self::PlainC => Caching::Direct,
            Self::BlockhouseWriteback
            | Self::QsdCached
            | Self::Nbdkit
            | Self::NbdkitNocache
            | Self::PlainCCached => Caching::Cached,
            Self::NbdkitNull | Self::NullServer => Caching::Null,
        }
    }

    /// Whether it supports enough of the protocol for this client.
    pub fn takes(self, client: Client) -> bool {
        match self {
            Self::Blockhouse | Self::BlockhouseWriteback | Self::Baseline => true,
            Self::QsdNative | Self::QsdIoUring | Self::QsdCached => true,
            Self::Nbdkit | Self::NbdkitNocache | Self::NbdkitNull => client != Client::VhostUser,
            Self::PlainC | Self::PlainCCached => client != Client::VhostUser,
            Self::NullServer => client == Client::Light,
        }
    }

    /// The content of its reads.
    pub fn content(self) -> Content {
        if self.caching() == Caching::Null { Content::Nothing } else { Content::Image }
    }

    /// The version, in its own words.
    pub fn version(self, programs: &Programs) -> Result<String> {
        if matches!(self, Self::PlainC | Self::PlainCCached) {
            return Ok("lab/compare/src/plain_server.c".to_owned());
        }
        let mut command = Command::new(self.program(programs));
        command.arg("--version");
        let output = stdout_of(command)?;
        Ok(output.lines().next().unwrap_or_default().to_owned())
    }

    /// The executable.
    pub fn program(self, programs: &Programs) -> &Path {
        match self {
            Self::Blockhouse | Self::BlockhouseWriteback => &programs.blockhouse,
            Self::Baseline => &programs.baseline,
            Self::QsdNative | Self::QsdIoUring | Self::QsdCached => {
                Path::new("qemu-storage-daemon")
            }
            Self::Nbdkit | Self::NbdkitNocache | Self::NbdkitNull => Path::new("nbdkit"),
            Self::NullServer => &programs.own,
            Self::PlainC | Self::PlainCCached => &programs.plain_server,
        }
    }

    fn command(
        self,
        start: Start,
        programs: &Programs,
        image: Image<'_>,
        socket: &Path,
    ) -> Command {
        let mut command = Command::new(self.program(programs));
        let Image { storage, format } = image;
        let image = storage.path();
        match self {
            Self::Blockhouse | Self::BlockhouseWriteback | Self::Baseline => {
                let direct = self.caching() == Caching::Direct;
                let cache = if direct { "none" } else { "writeback" };
                command.arg("serve").arg(image).args(["--format", format.name(), "--cache", cache]);
                match start.export {
                    Export::Nbd => {
                        command.arg("--nbd").arg(uri(socket));
                    }
                    Export::VhostUser => {
                        let queues = start.queues.to_string();
                        command.arg("--vhost-user-blk").arg(socket);
                        command.args(["--queues", &queues, "--workers", &queues]);
                    }
                }
                let is_baseline = self == Self::Baseline;
                let args = if is_baseline { &programs.baseline_args } else { &programs.serve_args };
                command.args(args);
            }
            Self::QsdNative | Self::QsdIoUring | Self::QsdCached => {
                let aio = match self {
                    Self::QsdNative => "aio=native,cache.direct=on",
                    Self::QsdIoUring => "aio=io_uring,cache.direct=on",
                    _ => "aio=threads,cache.direct=off",
                };
                let driver = if storage.is_device() { "host_device" } else { "file" };
                let image = image.display();
                command
                    .arg("--blockdev")
                    .arg(format!("driver={driver},node-name=file,filename={image},{aio}"));
                // QEMU's raw driver would only add cost.
                let node = match format {
                    Format::Raw => "file",
                    Format::Qcow2 => "image",
                };
                if format == Format::Qcow2 {
                    command.args(["--blockdev", "driver=qcow2,node-name=image,file=file"]);
                }
                command.args(&programs.peer_args);
                let socket = socket.display();
                let address = format!("addr.type=unix,addr.path={socket}");
                let common = format!("id=export,node-name={node},writable=on");
                match start.export {
                    Export::Nbd => {
                        command.args(["--nbd-server", &address]);
                        command.args(["--export", &format!("type=nbd,{common},name={EXPORT}")]);
                    }
                    Export::VhostUser => {
                        let queues = start.queues;
                        let device = format!("{common},{address},num-queues={queues}");
                        command.args(["--export", &format!("type=vhost-user-blk,{device}")]);
                    }
                }
            }
            Self::Nbdkit | Self::NbdkitNocache => {
                command.args(["--foreground", "--unix"]).arg(socket).arg("file");
                command.arg(key_value("file", image));
                command.args((self == Self::NbdkitNocache).then_some("cache=none"));
            }
            Self::NbdkitNull => {
                command.args(["--foreground", "--unix"]).arg(socket).arg("null");
                command.arg(storage.size().to_string());
            }
            Self::NullServer => {
                command.arg("null-server").arg(socket).arg(storage.size().to_string());
            }
            Self::PlainC => _ = command.arg(socket).arg(image).arg("direct"),
            Self::PlainCCached => _ = command.arg(socket).arg(image).arg("cached"),
        }
        command
    }
}

/// The URI of [`EXPORT`] at a socket.
pub fn uri(socket: &Path) -> String {
    format!("nbd+unix:///{EXPORT}?socket={}", socket.display())
}

fn key_value(key: &str, value: &Path) -> OsString {
    let mut pair = OsString::from(key);
    pair.push("=");
    pair.push(value);
    pair
}

/// The programs that are started, besides the peers that are found in PATH.
pub struct Programs {
    /// Our binary.
    pub blockhouse: PathBuf,
    /// Another build of it; empty if none is compared.
    pub baseline: PathBuf,
    /// Further arguments of our binary's `serve`.
    pub serve_args: Vec<String>,
    /// Further arguments of qemu-storage-daemon.
    pub peer_args: Vec<String>,
    /// The arguments of the other build's `serve`.
    pub baseline_args: Vec<String>,
    /// This program.
    pub own: PathBuf,
    /// The plain server; empty if it is not compared.
    pub plain_server: PathBuf,
}

/// The parameters of a start.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// The server.
    pub kind: Kind,
    /// The export that clients use.
    pub export: Export,
    /// Queues of a device.
    pub queues: u16,
}

/// A running server.
pub struct Server {
    child: Child,
    clock: ClockId,
    socket: PathBuf,
    what: String,
    ready: Duration,
}

impl Server {
    /// Starts a server on `image` and waits until it listens. Its socket and its log are in
    /// `folder`.
    pub fn start(
        start: Start,
        programs: &Programs,
        image: Image<'_>,
        folder: &Path,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let name = start.kind.name();
        let socket = socket_in(folder, name)?;
        let command = start.kind.command(start, programs, image, &socket);
        Self::spawn(command, socket, folder.join(format!("{name}.log")), interrupt)
    }

    /// Starts this command and waits until it listens at `socket`.
    pub fn spawn(
        mut command: Command,
        socket: PathBuf,
        log: PathBuf,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let what = line(&command);
        let output = File::create(&log).context("cannot create the server's log")?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let started = Instant::now();
        let child = command.spawn().with_context(|| format!("cannot start {what}"))?;
        let clock = clock_getcpuclockid(Pid::from_raw(child.id().cast_signed()))
            .context("cannot find the server's clock")?;
        let mut server = Self { child, clock, socket, what, ready: Duration::ZERO };
        let socket = server.socket.clone();
        server.wait_until_it_listens(&socket, interrupt).map_err(|error| {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            anyhow!("{}: {error:#}; it said: {}", server.what, said.trim())
        })?;
        server.ready = started.elapsed();
        Ok(server)
    }

    /// How long it took from its start until it listened, within [`LISTEN_PAUSE`].
    pub fn ready(&self) -> Duration {
        self.ready
    }

    /// Waits until it listens at `socket`, which may be another socket than that of the export.
    pub fn wait_until_it_listens(&mut self, socket: &Path, interrupt: &Interrupt) -> Result<()> {
        let started = Instant::now();
        // The connection that succeeds is closed at once, which servers must tolerate.
        while UnixStream::connect(socket).is_err() {
            interrupt.check()?;
            if let Some(status) = self.child.try_wait()? {
                bail!("ended at once with {status}");
            }
            if started.elapsed() > START_PATIENCE {
                let (socket, seconds) = (socket.display(), START_PATIENCE.as_secs());
                bail!("does not listen at {socket} after {seconds} s");
            }
            std::thread::sleep(LISTEN_PAUSE);
        }
        Ok(())
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The processor time of all its threads so far, those that have ended included.
    pub fn cpu(&self) -> Result<Duration> {
        let time = clock_gettime(self.clock).with_context(|| format!("{} has died", self.what))?;
        Ok(time.into())
    }

    /// Ends the server by SIGTERM, as its users would.
    ///
    /// # Errors
    /// The server had ended before, or does not end within `STOP_PATIENCE`.
    pub fn stop(mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended in the middle with {status}", self.what);
        }
        kill_process(pid(&self.child)?, Signal::TERM).context("cannot signal the server")?;
        let asked = Instant::now();
        while self.child.try_wait()?.is_none() {
            if asked.elapsed() > STOP_PATIENCE {
                bail!("{} runs on {} s after SIGTERM", self.what, STOP_PATIENCE.as_secs());
            }
            std::thread::sleep(RETRY_DELAY);
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pid(child: &Child) -> Result<rustix::process::Pid> {
    rustix::process::Pid::from_raw(child.id().cast_signed()).context("a child without a pid")
}

/// The socket in `folder` of the server `name`.
pub fn socket_in(folder: &Path, name: &str) -> Result<PathBuf> {
    let socket = folder.join(format!("{name}.sock"));
    remove_leftover(&socket)?;
    Ok(socket)
}

fn remove_leftover(socket: &Path) -> Result<()> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", socket.display()))
        }
        _ => Ok(()),
    }
}
