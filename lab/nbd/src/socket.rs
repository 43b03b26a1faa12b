//! Connections on which the caller chooses every byte.

use std::io::{ErrorKind, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

/// A server that is silent for this long has hung.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// TCP.
    Tcp(SocketAddr),
}

/// Connects, and gives every later read and write a deadline.
///
/// # Panics
/// When no server listens there.
pub fn connect(address: &Address) -> Socket {
    let (domain, target) = match address {
        Address::Unix(path) => (Domain::UNIX, SockAddr::unix(path).expect("a short path")),
        Address::Tcp(address) => (Domain::for_address(*address), SockAddr::from(*address)),
    };
    let socket = Socket::new(domain, Type::STREAM, None).expect("a socket");
    socket.connect(&target).unwrap_or_else(|error| panic!("connect to {address:?}: {error}"));
    socket.set_read_timeout(Some(TIMEOUT)).expect("a deadline");
    socket.set_write_timeout(Some(TIMEOUT)).expect("a deadline");
    socket
}

/// Closes without `NBD_CMD_DISC`; over TCP the server gets a reset.
pub fn reset(socket: Socket) {
    // Unix sockets have no SO_LINGER; their peers see an error if bytes were left unread.
    let _ = socket.set_linger(Some(Duration::ZERO));
    drop(socket);
}

/// Waits for the end of the connection; returns whether no other byte came before it.
///
/// # Panics
/// When nothing comes before the timeout.
pub fn is_closed<S: Read>(socket: &mut S) -> bool {
    match socket.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => true,
        Err(error) => panic!("neither a word nor an end: {error}"),
    }
}
