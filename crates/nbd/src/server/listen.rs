//! Listening sockets at the address of a URI.

use std::fs;
use std::io::{Error as IoError, ErrorKind as IoErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::DESCRIPTORS_HINT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, fstat, lstat};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::uri::Address;

/// The longest path of a Unix socket, in bytes (`sun_path` in unix(7), without the final NUL).
const MAX_SOCKET_PATH: usize = 107;

/// Connections that may wait for accept.
pub const BACKLOG: i32 = 128;

/// A listening socket, for [`Listener::new`](blockhouse_engine::Listener::new).
#[derive(Debug)]
pub struct BoundSocket {
    /// The socket.
    pub socket: OwnedFd,
    /// The address, with the real port instead of port 0.
    pub address: Address,
    /// Removes a Unix socket's file; keep it as long as the server listens.
    pub file: Option<SocketFile>,
}

/// The file of a Unix socket, removed on drop if the path still names it.
///
/// If a server that started later has put its own socket at the path, that socket is not removed.
/// Drop this while the socket still listens, because a server that first tries to connect then does
/// not replace the file. One race remains: if a program replaces the file without connecting first,
/// between the comparison and the removal, its socket is removed.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// The file itself. While it is open, no other file has its inode number.
    file: OwnedFd,
    /// Whether the file is kept when this is dropped.
    is_kept: AtomicBool,
}

impl SocketFile {
    /// The file at `path`, which was just bound.
    fn at(path: &Path) -> std::result::Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self::adopt(path.into(), file))
    }

    /// The file at a path, if it has this device and inode: a socket that another process has left
    /// listening. From now on this process removes the file.
    pub fn find(path: &Path, identity: (u64, u64)) -> Option<Self> {
        let found = Self::at(path).ok()?;
        // The file must not be removed before its identity is known.
        found.set_kept(true);
        let is_it = found.identity()? == identity && found.is_at_its_path();
        is_it.then(|| {
            found.set_kept(false);
            found
        })
    }

    /// The file's device and inode; `None` if the host does not report them.
    pub fn identity(&self) -> Option<(u64, u64)> {
        let found = fstat(&self.file).ok()?;
        Some((found.st_dev, found.st_ino))
    }

    /// Sets whether the file is kept when this is dropped, because another process continues to
    /// listen.
    pub fn set_kept(&self, is_kept: bool) {
        self.is_kept.store(is_kept, Ordering::Relaxed);
    }

    /// Sets the file's group and mode, which determine the users that may connect.
    ///
    /// # Errors
    /// Errors of the host, with the path.
    pub fn permit(&self, permissions: SocketPermissions) -> Result<()> {
        permit(self, permissions).map_err(|error| error.on(&self.path.display().to_string()))
    }

    /// A file that another process has bound, open as `file` (`O_PATH`). From now on this process
    /// removes the file.
    pub fn adopt(path: PathBuf, file: OwnedFd) -> Self {
        Self { path, file, is_kept: AtomicBool::new(false) }
    }

    fn is_at_its_path(&self) -> bool {
        let (Ok(own), Ok(found)) = (fstat(&self.file), lstat(&self.path)) else { return false };
        (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)
    }
}

impl AsFd for SocketFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !*self.is_kept.get_mut() && self.is_at_its_path() {
            // An error is ignored, because nothing can be done about it; for example, the folder
            // may be read-only now.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The users who may connect to a Unix socket: the mode and the group of its file. No other user
/// can connect at any moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketPermissions {
    /// The file's mode, from 0 to 0o777, independent of the umask; `None` uses the umask.
    pub mode: Option<u32>,
    /// The id of the file's group; `None` is the process's group.
    pub group: Option<u32>,
}

impl SocketPermissions {
    /// Only the owner may connect.
    pub const PRIVATE: Self = Self { mode: Some(0o600), group: None };
}

/// Listens at the address. The file of a Unix socket that no server listens to is replaced.
///
/// # Errors
/// If the address is in use, unavailable or invalid; the error names it.
pub fn bind(address: &Address) -> Result<BoundSocket> {
    bind_for(address, SocketPermissions::default())
}

/// As [`bind`], with permissions for a Unix socket. Over TCP every client may connect.
///
/// # Errors
/// As [`bind`]; also if the process may not give its socket to the group.
pub fn bind_for(address: &Address, permissions: SocketPermissions) -> Result<BoundSocket> {
    match address {
        Address::Tcp { host, port } => bind_tcp(host, *port),
        Address::Unix(path) => bind_unix(path, permissions),
    }
}

/// Listens at a Unix socket that only its owner can ever connect to.
///
/// # Errors
/// As [`bind`].
pub fn bind_private(path: &Path) -> Result<BoundSocket> {
    bind_unix(path, SocketPermissions::PRIVATE)
}

fn bind_tcp(host: &str, port: u16) -> Result<BoundSocket> {
    let bound = TcpListener::bind((host, port)).and_then(|listener| {
        let port = listener.local_addr()?.port();
        Ok((OwnedFd::from(listener), port))
    });
    let (socket, port) = bound.map_err(|error| {
        let hint = match error.kind() {
            IoErrorKind::AddrInUse => "another program listens there; choose another port",
            IoErrorKind::PermissionDenied => "choose a port from 1024 on",
            _ => "choose an address of this machine, or localhost",
        };
        Error::host("cannot listen", error).on(&format!("{host}:{port}")).hint(hint)
    })?;
    Ok(BoundSocket { socket, address: Address::Tcp { host: host.into(), port }, file: None })
}

fn bind_unix(path: &Path, permissions: SocketPermissions) -> Result<BoundSocket> {
    let name = path.display().to_string();
    let length = path.as_os_str().as_bytes().len();
    if length > MAX_SOCKET_PATH {
        let what =
            format!("cannot listen: the path has {length} bytes, more than {MAX_SOCKET_PATH}");
        let error = Error::new(ErrorKind::InvalidInput, what).on(&name);
        return Err(error.hint("choose a shorter path for the socket"));
    }
    let bound = match bind_file(path, permissions) {
        Err(Errno::ADDRINUSE) => {
            remove_stale_socket(path, &name)?;
            bind_file(path, permissions)
        }
        result => result,
    };
    let failed = |errno: Errno| {
        let failed = Error::host("cannot listen", errno.into()).on(&name);
        match errno {
            Errno::MFILE | Errno::NFILE => failed.hint(DESCRIPTORS_HINT),
            Errno::NOENT => {
                failed.hint("make its folder first, or choose a path in one that exists")
            }
            Errno::NOTDIR => failed.hint("its folder is a file; choose another path"),
            Errno::ACCESS => failed.hint("choose a folder that this user may write to"),
            _ => failed,
        }
    };
    let socket = bound.map_err(failed)?;
    let file = SocketFile::at(path).map_err(|errno| {
        // An error here is ignored; the first error is returned.
        let _ = fs::remove_file(path);
        failed(errno)
    })?;
    // If `permit` fails, dropping `file` removes the file. No client can connect before the socket
    // listens.
    permit(&file, permissions).map_err(|error| error.on(&name))?;
    net::listen(&socket, BACKLOG).map_err(failed)?;
    Ok(BoundSocket { socket, address: Address::Unix(path.into()), file: Some(file) })
}

/// Binds a socket to a file whose permissions are never wider than `permissions`.
fn bind_file(path: &Path, permissions: SocketPermissions) -> std::result::Result<OwnedFd, Errno> {
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if permissions != SocketPermissions::default() {
        // When the socket is bound, the file gets the socket's mode, less the umask.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    }
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Sets the file's group first and its mode second, so that the old group never gets the rights
/// meant for the new group.
fn permit(file: &SocketFile, permissions: SocketPermissions) -> Result<()> {
    let SocketPermissions { mode, group } = permissions;
    if let Some(group) = group {
        let changed = rustix::fs::chownat(
            &file.file,
            "",
            None,
            Some(Gid::from_raw(group)),
            AtFlags::EMPTY_PATH,
        );
        changed.map_err(|errno| {
            let error = Error::host("cannot give the socket to its group", errno.into());
            error.hint("a user may do so with groups that it is a member of, root with all")
        })?;
    }
    let cannot = |errno: Errno| Error::host("cannot set the socket's mode", errno.into());
    let found = fstat(&file.file).map_err(cannot)?;
    match mode {
        Some(mode) if found.st_mode & 0o7777 != mode => {
            // The mode is set through the open file, because another file may be at its path by
            // now.
            let path = format!("/proc/self/fd/{}", file.file.as_raw_fd());
            rustix::fs::chmod(path, Mode::from_raw_mode(mode)).map_err(cannot)
        }
        _ => Ok(()),
    }
}

/// Removes the socket of a dead server at `path`.
fn remove_stale_socket(path: &Path, name: &str) -> Result<()> {
    let in_use = |hint: &'static str| {
        let error = IoError::from(Errno::ADDRINUSE);
        Err(Error::host("cannot listen", error).on(name).hint(hint))
    };
    if !fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
        return in_use("there is a file that is no socket; choose another path");
    }
    if is_listening(path) {
        return in_use("a running server listens there; choose another path");
    }
    let cannot = |error| Error::host("cannot remove the socket of a dead server", error).on(name);
    fs::remove_file(path).map_err(cannot)
}

/// How long the kernel may take to close the sockets of a server that was killed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Whether a live server listens at the socket. The check waits up to [`RELEASE_TIMEOUT`], because
/// the kernel needs some time to close the socket of a killed server. A running server sees one
/// connection, which is closed when the server has sent its first bytes, or at the end of that
/// time.
fn is_listening(path: &Path) -> bool {
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match connect(path) {
            Err(Errno::CONNREFUSED | Errno::NOENT) => return false,
            // If the server was killed before it accepted the connection, the kernel closes the
            // connection.
            Ok(socket) if is_alive(&socket, left) => return true,
            _ if left.is_zero() => return true,
            // Either the backlog is full, or the server is dead and its socket is about to be
            // closed.
            _ => sleep(RETRY_DELAY.min(left)),
        }
    }
}

/// Connects, but does not wait for a server that accepts no connection.
fn connect(path: &Path) -> std::result::Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Whether the server at the other end sends data, or keeps the connection open for `limit`.
fn is_alive(socket: &OwnedFd, limit: Duration) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    let limit = Timespec::try_from(limit).ok();
    match poll(&mut polled, limit.as_ref()) {
        Ok(0) => true,
        Ok(_) => net::recv(socket, &mut [0u8; 1][..], RecvFlags::DONTWAIT)
            .is_ok_and(|(count, _)| count > 0),
        // The poll was interrupted; the caller tries again.
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_socket_goes_with_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let bound = bind(&Address::Unix(path.clone())).expect("the path is free");
        drop(bound.file);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_has_the_mode_that_is_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        for (index, mode) in [0o666, 0o660, 0o600, 0o777].into_iter().enumerate() {
            let path = folder.path().join(index.to_string());
            let permissions = SocketPermissions { mode: Some(mode), group: None };
            let address = Address::Unix(path.clone());
            let bound = bind_for(&address, permissions).expect("the path is free");
            assert_eq!(lstat(&path).expect("its file").st_mode & 0o7777, mode);
            assert!(connect(&path).is_ok());
            drop(bound);
        }
    }

    #[test]
    fn a_successors_socket_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let BoundSocket { socket, file, .. } =
            bind(&Address::Unix(path.clone())).expect("it is free");
        // As a server that stopped listening, and still waits for its clients.
        drop(socket);
        let successor = bind(&Address::Unix(path.clone())).expect("the dead socket is replaced");
        drop(file);
        assert!(connect(&path).is_ok(), "the successor's socket was removed");
        drop(successor);
    }
}
