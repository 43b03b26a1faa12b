//! Connects to a server.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use blockhouse_nbd_protocol::uri::Address;
use socket2::{Domain, SockAddr, SockRef, Socket, TcpKeepalive, Type};

use crate::blocking::run_blocking;

/// Idle time after which the kernel probes a TCP server.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// The number of unanswered probes after which the connection fails, in as much time again. While
/// sent bytes are not acknowledged, the kernel's limit for those applies (`tcp_retries2`).
/// TCP_USER_TIMEOUT would be shorter, but also ends the connection to a server that stops reading.
const KEEPALIVE_PROBES: u32 = 4;

/// Connects on a thread of its own, because the name look-up and the connect block.
pub(super) async fn connect(address: Address, time: Duration) -> io::Result<OwnedFd> {
    run_blocking("blockhouse-connect", move || connect_blocking(&address, time)).await?
}

fn connect_blocking(address: &Address, time: Duration) -> io::Result<OwnedFd> {
    match address {
        Address::Unix(path) => connect_unix(path, time),
        Address::Tcp { host, port } => {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
            for address in (host.as_str(), *port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, time) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        let keepalive = TcpKeepalive::new()
                            .with_time(KEEPALIVE)
                            .with_interval(KEEPALIVE / KEEPALIVE_PROBES)
                            .with_retries(KEEPALIVE_PROBES);
                        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
                        return Ok(stream.into());
                    }
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

/// Connects within `time`. The limit is set as the socket's send timeout, which is how long the
/// kernel's `connect` waits if the server's backlog is full.
fn connect_unix(path: &Path, time: Duration) -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_write_timeout(Some(time))?;
    match socket.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the server takes no more clients",
            ));
        }
        outcome => outcome?,
    }
    socket.set_write_timeout(None)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_vanishes_is_noticed_within_two_minutes() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = Address::Tcp { host: "127.0.0.1".into(), port };
        let socket = connect_blocking(&address, KEEPALIVE).unwrap();
        let socket = SockRef::from(&socket);
        assert!(socket.keepalive().unwrap());
        let probes =
            socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        let time = socket.tcp_keepalive_time().unwrap() + probes;
        assert!(time <= Duration::from_secs(120), "{time:?}");
    }
}
