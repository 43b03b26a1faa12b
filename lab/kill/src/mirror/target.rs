//! The target of a mirror: a file, or an export of another server, ours or QEMU's.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::folders::{Folders, Setting};
use crate::server::{Serve, Server};
use crate::template::quiet;

/// The longest time until QEMU's server listens.
const START_LIMIT: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(2);

/// A kind of target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file that the mirror makes.
    File { format: &'static str },
    /// An export of a server of ours.
    Ours { format: &'static str },
    /// An export of qemu-nbd: a raw file.
    QemuNbd,
}

/// All kinds of target.
pub const KINDS: [Kind; 5] = [
    Kind::File { format: "raw" },
    Kind::File { format: "qcow2" },
    Kind::Ours { format: "raw" },
    Kind::Ours { format: "qcow2" },
    Kind::QemuNbd,
];

impl Kind {
    /// The format of the target image.
    pub fn format(self) -> &'static str {
        match self {
            Self::File { format } | Self::Ours { format } => format,
            Self::QemuNbd => "raw",
        }
    }

    /// The name in reports.
    pub fn name(self) -> String {
        match self {
            Self::File { format } => format!("a {format} file"),
            Self::Ours { format } => format!("our NBD server, {format}"),
            Self::QemuNbd => "qemu-nbd".into(),
        }
    }
}

/// A target of one mirror.
pub struct Target {
    pub kind: Kind,
    /// The image.
    pub path: PathBuf,
    socket: PathBuf,
    serve: Option<Serve>,
    running: Running,
}

/// The server of a target.
enum Running {
    Nothing,
    Ours(Server),
    QemuNbd(QemuNbd),
}

impl Target {
    /// A new target with this name, of `size` bytes. If it is an export, its server runs.
    pub fn new(
        setting: &Setting,
        folders: &Folders,
        kind: Kind,
        name: &str,
        size: u64,
    ) -> Result<Self> {
        let path = folders.images().join(name);
        let socket = folders.in_memory("target");
        let mut serve = None;
        if !matches!(kind, Kind::File { .. }) {
            let size = size.to_string();
            quiet(
                folders.images(),
                "qemu-img",
                &["create", "-q", "-f", kind.format(), name, &size],
            )?;
        }
        if let Kind::Ours { format } = kind {
            let mut options = folders.state_options(setting);
            options.extend(["--format".into(), format.into()]);
            serve = Some(Serve {
                nbd: Some(socket.clone()),
                log: folders.in_memory("target-log"),
                ..Serve::over_nbd(setting, folders, path.clone(), options)
            });
        }
        let mut target = Self { kind, path, socket, serve, running: Running::Nothing };
        target.start()?;
        Ok(target)
    }

    /// The location, for a mirror or for a server of the disk.
    pub fn location(&self) -> String {
        match self.kind {
            Kind::File { .. } => self.path.display().to_string(),
            Kind::Ours { .. } | Kind::QemuNbd => {
                format!("nbd+unix:///?socket={}", self.socket.display())
            }
        }
    }

    /// Starts its server, if it has one.
    pub fn start(&mut self) -> Result<()> {
        self.running = match (self.kind, &self.serve) {
            (Kind::QemuNbd, _) => Running::QemuNbd(QemuNbd::start(&self.path, &self.socket)?),
            (_, Some(serve)) => Running::Ours(serve.start()?),
            (_, None) => Running::Nothing,
        };
        Ok(())
    }

    /// Ends its server: in order, so that its requests are complete, or by a kill.
    pub fn stop(&mut self, in_order: bool) -> Result<()> {
        match std::mem::replace(&mut self.running, Running::Nothing) {
            Running::Nothing => Ok(()),
            Running::Ours(server) if in_order => server.stop(),
            Running::Ours(server) => server.kill(),
            Running::QemuNbd(server) => server.stop(in_order),
        }
    }
}

/// QEMU's server; killed when it is dropped.
struct QemuNbd(Child);

impl QemuNbd {
    fn start(image: &Path, socket: &Path) -> Result<Self> {
        // A server that was killed leaves its socket.
        let _ = std::fs::remove_file(socket);
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--format=raw", "--shared=4", "--socket"]);
        command.arg(socket).arg(image).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(Stdio::null()).spawn().context("cannot start qemu-nbd")?;
        let mut server = Self(child);
        let end = Instant::now() + START_LIMIT;
        while UnixStream::connect(socket).is_err() {
            ensure!(server.0.try_wait()?.is_none(), "qemu-nbd ended at once");
            ensure!(Instant::now() < end, "qemu-nbd does not listen after {START_LIMIT:?}");
            std::thread::sleep(PAUSE);
        }
        Ok(server)
    }

    fn stop(mut self, in_order: bool) -> Result<()> {
        if in_order {
            let pid = rustix::process::Pid::from_child(&self.0);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
            self.0.wait()?;
        }
        Ok(())
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
