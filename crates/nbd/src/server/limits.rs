//! The limits of a server's clients.

use std::time::Duration;

use blockhouse_core::InFlightLimits;

use crate::proto::MAX_PAYLOAD;
use crate::session::ConnectionLimits;

/// How long a client may make no progress after shutdown was requested.
const STALL_AT_END: Duration = Duration::from_secs(2);

/// The limits of clients.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once. When all are taken, a client that holds few of them gets one from
    /// those that hold many, or that never sent a request; otherwise it waits.
    pub connections: usize,
    /// The time that a handshake may take, and the time that a client may wait to be admitted
    /// before its handshake.
    pub handshake: Duration,
    /// How long a client may make no progress while it receives its replies or sends a request;
    /// `None` is no limit.
    pub stall: Option<Duration>,
    /// How long a client may send no request; `None` is no limit.
    pub idle: Option<Duration>,
    /// The time without data after which the kernel probes a TCP client, and also the additional
    /// time without an answer after which the connection is dropped. `None` disables the probes.
    pub keepalive: Option<Duration>,
    /// Requests in flight on one connection. Further requests wait in the socket.
    pub requests: usize,
    /// Bytes of payloads in flight on one connection; one request is always admitted. Further
    /// requests wait in the socket.
    pub bytes: usize,
    /// Bytes of payloads in flight on all connections together. Half of the bytes are reserved, in
    /// equal parts for the maximum number of connections. Connections share the other half; a
    /// request waits while its connection would hold more of it than is left. One request of each
    /// connection is always admitted.
    pub bytes_of_all: usize,
    /// The time that a drain leaves clients to receive their last replies.
    pub drain: Duration,
}

impl Default for Limits {
    /// 256 connections, 30 seconds to shake hands and to make progress, no limit to being idle, one
    /// minute of silence over TCP, 128 requests and 64 MiB in flight on each connection, 512
    /// MiB on all of them, 5 seconds to drain.
    fn default() -> Self {
        Self {
            connections: 256,
            handshake: Duration::from_secs(30),
            stall: Some(Duration::from_secs(30)),
            idle: None,
            keepalive: Some(Duration::from_secs(60)),
            requests: InFlightLimits::DEFAULT.requests,
            bytes: InFlightLimits::DEFAULT.bytes as usize,
            bytes_of_all: 16 * MAX_PAYLOAD as usize,
            drain: Duration::from_secs(5),
        }
    }
}

impl Limits {
    /// Bytes that each connection can always have.
    fn reserved(&self) -> usize {
        self.bytes_of_all / 2 / self.connections.max(1)
    }

    /// Bytes that connections share.
    pub(super) fn shared_bytes(&self) -> u64 {
        (self.bytes_of_all - self.reserved() * self.connections) as u64
    }

    /// The limits of one connection.
    pub(super) fn of_connection(&self) -> ConnectionLimits {
        ConnectionLimits {
            in_flight: InFlightLimits {
                requests: self.requests,
                bytes: self.bytes.min(self.bytes_of_all) as u64,
                ..InFlightLimits::DEFAULT
            },
            reserved: self.reserved(),
            stall: self.stall.unwrap_or(Duration::MAX),
            stall_at_end: STALL_AT_END.min(self.stall.unwrap_or(STALL_AT_END)),
            idle: self.idle,
        }
    }
}
