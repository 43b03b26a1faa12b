//! The other end of a connection.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use blockhouse_engine::{Stream, peer_process};
use rustix::fd::AsFd;
use rustix::net::{AddressFamily, getpeername, sockopt};

/// A client as identified by the kernel. The connections of a peer are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// A process of this host, by its id.
    Process(i32),
    /// A host that connects over TCP, which may be this host. An IPv6 host is identified by its /64
    /// network.
    Host(IpAddr),
    /// The kernel does not identify the peer, as for a process of another PID namespace.
    Unknown,
}

/// The kind of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Unix.
    Unix,
    /// TCP.
    Tcp,
}

impl Transport {
    /// The kind of `listener`.
    pub fn of(listener: impl AsFd) -> Self {
        match sockopt::socket_domain(&listener) {
            Ok(AddressFamily::UNIX) => Self::Unix,
            _ => Self::Tcp,
        }
    }

    /// Sets the options of an accepted connection. A TCP connection is probed after `keepalive` of
    /// silence. Errors are ignored: the connection works without the options.
    pub fn configure(self, stream: &Stream, keepalive: Option<Duration>) {
        if self == Self::Unix {
            return;
        }
        // Without Nagle's algorithm, small replies are sent before earlier data is acknowledged.
        let _ = sockopt::set_tcp_nodelay(stream, true);
        let Some(idle) = keepalive else { return };
        let _ = sockopt::set_tcp_keepidle(stream, idle);
        let _ = sockopt::set_tcp_keepintvl(stream, idle / KEEPALIVE_PROBES);
        let _ = sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES);
        let _ = sockopt::set_socket_keepalive(stream, true);
    }

    /// The other end of a stream.
    pub fn peer(self, stream: &Stream) -> Peer {
        match self {
            Self::Unix => peer_process(stream).ok().flatten().map_or(Peer::Unknown, Peer::Process),
            Self::Tcp => {
                let address = getpeername(stream).ok().flatten();
                let address = address.and_then(|address| SocketAddr::try_from(address).ok());
                address.map_or(Peer::Unknown, |address| Peer::Host(host(address.ip())))
            }
        }
    }
}

/// The number of unanswered probes after which the connection is dropped.
const KEEPALIVE_PROBES: u32 = 4;

fn host(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)))
        }
        address => address,
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(id) => write!(f, "process {id}"),
            Self::Host(address @ IpAddr::V6(v6)) if !v6.is_loopback() => write!(f, "{address}/64"),
            Self::Host(address) => address.fmt(f),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::net::{SocketType, socket};

    use super::*;

    #[test]
    fn a_unix_peer_without_an_id_is_unknown() {
        let peer = |socket| Transport::Unix.peer(&Stream::new(socket).unwrap());
        let own = i32::try_from(std::process::id()).unwrap();
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(peer(one.into()), Peer::Process(own));
        // Without a peer the kernel returns 0, as for a peer of another PID namespace.
        let alone = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        assert_eq!(peer(alone), Peer::Unknown);
    }
}
