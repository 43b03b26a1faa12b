//! Listening sockets at the address of a URI.

use std::fs;
use std::io::{Error as IoError, ErrorKind as IoErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::DESCRIPTORS_HINT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fstat, lstat};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::uri::Address;

/// The longest path of a Unix socket, in bytes (`sun_path` in unix(7), without the final NUL).
const MAX_SOCKET_PATH: usize = 107;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// A listening socket, for [`Listener::new`](blockhouse_engine::Listener::new).
#[derive(Debug)]
pub struct BoundSocket {
    /// The socket.
    pub socket: OwnedFd,
    /// The address, with the real port where port 0 was asked for.
    pub address: Address,
    /// Removes a Unix socket's file; keep it as long as the server listens.
    pub file: Option<SocketFile>,
}

/// The file of a Unix socket, removed on drop if the path still names it.
///
/// A server that started later may have put its own socket there, and that one stays. Drop this while the
/// socket still listens: then no server that asks first takes the path meanwhile. What remains: a program that
/// replaces the file without asking, between the comparison and the removal, loses its socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// The file itself. While it is open, no other file has its inode number.
    file: OwnedFd,
}

impl SocketFile {
    /// The file at `path`, which was just bound.
    fn at(path: &Path) -> std::result::Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self { path: path.into(), file })
    }

    /// A file that another process has bound, and has open as `file` (`O_PATH`). From now on this process removes it.
    pub fn adopt(path: PathBuf, file: OwnedFd) -> Self {
        Self { path, file }
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
        if self.is_at_its_path() {
            // The folder may have been made read-only; there is nothing else to do.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Listens at the address. The file of a Unix socket that no server listens to any more is replaced.
///
/// # Errors
/// When the address is in use, cannot be had or makes no sense; the line names it.
pub fn bind(address: &Address) -> Result<BoundSocket> {
    match address {
        Address::Tcp { host, port } => bind_tcp(host, *port),
        Address::Unix(path) => bind_unix(path, SocketAccess::Umask),
    }
}

/// Listens at a Unix socket that only its owner can connect to, from its first moment on.
///
/// # Errors
/// As [`bind`].
pub fn bind_private(path: &Path) -> Result<BoundSocket> {
    bind_unix(path, SocketAccess::Owner)
}

/// Who may connect to a Unix socket.
#[derive(Clone, Copy)]
enum SocketAccess {
    Umask,
    Owner,
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

fn bind_unix(path: &Path, access: SocketAccess) -> Result<BoundSocket> {
    let name = path.display().to_string();
    let length = path.as_os_str().as_bytes().len();
    if length > MAX_SOCKET_PATH {
        let what =
            format!("cannot listen: the path has {length} bytes, more than {MAX_SOCKET_PATH}");
        let error = Error::new(ErrorKind::InvalidInput, what).on(&name);
        return Err(error.hint("choose a shorter path for the socket"));
    }
    let socket = match listen(path, access) {
        Err(Errno::ADDRINUSE) => {
            remove_stale_socket(path, &name)?;
            listen(path, access)
        }
        result => result,
    };
    let failed = |errno: Errno| {
        let failed = Error::host("cannot listen", errno.into()).on(&name);
        match errno {
            Errno::MFILE | Errno::NFILE => failed.hint(DESCRIPTORS_HINT),
            _ => failed,
        }
    };
    let socket = socket.map_err(failed)?;
    let file = SocketFile::at(path).map_err(|errno| {
        // The error that counts is the first one.
        let _ = fs::remove_file(path);
        failed(errno)
    })?;
    Ok(BoundSocket { socket, address: Address::Unix(path.into()), file: Some(file) })
}

fn listen(path: &Path, access: SocketAccess) -> std::result::Result<OwnedFd, Errno> {
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if let SocketAccess::Owner = access {
        // The file gets the mode that its socket has when it is bound, less the umask.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    }
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Removes the socket that a dead server left at `path`.
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

/// Whether a server listens at the socket, and goes on doing so: the kernel needs a moment to close the
/// socket of one that was killed. A running server sees one connection, which ends as soon as the server
/// sends its first bytes.
fn is_listening(path: &Path) -> bool {
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match connect(path) {
            Err(Errno::CONNREFUSED | Errno::NOENT) => return false,
            // A server that has not accepted the connection may be dying: then the kernel ends it.
            Ok(socket) if is_alive(&socket, left) => return true,
            _ if left.is_zero() => return true,
            // Too many wait to be accepted, or the server is dead and its socket is about to be closed.
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

/// Whether the server at the other end sends something, or does not hang up for so long.
fn is_alive(socket: &OwnedFd, limit: Duration) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    let limit = Timespec::try_from(limit).ok();
    match poll(&mut polled, limit.as_ref()) {
        Ok(0) => true,
        Ok(_) => net::recv(socket, &mut [0u8; 1][..], RecvFlags::DONTWAIT)
            .is_ok_and(|(count, _)| count > 0),
        // Interrupted: asked again.
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
