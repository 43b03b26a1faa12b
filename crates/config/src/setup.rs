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
    /// The disks' names where sockets offer all of them; `None`: they offer what `nbd` says.
    pub offers: Option<Offers>,
    /// The addresses where NBD clients are served, and what each offers.
    pub nbd: Vec<(Address, Vec<Offer>)>,
    /// How many NBD clients a socket has at once, at most; others wait until one leaves.
    pub max_connections: Option<NonZeroUsize>,
    /// The sockets of vhost-user-blk devices, and the place of the disk that each has.
    pub devices: Vec<(PathBuf, usize)>,
    /// The block devices of this host.
    pub ublk: Vec<UblkSetup>,
    /// TLS for NBD clients.
    pub tls: Option<TlsSetup>,
    /// The user that the process becomes, once everything is open; `None`: it stays who it is.
    pub user: Option<UserIds>,
    /// Whether the server ends with the last NBD client, as qemu-nbd does.
    pub ends_with_clients: bool,
    /// The first commands of a storage daemon, where the process is one.
    pub storage_daemon: Option<StorageDaemon>,
    /// The programs that upgrades may start beside the one that runs: the first one is the usual
    /// one.
    pub upgrade_to: Vec<PathBuf>,
    /// The configuration that it was made from, to be read again.
    pub config: Option<PathBuf>,
    /// Whether to go on with what the process serves that has started this one, instead of
    /// starting anew.
    pub hand_over: bool,
}

impl Setup {
    /// How the loops of its workers are made.
    pub fn loops(&self) -> LoopOptions {
        self.server.loops(match self.ublk[..] {
            [] => DeviceCommands::Refused,
            _ => DeviceCommands::Allowed,
        })
    }

    /// Whether users may have disks opened and changed while it serves: at a control socket or by
    /// the configuration.
    pub fn takes_changes(&self) -> bool {
        self.is_controlled() || self.config.is_some()
    }

    /// Whether the control socket, or that of QMP, answers methods that change something.
    pub fn is_controlled(&self) -> bool {
        let mut sockets = self.server.control.iter().chain(&self.server.qmp);
        sockets.any(|socket| socket.answers.has_changes()) || self.storage_daemon.is_some()
    }

    /// The sockets of QMP.
    pub fn qmp_sockets(&self) -> impl Iterator<Item = &ControlSocket> {
        let of_daemon = self.storage_daemon.iter().flat_map(|daemon| &daemon.sockets);
        self.server.qmp.iter().chain(of_daemon)
    }

    /// Whether commands of QMP are carried out.
    pub fn has_qmp(&self) -> bool {
        self.server.qmp.is_some() || self.storage_daemon.is_some()
    }
}

/// The first commands of QMP of a storage daemon, and the sockets that give more of them.
#[derive(Debug, Default)]
pub struct StorageDaemon {
    /// The commands, in their order. The first one that fails ends the server.
    pub commands: Vec<FirstCommand>,
    /// Listening sockets of clients.
    pub sockets: Vec<ControlSocket>,
    /// Clients.
    pub connections: Vec<OwnedFd>,
    /// The object of the commands that has the certificates or keys of the server's TLS.
    pub tls_object: Option<String>,
}

/// A command of QMP that is carried out before the server is ready.
#[derive(Clone, Debug)]
pub struct FirstCommand {
    /// The words of the command line that ask for it.
    pub said: String,
    /// Its name.
    pub name: &'static str,
    /// Its arguments.
    pub arguments: Map<String, Value>,
    /// Whether these are words: switches and numbers as text.
    pub are_words: bool,
}

/// A block device of this host to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkSetup {
    /// Its number, N of `/dev/ublkbN`; `None` for the lowest free one.
    pub id: Option<u32>,
    /// The place of its disk.
    pub disk: usize,
}

/// Wrong usage: the setup contradicts itself, or the sockets that the service manager passed.
#[derive(Debug)]
pub struct WrongUsage(pub String);

impl fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}
