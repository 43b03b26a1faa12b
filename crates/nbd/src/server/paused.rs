//! Connections that have paused: what a connection is between two sessions, and all that another process needs to go on
//! with it.

use blockhouse_engine::Stream;

use crate::handshake::NegotiatedOptions;

/// What a connection goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PausedSession {
    /// What the handshake agreed on.
    pub options: NegotiatedOptions,
    /// What was received, and belongs to no request that was executed: whole requests, and the first part of one. Up to
    /// a request with its payload, and 128 KiB.
    pub received: Vec<u8>,
    /// Whether it has ever sent a request.
    pub is_used: bool,
}

/// A connection that has paused: every request that was executed has got its reply, and no operation is in flight on its
/// socket.
#[derive(Clone, Debug)]
pub struct PausedConnection {
    /// Which listening socket it came by: 0 is the one that [`Server::serve`](crate::Server::serve) was called for first.
    pub socket: usize,
    /// The connection.
    pub stream: Stream,
    /// What it goes on from.
    pub session: PausedSession,
}
