//! The process's rights to files by their paths, and to TCP ports (Landlock, `landlock(7)`).
//!
//! Open files stay usable as they were opened. No rule allows a file to be executed. A kernel with
//! an older Landlock enforces only the rights that it knows.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::metrics_address::MetricsAddress;
use blockhouse_config::server::StateSetup;
use blockhouse_config::setup::Setup;
use blockhouse_disk::StateDir;
use blockhouse_nbd::TlsFiles;
use blockhouse_nbd::uri::Address;
use blockhouse_storage::Location;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr,
};

use super::Opened;
use super::needs::Needs;
use crate::endpoints::sockets::runtime_folder;

/// The version of the rules. Later versions would also restrict other operations, such as
/// connecting to a Unix socket.
const VERSION: ABI = ABI::V5;
/// The port of DNS over TCP.
const DNS: u16 = 53;
/// The files that are read to look up a host name, to find the servers of a Ceph cluster, and to
/// verify a certificate without a configured folder.
const LOOK_UP: [&str; 15] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ceph",
    "/run/systemd/resolve",
    "/etc/ssl/certs",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/ca-trust/extracted",
    "/etc/ca-certificates/extracted",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
];
/// The paths, other than images, to which Ceph's library writes: its discarded output, its sockets
/// for administration, and its log.
const WRITTEN_BY_CEPH: [&str; 3] = ["/dev/null", "/run/ceph", "/var/log/ceph"];
/// The folders that are read when a disk is opened, for facts about the host's disks and about the
/// holder of a lock.
const HOST: [&str; 2] = ["/proc", "/sys"];
/// Where block devices and their drivers are.
const DEVICES: &str = "/dev";

/// The rights at a path and below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileRule {
    pub(super) path: PathBuf,
    pub(super) access: BitFlags<AccessFs>,
}

/// The rules of a server that is going to open images in Ceph. They restrict only writing and
/// executing, because Ceph's library reads the files that its configuration names. They apply to
/// the library's threads, which cannot be restricted later.
pub(super) fn rules_of_writing(setup: &Setup, needs: Needs) -> FileRules {
    let sockets = own_sockets(setup);
    let opened = Opened { devices: setup.devices.len(), sockets, rules_of_writing: None };
    let mut all = rules(setup, needs, &opened);
    places(setup).into_iter().for_each(|path| all.add(path, changing()));
    all.add_pid_file(setup);
    WRITTEN_BY_CEPH.iter().for_each(|path| all.add(path.into(), changing()));
    all
}

/// The rights to files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileRules {
    pub(super) rules: Vec<FileRule>,
    /// Canonical folders and files below which requests may open disks and make sockets.
    pub(crate) for_requests: Vec<PathBuf>,
}

/// The rules of this server, which has `opened`. They follow from its own setup. In an upgrade, the
/// disks and sockets that the previous process names get no rules, because that process may have
/// been compromised.
pub(super) fn rules(setup: &Setup, needs: Needs, opened: &Opened) -> FileRules {
    let mut all = FileRules::default();
    let sockets: Vec<_> = opened.sockets.iter().filter(|path| is_own(setup, path)).collect();
    if let Some(path) = state_folder(setup) {
        all.add(path, changing() | AccessFs::RemoveDir);
    }
    for socket in &sockets {
        all.add(parent(socket), AccessFs::RemoveFile.into());
    }
    if let Some(path) = &setup.server.pid_file {
        all.add(path.clone(), AccessFs::ReadFile.into());
        all.add(parent(path), AccessFs::RemoveFile.into());
    }
    match setup.tls.as_ref().map(|tls| &tls.files) {
        Some(TlsFiles::Certificates(folder)) => all.add(folder.clone(), reading()),
        // The rule is for the folder, because the file may be replaced.
        Some(TlsFiles::Psk(file)) => all.add(parent(file), reading()),
        None => {}
    }
    let names = setup.disks.iter().flat_map(|disk| disk.images().chain(&disk.allow_paths));
    for path in names.filter_map(|name| files_to_connect(name)) {
        all.add(path, reading());
    }
    if needs.connects {
        LOOK_UP.iter().for_each(|path| all.add(path.into(), reading()));
    }
    if needs.listens
        && let Some(MetricsAddress::Unix { path: socket, .. }) = &setup.server.metrics
    {
        all.add(parent(socket), AccessFs::MakeSock | AccessFs::RemoveFile);
    }
    if needs.changes {
        all.add_requests(setup, &sockets);
    }
    if needs.takes_over {
        all.add_taking_over(setup, needs);
    }
    all
}

impl FileRules {
    /// Adds a rule for a path. A missing path gets no rule, and cannot be used.
    fn add(&mut self, path: PathBuf, access: BitFlags<AccessFs>) {
        if let Ok(path) = path.canonicalize() {
            self.rules.push(FileRule { path, access });
        }
    }

    /// Adds the rules to a ruleset, limited to the rights that the ruleset handles.
    fn add_to(
        &self,
        mut created: RulesetCreated,
        handled: BitFlags<AccessFs>,
    ) -> Result<RulesetCreated> {
        for FileRule { path, access } in &self.rules {
            // The path may have been removed meanwhile.
            let Ok(opened) = PathFd::new(path) else { continue };
            let access = if path.is_dir() {
                *access & handled
            } else {
                *access & handled & AccessFs::from_file(VERSION)
            };
            if !access.is_empty() {
                created = created.add_rule(PathBeneath::new(opened, access))?;
            }
        }
        Ok(created)
    }

    /// The canonical paths below which files may be made.
    pub(super) fn writable(&self) -> Vec<PathBuf> {
        let can_make = |rule: &&FileRule| rule.access.contains(AccessFs::MakeReg);
        self.rules.iter().filter(can_make).map(|rule| rule.path.clone()).collect()
    }

    /// Adds the files that taking over from another process needs: `/proc` and `/sys`, the pid
    /// file, and devices.
    fn add_taking_over(&mut self, setup: &Setup, needs: Needs) {
        HOST.iter().for_each(|path| self.add(path.into(), reading()));
        self.add_pid_file(setup);
        if needs.takes_ublk {
            // The character devices of the ublk driver by which devices are served, not the block
            // devices that other programs use.
            let is_served = |name: &OsString| {
                [&b"ublk-"[..], b"ublkc"].iter().any(|begin| name.as_bytes().starts_with(begin))
            };
            let entries = std::fs::read_dir(DEVICES).into_iter().flatten().flatten();
            let names = entries.map(|entry| entry.file_name()).filter(is_served);
            let access = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
            names.for_each(|name| self.add(Path::new(DEVICES).join(name), access));
        }
    }

    /// Allows the pid file to be written.
    fn add_pid_file(&mut self, setup: &Setup) {
        if let Some(path) = &setup.server.pid_file {
            self.add(parent(path), AccessFs::MakeReg | AccessFs::WriteFile | AccessFs::RemoveFile);
        }
    }

    /// Adds the paths that a control socket or a configuration may name later.
    fn add_requests(&mut self, setup: &Setup, sockets: &[&PathBuf]) {
        HOST.iter().for_each(|path| self.add(path.into(), reading()));
        setup.config.iter().for_each(|config| self.add(parent(config), reading()));
        let named = setup.server.sandbox_allow.iter().cloned();
        let sockets = sockets.iter().map(|socket| parent(socket));
        for path in places(setup).into_iter().chain(named).chain(sockets) {
            self.add(path.clone(), changing() | AccessFs::IoctlDev);
            self.for_requests.extend(path.canonicalize());
        }
        self.for_requests.sort();
        self.for_requests.dedup();
    }
}

/// The folders of the images and of their side files, and the paths that images may name.
fn places(setup: &Setup) -> Vec<PathBuf> {
    let images = setup.disks.iter().flat_map(DiskConfig::images);
    let images = images.filter_map(|name| match Location::of(name) {
        Ok(Location::File(path)) => Some(place_of_image(path)),
        _ => None,
    });
    let side_files = setup.disks.iter().filter_map(|disk| disk.bitmaps_in.as_ref());
    let side_files = side_files.map(|path| if path.is_dir() { path.clone() } else { parent(path) });
    let allowed = setup.disks.iter().flat_map(|disk| disk.allow_paths.iter().cloned());
    images.chain(side_files).chain(allowed).collect()
}

/// The sockets that the setup names, and one in the runtime folder, which has the sockets whose
/// path the server chooses.
pub(super) fn own_sockets(setup: &Setup) -> Vec<PathBuf> {
    let nbd = setup.nbd.iter().filter_map(|(address, _)| match address {
        Address::Unix(path) => Some(path.clone()),
        Address::Tcp { .. } => None,
    });
    let metrics = setup.server.metrics.iter().filter_map(|address| match address {
        MetricsAddress::Unix { path, .. } => Some(path.clone()),
        MetricsAddress::Loopback(_) => None,
    });
    let devices = setup.devices.iter().map(|(path, _)| path.clone());
    let control =
        setup.server.control.iter().chain(&setup.server.qmp).map(|control| control.path.clone());
    let unnamed = runtime_folder().ok().map(|folder| folder.join("unnamed"));
    nbd.chain(metrics).chain(devices).chain(control).chain(unnamed).collect()
}

/// Whether the setup names this socket, or leaves its path to the server.
fn is_own(setup: &Setup, socket: &Path) -> bool {
    own_sockets(setup).iter().any(|own| own == socket)
        || runtime_folder().is_ok_and(|folder| socket.parent() == Some(&folder))
}

/// The folder of the files that are read again for each connection to the server of an image: the
/// TLS files of an NBD server, the configuration of a Ceph cluster with its keys.
fn files_to_connect(image: &Path) -> Option<PathBuf> {
    match Location::of(image) {
        Ok(Location::Nbd { uri, .. }) => match uri.tls.psk() {
            // The rule is for the folder, because the file may be replaced.
            Some((_, file)) => Some(parent(file)),
            None => uri.tls.certificates().map(Path::to_owned),
        },
        Ok(Location::Rbd(rbd)) => rbd.configuration().map(|file| parent(Path::new(file))),
        _ => None,
    }
}

/// The folder of an image, in which there may be other images. For a block device it is the device
/// alone, because its folder has all disks of the host.
fn place_of_image(path: PathBuf) -> PathBuf {
    let is_device = path.metadata().is_ok_and(|found| found.file_type().is_block_device());
    if is_device { path } else { parent(&path.canonicalize().unwrap_or(path)) }
}

fn state_folder(setup: &Setup) -> Option<PathBuf> {
    match &setup.server.state {
        StateSetup::Off => None,
        StateSetup::Dir(path) => Some(path.clone()),
        StateSetup::Usual => match setup.user {
            Some(ids) => Some(StateDir::default_path_for(ids.user)),
            None => StateDir::default_path().ok(),
        },
    }
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn reading() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

/// All rights that are needed to read, change and make files and sockets.
fn changing() -> BitFlags<AccessFs> {
    reading()
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
}

/// Gives the rules to the kernel. Their paths are opened with the rights of the current user, so
/// this comes before a change of the user. `None` if the kernel has no Landlock.
///
/// # Errors
/// The kernel's error.
pub(super) fn make(rules: &FileRules, setup: &Setup, needs: Needs) -> Result<Option<OwnedFd>> {
    let made = ruleset(rules, setup, needs).context("cannot make a ruleset of Landlock")?;
    Ok(made.into())
}

/// Gives the rules of [`rules_of_writing`] to the kernel. Reading, connecting and ports are not
/// restricted.
///
/// # Errors
/// The errors of [`make`].
pub(super) fn make_of_writing(rules: &FileRules) -> Result<Option<OwnedFd>> {
    let handled = (AccessFs::from_write(VERSION) | AccessFs::Execute) & !AccessFs::IoctlDev;
    let created = Ruleset::default().handle_access(handled).and_then(|ruleset| ruleset.create());
    let created = created.context("cannot make a ruleset of Landlock")?;
    Ok(rules.add_to(created, handled)?.into())
}

fn ruleset(rules: &FileRules, setup: &Setup, needs: Needs) -> Result<RulesetCreated> {
    let handled = AccessFs::from_all(VERSION);
    let mut ruleset = Ruleset::default().handle_access(handled)?;
    if !needs.listens {
        ruleset = ruleset.handle_access(AccessNet::BindTcp)?;
    }
    let ports = ports(setup, needs);
    if ports.is_some() {
        ruleset = ruleset.handle_access(AccessNet::ConnectTcp)?;
    }
    let mut created = rules.add_to(ruleset.create()?, handled)?;
    for port in ports.unwrap_or_default() {
        created = created.add_rule(NetPort::new(port, AccessNet::ConnectTcp))?;
    }
    Ok(created)
}

/// The TCP ports to which the server may connect later; `None` if they are unknown.
fn ports(setup: &Setup, needs: Needs) -> Option<Vec<u16>> {
    let is_open = setup.disks.iter().any(|disk| disk.allow_remote);
    if needs.changes || is_open {
        return None;
    }
    let mut ports = Vec::new();
    for name in setup.disks.iter().flat_map(DiskConfig::images) {
        match Location::of(name) {
            Ok(Location::File(_) | Location::Null(_)) => {}
            Ok(Location::Nbd { uri, .. }) => match uri.export.address {
                Address::Tcp { port, .. } => ports.extend([port, DNS]),
                Address::Unix(_) => {}
            },
            #[allow(unreachable_patterns, reason = "other locations need other ports")]
            _ => return None,
        }
    }
    Some(ports)
}

/// Checks whether a request may open a disk, or make a socket, at this path.
///
/// # Errors
/// The path is not allowed. The error names the allowed paths.
pub(crate) fn check(allowed: &[PathBuf], path: &Path) -> Result<()> {
    let canonical = path.canonicalize().or_else(|_| {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        Ok::<_, io::Error>(parent(path).canonicalize()?.join(name))
    });
    // Opening a path that cannot be found fails later, with an error that says so.
    let Ok(canonical) = canonical else { return Ok(()) };
    if allowed.iter().any(|allowed| canonical.starts_with(allowed)) {
        return Ok(());
    }
    let allowed: Vec<_> = allowed.iter().map(|path| path.display().to_string()).collect();
    anyhow::bail!(
        "{}: the sandbox lets requests use only what is below {}; start the server with --sandbox-allow DIR for \
         more, or with --sandbox off",
        path.display(),
        allowed.join(", ")
    )
}
