//! Paused connections: their state between two sessions, and everything that another process needs
//! to continue them.

use blockhouse_engine::Stream;

use crate::handshake::NegotiatedOptions;

/// The state from which a connection resumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PausedSession {
    /// The options of the handshake.
    pub options: NegotiatedOptions,
    /// The received bytes that belong to no executed request: complete requests, and the first part
    /// of another. At most one request with its payload, and 128 KiB.
    pub received: Vec<u8>,
    /// Whether the client has ever sent a request.
    pub is_used: bool,
}

/// A connection that has paused: every request that was executed has got its reply, and no
/// operation is in flight on its socket.
#[derive(Clone, Debug)]
pub struct PausedConnection {
    /// The listening socket that accepted it: 0 is the one that
    /// [`Server::serve`](crate::Server::serve) was called for first.
    pub socket: usize,
    /// The connection.
    pub stream: Stream,
    /// The session from which the connection resumes.
    pub session: PausedSession,
}
