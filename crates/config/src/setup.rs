//! A plain description of a server, its disks and its exports.
//!
//! It opens nothing and binds nothing.

use std::fmt;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use blockhouse_engine::DeviceCommands;
use blockhouse_nbd::uri::Address;
use serde_json::{Map, Value};

use crate::control_socket::ControlSocket;
use crate::disk::DiskConfig;
use crate::offers::{Offer, Offers};
use crate::server::{LoopOptions, ServerConfig, TlsSetup};
use crate::user_options::UserIds;

/// The setup of a server.
#[derive(Debug, Default)]
pub struct Setup {
    /// The server.
    pub server: ServerConfig,
    /// The disks.
    pub disks: Vec<DiskConfig>,
    /// The export names of all disks, for the default socket and for passed sockets without exports
    /// of their own. `None`: sockets offer only what `nbd` names.
    pub offers: Option<Offers>,
    /// The addresses where NBD clients are served, and what each offers.
    pub nbd: Vec<(Address, Vec<Offer>)>,
    /// The most NBD clients of a socket at once; others wait until one disconnects.
    pub max_connections: Option<NonZeroUsize>,
    /// The sockets of vhost-user-blk devices, each with the index of its disk in `disks`.
    pub devices: Vec<(PathBuf, usize)>,
    /// The block devices of this host.
    pub ublk: Vec<UblkSetup>,
    /// TLS for NBD clients.
    pub tls: Option<TlsSetup>,
    /// The user that the process becomes, once everything is open; `None`: the user stays the same.
    pub user: Option<UserIds>,
    /// Whether the server ends with the last NBD client, as qemu-nbd does.
    pub ends_with_clients: bool,
    /// Whether SIGHUP stops the server, as it stops QEMU's in the foreground: with the terminal. If
    /// not, it reloads.
    pub ends_at_hangup: bool,
    /// The first commands of a storage daemon, if the process is one.
    pub storage_daemon: Option<StorageDaemon>,
    /// The programs that an upgrade may start in place of the running one. The first is the
    /// default.
    pub upgrade_to: Vec<PathBuf>,
    /// The configuration file that this setup was read from. A reload reads it again.
    pub config: Option<PathBuf>,
    /// Whether this process takes over the disks and exports of the process that started it
    /// (hand-over).
    pub hand_over: bool,
}

impl Setup {
    /// The options of the workers' event loops.
    pub fn loops(&self) -> LoopOptions {
        self.server.loops(match self.ublk[..] {
            [] => DeviceCommands::Refused,
            _ => DeviceCommands::Allowed,
        })
    }

    /// Whether disks can be opened and changed while the server runs, by a control socket or the
    /// configuration.
    pub fn takes_changes(&self) -> bool {
        self.is_controlled() || self.config.is_some()
    }

    /// Whether the control socket or a QMP socket accepts changes.
    pub fn is_controlled(&self) -> bool {
        let mut sockets = self.server.control.iter().chain(&self.server.qmp);
        sockets.any(|socket| socket.answers.has_changes()) || self.storage_daemon.is_some()
    }

    /// The sockets of QMP.
    pub fn qmp_sockets(&self) -> impl Iterator<Item = &ControlSocket> {
        let of_daemon = self.storage_daemon.iter().flat_map(|daemon| &daemon.sockets);
        self.server.qmp.iter().chain(of_daemon)
    }

    /// Whether the server accepts QMP commands.
    pub fn has_qmp(&self) -> bool {
        self.server.qmp.is_some() || self.storage_daemon.is_some()
    }
}

/// The QMP commands that a storage daemon executes first, and the sockets for more of them.
#[derive(Debug, Default)]
pub struct StorageDaemon {
    /// The commands, in their order. The first one that fails ends the server.
    pub commands: Vec<FirstCommand>,
    /// Sockets where the server listens for QMP clients.
    pub sockets: Vec<ControlSocket>,
    /// Connections to QMP clients that are open from the start: sockets, or standard I/O.
    pub connections: Vec<OwnedFd>,
    /// The id of the QMP object with the certificates or keys of the server's TLS.
    pub tls_object: Option<String>,
}

/// A QMP command that is executed before the server is ready.
#[derive(Clone, Debug)]
pub struct FirstCommand {
    /// The option of the command line that gives the command.
    pub said: String,
    /// The name.
    pub name: &'static str,
    /// The arguments.
    pub arguments: Map<String, Value>,
    /// Whether the arguments were given as `key=value`: then booleans and numbers are strings.
    pub are_words: bool,
}

/// A block device of this host to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkSetup {
    /// The number, N of `/dev/ublkbN`; `None` for the lowest free one.
    pub id: Option<u32>,
    /// The index of its disk in [`Setup::disks`].
    pub disk: usize,
}

/// A usage error. The setup contradicts itself, or does not fit the sockets that the service
/// manager passed.
#[derive(Debug)]
pub struct WrongUsage(pub String);

impl fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}
