//! `blockhouse qemu-storage-daemon`, and the program under that name. QEMU's command line is
//! translated into QMP commands, which a server without disks executes in order before it is ready.
//! So a QMP client could do the same, except for what must exist before the commands: sockets,
//! threads and TLS.
//!
//! - `arguments`: the options, and the commands for them; `keyval`: the syntax of their arguments;
//!   `chardev`: how QMP clients connect

mod arguments;
mod chardev;
mod keyval;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use blockhouse_config::control_socket::{Answers, ControlSocket};
use blockhouse_config::server::{ServerConfig, TlsSetup};
use blockhouse_config::setup::{Setup, StorageDaemon};
use blockhouse_daemon::passed_sockets;
use blockhouse_engine::take_inherited_socket;
use blockhouse_nbd::{SocketPermissions, TlsFiles, TlsMode};
use blockhouse_qmp::Qmp;
use rustix::io::Errno;

pub use self::arguments::Arguments;
use self::arguments::{Plan, TlsKind};
use self::chardev::{Kind, Stdio};
use crate::background::{self, Started};
use crate::{called_as, output};

/// Threads of a server, at most.
const MAX_THREADS: usize = 256;

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.version {
        output::print(&called_as::Tool::StorageDaemon.version())?;
        return Ok(ExitCode::SUCCESS);
    }
    let plan = arguments.plan().map_err(|why| anyhow!("{why}"))?;
    let has_stdio = plan.monitors.iter().any(|device| device.kind == Kind::Stdio);
    if has_stdio && (arguments.daemonize || arguments.in_background) {
        bail!(
            "--daemonize: a process in the background has no standard input and output (--chardev stdio)"
        );
    }
    if arguments.daemonize {
        return daemonize();
    }
    let (setup, stdio) = setup(plan, arguments)?;
    let outcome = blockhouse_daemon::run(&setup, &Qmp, |service| {
        service.notify_ready();
        if arguments.in_background {
            // The empty line ends the list of ready lines.
            let _ = output::write("ready\n");
        }
    });
    // The drop closes the copy of the socket in the setup.
    drop(setup);
    stdio.into_iter().for_each(Stdio::finish);
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Starts a background process with this command line.
fn daemonize() -> Result<ExitCode> {
    let words = called_as::words().into_iter().skip(1);
    let is_it = |word: &OsString| {
        // The option may be abbreviated down to its first letter.
        word.to_str().is_some_and(|word| word.len() > 2 && "--daemonize".starts_with(word))
    };
    let words = words.map(|word| if is_it(&word) { background::OPTION.into() } else { word });
    match background::start(words.collect())? {
        Started::Listens(_) => Ok(ExitCode::SUCCESS),
        // The process has printed the reason.
        Started::Ended(code) => Ok(code),
    }
}

/// The setup of the daemon.
fn setup(plan: Plan, arguments: &Arguments) -> Result<(Setup, Option<Stdio>)> {
    let Plan { commands, monitors, tls, passed, threads } = plan;
    let mut daemon = StorageDaemon { commands, ..Default::default() };
    let mut stdio = None;
    for (said, number) in passed {
        passed_sockets::take(number).map_err(|error| not_passed(&said, number, &error))?;
    }
    for device in monitors {
        let said = format!("--chardev {}", device.id);
        let mut listen = |path, permissions| {
            daemon.sockets.push(ControlSocket { path, permissions, answers: Answers::All });
        };
        match device.kind {
            Kind::Listening(path) => listen(path, SocketPermissions::PRIVATE),
            Kind::PassedListening(number) => {
                let path = passed_sockets::take(number);
                let path = path.map_err(|error| not_passed(&said, number, &error))?;
                listen(path, SocketPermissions::default());
            }
            Kind::PassedConnection(number) => {
                let connection = take_inherited_socket(number);
                let connection = connection.map_err(|error| not_passed(&said, number, &error))?;
                daemon.connections.push(connection);
            }
            Kind::Connecting(path) => {
                let cannot = || format!("{said}: Failed to connect to '{}'", path.display());
                let stream = UnixStream::connect(&path).with_context(cannot)?;
                daemon.connections.push(OwnedFd::from(stream));
            }
            Kind::Stdio if stdio.is_some() => bail!("--chardev stdio: there is one standard input"),
            Kind::Stdio => {
                let (socket, copying) = Stdio::start().context("--chardev stdio")?;
                daemon.connections.push(socket);
                stdio = Some(copying);
            }
        }
    }
    daemon.tls_object = tls.as_ref().map(|(id, ..)| id.clone());
    let tls = tls.map(|(_, kind, folder)| TlsSetup {
        mode: TlsMode::Optional,
        files: match kind {
            TlsKind::X509 => TlsFiles::Certificates(folder),
            TlsKind::Psk => TlsFiles::Psk(folder.join("keys.psk")),
        },
        allowed: Vec::new(),
        only: Vec::new(),
    });
    let server = ServerConfig {
        workers: threads.clamp(1, MAX_THREADS) as u16,
        pid_file: arguments.pidfile.clone(),
        // QMP clients may name any file, and so may images.
        sandbox: false,
        ..ServerConfig::default()
    };
    let ends_at_hangup = !arguments.daemonize;
    let storage_daemon = Some(daemon);
    let setup = Setup { server, tls, ends_at_hangup, storage_daemon, ..Setup::default() };
    Ok((setup, stdio))
}

/// The error for a descriptor that cannot be used, in QEMU's words.
fn not_passed(said: &str, number: i32, error: &io::Error) -> anyhow::Error {
    match Errno::from_io_error(error) {
        Some(Errno::NOTSOCK) => anyhow!("{said}: File descriptor '{number}' is not a socket"),
        _ => anyhow!("{said}: Failed to listen on fd socket: {error}"),
    }
}
