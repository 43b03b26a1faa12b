//! The server of a device: finds and ends the process that listens at a Unix socket.
//!
//! Guarantee: only the process that has called listen(2) for the socket is asked to end. The kernel
//! names it, not a file.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blockhouse_engine::{peer_process, wait_readable};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::Error;

/// How long a server may take to end: its requests in flight complete, and are flushed.
const END_LIMIT: Duration = Duration::from_secs(60);

/// A process that listens at a socket.
pub(crate) struct Server {
    process: i32,
    handle: OwnedFd,
    socket: PathBuf,
}

/// The result of looking for the server at a socket.
pub(crate) enum Found {
    /// The process that listens.
    Listens(Server),
    /// The server has ended: its socket is there, and no process listens.
    Ended,
    /// The socket cannot be reached: it was removed, or its folder. The server may run.
    Unknown,
}

impl Server {
    /// Finds the server at a socket. The socket of a server that has ended is removed.
    ///
    /// # Errors
    /// The kernel refuses a handle of the process.
    pub(crate) fn find(socket: &Path) -> Result<Found, Error> {
        let client = match UnixStream::connect(socket) {
            // No process listens at the socket: its server was killed, or is about to end.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                // Any other file gives this error, too.
                let file = fs::symlink_metadata(socket);
                if file.is_ok_and(|file| file.file_type().is_socket()) && !is_open(socket) {
                    let _ = fs::remove_file(socket);
                    return Ok(Found::Ended);
                }
                return Ok(Found::Unknown);
            }
            Err(_) => return Ok(Found::Unknown),
            Ok(client) => client,
        };
        let Ok(Some(process)) = peer_process(&client) else { return Ok(Found::Unknown) };
        let Some(listener) = Pid::from_raw(process) else { return Ok(Found::Unknown) };
        match pidfd_open(listener, PidfdFlags::empty()) {
            // The process that called listen(2) has ended, and another one has answered.
            Err(Errno::SRCH) => Ok(Found::Unknown),
            Err(error) => Err(cannot_end(process, error)),
            Ok(handle) => Ok(Found::Listens(Self { process, handle, socket: socket.to_owned() })),
        }
    }

    /// Ends the server (SIGTERM), and waits until it has ended.
    ///
    /// # Errors
    /// The server does not end within a minute, or belongs to another user.
    pub(crate) fn end(self) -> Result<(), Error> {
        match pidfd_send_signal(&self.handle, Signal::TERM) {
            Err(Errno::SRCH) => return Ok(()),
            outcome => outcome.map_err(|error| cannot_end(self.process, error))?,
        }
        if wait_readable(&self.handle, Instant::now() + END_LIMIT).unwrap_or(false) {
            Ok(())
        } else {
            Err(Error::NotEnded { process: self.process, socket: self.socket })
        }
    }
}

fn cannot_end(process: i32, error: Errno) -> Error {
    Error::refused(format!("end process {process}"), error.into())
}

/// Ends the server at a socket (SIGTERM), and waits until it has ended. If no server listens, only
/// removes a stale socket.
///
/// # Errors
/// The server does not end within a minute, or belongs to another user.
pub fn end(socket: &Path) -> Result<(), Error> {
    match Server::find(socket)? {
        Found::Listens(server) => server.end(),
        Found::Ended | Found::Unknown => Ok(()),
    }
}

/// Whether a process of this network namespace has a socket open that was bound at this path, even
/// if the path was removed since.
pub(crate) fn is_open(socket: &Path) -> bool {
    let sockets = fs::read("/proc/net/unix").unwrap_or_default();
    let name = [b" ", socket.as_os_str().as_bytes()].concat();
    sockets.split(|byte| *byte == b'\n').any(|line| line.ends_with(&name))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_server_is_found_by_its_connections_without_its_socket() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let _client = UnixStream::connect(&socket).expect("it listens");
        let (connection, _) = listener.accept().expect("a client");
        drop(listener);
        assert!(matches!(Server::find(&socket), Ok(Found::Unknown)));
        fs::remove_file(&socket).expect("it is there");
        assert!(is_open(&socket));
        assert!(!is_open(&folder.path().join("sock")));
        drop(connection);
        assert!(!is_open(&socket));
    }

    #[test]
    fn the_socket_of_a_server_that_was_killed_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        end(&socket).expect("there is nothing");
        drop(UnixListener::bind(&socket).expect("a socket"));
        end(&socket).expect("no server listens");
        assert!(!socket.exists());
        // Another file is not touched.
        fs::write(&socket, "text").expect("a file");
        end(&socket).expect("no server listens");
        assert_eq!(fs::read(&socket).expect("it is there"), b"text");
    }
}
