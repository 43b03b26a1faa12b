//! A plain description of what is to run.
//!
//! It opens nothing and binds nothing: [`run()`](crate::run()) does.

pub mod disk_options;
pub mod offers;
pub mod tls_options;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use blockhouse_disk::{
    Access, BackingUse, BlockSizes, CacheMode, DetectZeroes, Discard, FilePart, ImageFormat,
    KeyFiles, OnFull, RemoteBacking, SideFile,
};
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{Limits, SocketPermissions, TlsFiles, TlsMode};
use blockhouse_vhost_user::RegisteredMemory;
use serde_json::{Map, Value};

use crate::metrics::MetricsAddress;
use crate::options::control_socket::ControlSocket;
use crate::options::limit_options::DiskThrottle;
use crate::options::threshold::Threshold;
use crate::options::user_options::UserIds;
use crate::process::workers::LoopOptions;
use crate::setup::offers::{Offer, Offers};

/// The setup of a server.
#[derive(Debug)]
pub struct Setup {
    /// How many event loops serve, at least one.
    pub workers: usize,
    /// Their options.
    pub loops: LoopOptions,
    /// The disks.
    pub disks: Vec<DiskSetup>,
    /// The state that outlives the process.
    pub state: StateSetup,
    /// The disks' names where sockets offer all of them; `None`: they offer what `nbd` says.
    pub offers: Option<Offers>,
    /// The addresses where NBD clients are served, and what each offers.
    pub nbd: Vec<(Address, Vec<Offer>)>,
    /// The sockets of vhost-user-blk devices, and the place of the disk that each has.
    pub devices: Vec<(PathBuf, usize)>,
    /// The block devices of this host.
    pub ublk: Vec<UblkSetup>,
    /// How many queues a guest may use on a vhost-user-blk device.
    pub queues: u16,
    /// Whether guests' memory is registered with io_uring.
    pub register_memory: RegisteredMemory,
    /// The limits of NBD clients.
    pub limits: Limits,
    /// Whether the server ends with the last NBD client, as qemu-nbd does.
    pub ends_with_clients: bool,
    /// TLS for NBD clients.
    pub tls: Option<TlsSetup>,
    /// The users that may connect to the Unix sockets of guests that are bound.
    pub permissions: SocketPermissions,
    /// The control socket.
    pub control: Option<ControlSocket>,
    /// The socket of QEMU's monitor protocol. It answers the commands that call only these
    /// methods.
    pub qmp: Option<ControlSocket>,
    /// The first commands of a storage daemon, where the process is one.
    pub storage_daemon: Option<StorageDaemon>,
    /// The file that names the process while it serves.
    pub pid_file: Option<PathBuf>,
    /// Where the metrics are served.
    pub metrics: Option<MetricsAddress>,
    /// The user that the process becomes, once everything is open; `None`: it stays who it is.
    pub user: Option<UserIds>,
    /// Whether the process may do nothing but what it needs, once everything is open.
    pub sandbox: SandboxUse,
    /// Folders and files below which requests may open more then, beside the folders of the disks
    /// and sockets.
    pub sandbox_allow: Vec<PathBuf>,
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
    /// Whether users may have disks opened and changed while it serves: at a control socket or by
    /// the configuration.
    pub(crate) fn takes_changes(&self) -> bool {
        self.is_controlled() || self.config.is_some()
    }

    /// Whether the control socket, or that of QMP, answers methods that change something.
    pub(crate) fn is_controlled(&self) -> bool {
        let mut sockets = self.control.iter().chain(&self.qmp);
        sockets.any(|socket| socket.answers.has_changes()) || self.storage_daemon.is_some()
    }

    /// The sockets of QMP.
    pub(crate) fn qmp_sockets(&self) -> impl Iterator<Item = &ControlSocket> {
        let of_daemon = self.storage_daemon.iter().flat_map(|daemon| &daemon.sockets);
        self.qmp.iter().chain(of_daemon)
    }

    /// Whether commands of QMP are carried out.
    pub(crate) fn has_qmp(&self) -> bool {
        self.qmp.is_some() || self.storage_daemon.is_some()
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

/// TLS for NBD clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSetup {
    /// The rule at the sockets that are not in `only`.
    pub mode: TlsMode,
    /// The secrets.
    pub files: TlsFiles,
    /// Pairs of an export and a client that may use it.
    pub allowed: Vec<(String, String)>,
    /// The sockets where every client must.
    pub only: Vec<Address>,
}

impl TlsSetup {
    /// The rule at a socket.
    pub fn mode_at(&self, address: &Address) -> TlsMode {
        match self.only.contains(address) {
            true => TlsMode::Required,
            false => self.mode,
        }
    }
}

/// A disk to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSetup {
    /// Its name, unlike all others.
    pub name: String,
    /// The image.
    pub path: PathBuf,
    /// Its format; `None`: by the file's name.
    pub format: Option<ImageFormat>,
    /// Whether it may be changed.
    pub access: Access,
    /// The host's cache.
    pub cache: CacheMode,
    /// The effect of discards.
    pub discard: Discard,
    /// The treatment of writes of zeros.
    pub detect_zeroes: DetectZeroes,
    /// The block sizes that it announces.
    pub block_sizes: BlockSizes,
    /// The treatment of changes that find no room.
    pub on_full: OnFull,
    /// How little room is left when that is told.
    pub threshold: Option<Threshold>,
    /// Whether what is read from its backing file becomes its own.
    pub copy_on_read: bool,
    /// Whether a stream begins by itself, which copies this many bytes a second; 0: as many as
    /// there is room for.
    pub prefetch: Option<u64>,
    /// Bytes of the disk that is made where the image is missing.
    pub create: Option<u64>,
    /// The snapshot that is served in place of the disk, by name or id.
    pub snapshot: Option<String>,
    /// The files that the image may name beside regular files below its own folder.
    pub allow_paths: Vec<PathBuf>,
    /// Whether it may name exports of other servers.
    pub remote_backing: RemoteBacking,
    /// Whether no name in the image is followed.
    pub no_references: bool,
    /// The part of its file that it is.
    pub part: Option<FilePart>,
    /// Whether its backing file is read.
    pub backing_use: BackingUse,
    /// The keys of its encrypted images.
    pub keys: KeyFiles,
    /// The bitmaps that its NBD clients may ask for, by their names.
    pub bitmaps: Vec<String>,
    /// Where its bitmaps are, if it is raw and they are not beside it.
    pub side_file: Option<SideFile>,
    /// How many operations and bytes a second it may have.
    pub throttle: Option<DiskThrottle>,
}

impl DiskSetup {
    /// Whether a disk that is open as this one says need not be opened anew for `other`: they
    /// differ in limits and thresholds at most.
    pub(crate) fn opens_like(&self, other: &Self) -> bool {
        let without_limits =
            |setup: &Self| Self { throttle: None, threshold: None, ..setup.clone() };
        without_limits(self) == without_limits(other)
    }

    /// Whether nothing can change it.
    pub fn is_read_only(&self) -> bool {
        self.access == Access::ReadOnly || self.snapshot.is_some()
    }
}

/// Whether a server is confined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxUse {
    /// By all that the kernel has.
    #[default]
    On,
    /// Not at all.
    Off,
}

/// Where the server keeps what outlives its process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateSetup {
    /// Nowhere.
    Off,
    /// In this directory, which must be usable.
    Dir(PathBuf),
    /// In the usual directory, if that can be used.
    Usual,
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
